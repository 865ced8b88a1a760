"""How the engine runs a model without knowing how the model is spread.

A `StepBatch` is complete in itself but for its deltas (blocks gained, sequences released), so a rank or a stage holds no
scheduling state that could drift. `submit` and `collect` are apart so that a pipeline stays full: batch N+1 enters while N is inside.

Shapes: T rows (tokens) of a batch, R rows that need logits, S sequences, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.generation import Notice
from paceline.core.ids import BatchId, BlockId, SequenceId


class Path(IntEnum):
    """Which kernels a row runs: decided by its position alone, never by how it is batched (byte identity, rule 1)."""

    PROMPT = 0
    GENERATED = 1


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The rows one sequence runs in one batch. All are of one path; a sequence stands in a batch at most once."""

    sequence: SequenceId
    epoch: int
    """Raised when guessed rows turn out wrong: a collected row of an older epoch is stale."""
    token_ids: Sequence[int]
    first_position: int
    """Position of the first row. Whatever the sequence held from here on is forgotten, blocks that begin behind it included: a rejected draft
    needs no message."""
    path: Path
    new_blocks: Sequence[BlockId]
    """Those that follow what is left of the sequence's table (all of them, the first time and after a preemption)."""
    logits_rows: Sequence[int]
    """Which of the rows need logits: the last for decode, all for verification, none inside a prefill."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass."""

    batch_id: BatchId
    steps: tuple[SequenceStep, ...]
    released: tuple[SequenceId, ...] = ()
    """Sequences whose tables are to be forgotten before this batch runs (ended or preempted)."""
    most_blocks: int = 0
    """Of KV that a live sequence may come to need."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits of a batch's rows, in the order of its steps and, within a step, of its `logits_rows`."""

    batch_id: BatchId
    logits_RV: npt.NDArray[np.float32]
    """Valid until the next `submit`; may be written to by its reader."""


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """What was computed of a live sequence before a loss."""

    sequence: SequenceId
    token_ids: Sequence[int]
    """Those whose rows were collected, from position 0 on. Never none."""
    n_prompt: int
    blocks: Sequence[BlockId]
    """That hold them. Sequences that begin alike may share the first."""


class Executor(Protocol):
    """Runs step batches of one model. Owned by engine; every way of spreading a model implements it."""

    @property
    def depth(self) -> int:
        """Batches that may be in flight: a pipeline's stages, 1 alone. May change where KV was lost, as `n_blocks` and `numerics_id` may."""
        ...

    @property
    def n_blocks(self) -> int:
        """KV blocks that the engine may hand out: ids 0 .. n_blocks - 1."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a block holds. May change where KV was lost: others may keep more of them together."""
        ...

    @property
    def one_path(self) -> bool:
        """Prompt and generated rows run the same kernels, so generated blocks may enter the prefix cache too (rule 3)."""
        ...

    @property
    def numerics_id(self) -> str:
        """Hash of what the kernels compute here; equal ids give equal bytes (rule 7)."""
        ...

    @property
    def holds_identity(self) -> bool:
        """A row's bytes don't depend on what runs beside it, so drafts may be verified. May change where KV was lost."""
        ...

    def ready(self) -> bool:
        """Whether a batch may be submitted. Where it may not yet, as while machines are looked for in place of lost ones, waits a moment and says False.

        Raises:
            ExecutorUnavailable: none were found, and none are looked for until this is asked again.
        """
        ...

    def restore(self, held: Sequence[HeldSequence]) -> Collection[SequenceId] | None:
        """After a loss, once it is ready again: have KV as it was before, as far as that costs less than to begin anew. Takes a moment.

        Args:
            held: what was computed, the oldest first.

        Returns:
            Whose KV is as it was; that of all others is void. None: it is being made; ask again.

        Raises:
            ExecutorLost: as `collect` does.
        """
        ...

    def notices(self) -> Sequence[Notice]:
        """What clients may want to know that happened since this was asked last."""
        ...

    def submit(self, batch: StepBatch) -> None:
        """Start a batch. At most `depth` may be in flight.

        Raises:
            ExecutorLost: as `collect` does.
        """
        ...

    def recall(self, batch_id: BatchId) -> None:
        """Have a batch in flight end early, where that is possible; it then has no output. Any thread may ask, whatever became of the batch."""
        ...

    @property
    def advanced(self) -> int:
        """Grows with every part of a batch that was run: a layer here, a batch of others. Any thread may look."""
        ...

    def collect(self, deadline: float) -> StepOutput | None:
        """Wait for the oldest batch in flight, until `deadline` on the monotonic clock.

        Returns:
            None where it was recalled: the KV of its rows is void, and all before them stands.

        Raises:
            ExecutorLost: spans of the model can't be reached; what was in flight is gone.
        """
        ...

    def reset(self) -> None:
        """Forget all sequences and what is in flight, for an engine that begins anew: the one before failed. Weights stay."""
        ...

    def close(self) -> None:
        """Stop threads and processes, free memory. Idempotent."""
        ...
