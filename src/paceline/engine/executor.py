"""How the engine runs a model without knowing how the model is spread.

A `StepBatch` is complete in itself except for its deltas (blocks gained, sequences released), so a rank or a stage holds no scheduling state that could drift.
`submit` and `collect` are separate so that a pipeline stays full: batch N+1 enters while N is inside.

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
    """The kernels that a row runs. Its position alone decides them, never how it is batched (byte identity, rule 1)."""

    PROMPT = 0
    GENERATED = 1


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The rows that one sequence runs in one batch. All are of one path; a sequence is in a batch at most once."""

    sequence: SequenceId
    epoch: int
    """Raised when draft rows turn out wrong: a collected row of an older epoch is stale."""
    token_ids: Sequence[int]
    first_position: int
    """Position of the first row. Everything that the sequence held from here on is forgotten, including blocks that begin after it: a rejected draft needs no
    message.
    """
    path: Path
    new_blocks: Sequence[BlockId]
    """Blocks that follow the rest of the sequence's table. The first time, and after a preemption, they are all of its blocks."""
    logits_rows: Sequence[int]
    """Indices of the rows that need logits: the last for decode, all for verification, none inside a prefill."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass."""

    batch_id: BatchId
    steps: tuple[SequenceStep, ...]
    released: tuple[SequenceId, ...] = ()
    """Sequences that ended or were preempted; their tables are forgotten before this batch runs."""
    most_blocks: int = 0
    """Maximum number of KV blocks that a live sequence can need."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits of a batch's rows, in the order of its steps and, within a step, of its `logits_rows`."""

    batch_id: BatchId
    logits_RV: npt.NDArray[np.float32]
    """Valid until the next `submit`; the reader may write to it."""


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """The rows of a live sequence that were computed before a loss."""

    sequence: SequenceId
    token_ids: Sequence[int]
    """Tokens with collected rows, from position 0 on. Never empty."""
    n_prompt: int
    blocks: Sequence[BlockId]
    """Blocks that hold these tokens' KV. Sequences that begin alike may share the first ones."""


class Executor(Protocol):
    """Runs step batches of one model. The engine uses it; every way of spreading a model implements it."""

    @property
    def depth(self) -> int:
        """Maximum batches in flight: the stages of a pipeline, or 1 on one machine. A loss of KV may change it, as it may `n_blocks` and `numerics_id`."""
        ...

    @property
    def n_blocks(self) -> int:
        """Number of KV blocks that the engine may hand out: ids 0 .. n_blocks - 1."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block. May change when KV is lost, because replacement machines may use larger blocks."""
        ...

    @property
    def one_path(self) -> bool:
        """Prompt and generated rows run the same kernels, so generated blocks may enter the prefix cache too (rule 3)."""
        ...

    @property
    def numerics_id(self) -> str:
        """Hash of what the kernels compute; equal ids give equal bytes (rule 7). Empty: no bytes are promised, as where the stages of a pipeline compute with
        other numerics than one another. May change when KV is lost; no KV of before stands then.
        """
        ...

    @property
    def holds_identity(self) -> bool:
        """True if a row's bytes don't depend on the other rows of its batch, so that drafts may be verified. May change when KV is lost."""
        ...

    def ready(self) -> bool:
        """Return whether a batch may be submitted. If not yet, such as while lost machines are being replaced, wait a moment and return False.

        Raises:
            ExecutorUnavailable: no machines were found. The search resumes when this is called again.
        """
        ...

    def restore(self, held: Sequence[HeldSequence]) -> Collection[SequenceId] | None:
        """Restore KV after a loss, once the executor is ready again, as far as that costs less than to compute it again. Takes a moment.

        Args:
            held: what was computed, the oldest first.

        Returns:
            The sequences with restored KV; that of all others is void. None: still in progress; call again.

        Raises:
            ExecutorLost: as `collect` does.
        """
        ...

    def notices(self) -> Sequence[Notice]:
        """Return the events since the last call that clients may want to know."""
        ...

    def submit(self, batch: StepBatch) -> None:
        """Start a batch. At most `depth` may be in flight.

        Raises:
            ExecutorLost: as `collect` does.
        """
        ...

    def recall(self, batch_id: BatchId) -> None:
        """Ask for a batch in flight to end early, where that is possible; it then has no output. Any thread may call this, for any batch past or present."""
        ...

    @property
    def advanced(self) -> int:
        """A counter that grows with every part of a batch that was run: a layer on this machine, a batch on others. Any thread may read it."""
        ...

    def collect(self, deadline: float) -> StepOutput | None:
        """Wait for the oldest batch in flight, until `deadline` on the monotonic clock.

        Returns:
            The output. None if the batch was recalled: the KV of its rows is void, and all before them stands.

        Raises:
            ExecutorLost: spans of the model can't be reached; the batches in flight are gone.
        """
        ...

    def reset(self) -> None:
        """Forget all sequences and all batches in flight, for a new engine after the one before failed. Weights stay."""
        ...

    def close(self) -> None:
        """Stop threads and processes, free memory. Idempotent."""
        ...
