"""The executor of one machine. It keeps block tables from the batches' deltas, in one array, so that a batch's tables are one gather, and drives a
`LayerRunner`.

Shapes: T rows, S sequences of a batch, B blocks of the longest table among them, R rows with logits, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.core.generation import Notice
from paceline.core.ids import BatchId, BlockId, SequenceId
from paceline.core.model import LayerRange
from paceline.engine.executor import HeldSequence, StepBatch, StepOutput

_NO_BLOCK = -1


class BlockTables:
    """Block tables by sequence. Rows of the array are reused; it grows and never shrinks."""

    def __init__(self) -> None:
        self._array = np.full((8, 8), _NO_BLOCK, np.int32)
        self._row: dict[SequenceId, int] = {}
        self._length: dict[SequenceId, int] = {}
        self._free_rows = list(range(8))

    def update(self, batch: StepBatch, block_size: int) -> None:
        """Forget the sequences that a batch releases, and all that its sequences held from their first positions on. Then add the blocks they gained."""
        self.forget(batch.released)
        for step in batch.steps:
            self.put(step.sequence, blocks_for(step.first_position, block_size), step.new_blocks)

    def forget(self, sequences: Sequence[SequenceId]) -> None:
        """Drop the tables of sequences. Unknown sequences are ignored."""
        for sequence in sequences:
            row = self._row.pop(sequence, None)
            if row is not None:
                self._array[row, : self._length.pop(sequence)] = _NO_BLOCK
                self._free_rows.append(row)

    def length(self, sequence: SequenceId) -> int:
        """Return the number of blocks in a sequence's table; 0 if it has none."""
        return self._length.get(sequence, 0)

    def __len__(self) -> int:
        return len(self._row)

    def of(self, sequences: Sequence[SequenceId]) -> npt.NDArray[np.int32]:
        """Return the tables of sequences, [S, B], padded with -1. A copy, C-contiguous."""
        longest = max((self._length[sequence] for sequence in sequences), default=0)
        return self._array[:, :longest][[self._row[sequence] for sequence in sequences]]

    def put(self, sequence: SequenceId, kept: int, blocks: Sequence[int]) -> None:
        """Cut a table to its first `kept` blocks, if it has more, and append `blocks`. The first blocks create the table."""
        row = self._row.get(sequence)
        if row is None:
            if not self._free_rows:
                self._free_rows = list(range(len(self._array), 2 * len(self._array)))
                self._array = np.vstack((self._array, np.full_like(self._array, _NO_BLOCK)))
            row = self._row[sequence] = self._free_rows.pop()
            self._length[sequence] = 0
        length = self._length[sequence]
        if kept < length:
            self._array[row, kept:length] = _NO_BLOCK
            length = kept
        elif not blocks:
            return
        start, stop = length, length + len(blocks)
        self._length[sequence] = stop
        while stop > self._array.shape[1]:
            self._array = np.hstack((self._array, np.full_like(self._array, _NO_BLOCK)))
        self._array[row, start:stop] = blocks


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold this many tokens."""
    return -(-tokens // block_size)


_GIVE_UP, _LAYERS = 0, 1
"""Indices of the words (int64). Compiled code knows them too: `backends.cpu.team`."""


class StepWatch:
    """Progress and cancellation of a running step, one batch on one machine, for other threads.

    The words lie at a fixed address, for compiled code that reads and writes them between two tasks, where no thread holds the interpreter.
    """

    __slots__ = ("_words", "address")

    def __init__(self) -> None:
        self._words = np.zeros(2, np.int64)
        self.address = int(self._words.ctypes.data)

    def give_up(self) -> None:
        """Ask the running step to end as soon as it can. Its result and the KV of its rows are void."""
        self._words[_GIVE_UP] = 1

    @property
    def gives_up(self) -> bool:
        return bool(self._words[_GIVE_UP])

    def layer_done(self) -> None:
        """Count another finished layer."""
        self._words[_LAYERS] += 1

    @property
    def layers_done(self) -> int:
        return int(self._words[_LAYERS])


Int32 = npt.NDArray[np.int32]
WireBits = npt.NDArray[np.uint16]
Activations = TypeVar("Activations")


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The places of a batch's rows: all that a runner needs in addition to the activations. Rows of a sequence are contiguous."""

    row_start_S: Int32
    """First row of each sequence in the batch."""
    n_rows_S: Int32
    first_position_S: Int32
    path_S: Int32
    """`Path` of each sequence's rows."""
    tables_SB: Int32
    """Block ids, padded with -1. Entry b holds positions [b * block_size, (b + 1) * block_size)."""
    watch: StepWatch | None = None
    """Counts finished layers. Runners check it between layers and end early if it gives up."""


def row_plan(
    n_rows: Sequence[int], first_positions: Sequence[int], paths: Sequence[int], tables_SB: Int32, watch: StepWatch | None = None
) -> RowPlan:
    """Return the plan of rows that are ordered by sequence.

    Args:
        n_rows: number of rows of each sequence.
        first_positions: position of each sequence's first row.
        paths: `Path` of each sequence's rows.
        tables_SB: as in `RowPlan`.
        watch: as in `RowPlan`.
    """
    # One array serves for four, because making a small array costs as much as one of its rows.
    columns = np.array([[0, *accumulate(n_rows)][:-1], n_rows, first_positions, paths], np.int32)
    return RowPlan(columns[0], columns[1], columns[2], columns[3], tables_SB, watch)


class LayerRunner(Protocol[Activations]):
    """A backend's view of a range of layers: it holds weights and KV, and no scheduling state.

    Each method is invariant: a row's result does not depend on the other rows, on how a prompt was cut, or on threads. The activations type is the backend's
    own; across a wire it is bf16 [T, D].
    """

    @property
    def layers(self) -> LayerRange: ...

    @property
    def n_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def one_path(self) -> bool: ...
    @property
    def numerics_id(self) -> str: ...
    @property
    def holds_identity(self) -> bool:
        """True if the kernels were seen to keep the invariance rules here. Otherwise an answer may depend on the other rows of its batches."""
        ...

    def embed(self, token_ids_T: Int32) -> Activations: ...

    def run_layers(self, x_TD: Activations, plan: RowPlan, part: LayerRange | None = None) -> Activations:
        """Run the layers, writing K and V of the rows into their blocks. Returns the residual, bf16, after the last layer.

        May reuse one buffer from call to call.

        Args:
            x_TD: the residual before the first of these layers.
            plan: places of the rows.
            part: some of the runner's layers; None: all.
        """
        ...

    def to_wire(self, x_TD: Activations) -> WireBits:
        """Return the bits of the residual, [T, D] of bf16. May be a view of the result of `run_layers`."""
        ...

    def from_wire(self, x_TD: WireBits) -> Activations:
        """Return the residual with these bits."""
        ...

    def logits(self, x_TD: Activations, rows_R: Int32) -> npt.NDArray[np.float32]:
        """Return the logits of these rows after final norm and head, float32 [R, V]. May reuse one buffer from call to call."""
        ...

    @property
    def kv_layout(self) -> str:
        """Name of the byte layout of a block. Blocks may be copied between runners with equal layers, layout and numerics id."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values in all layers."""
        ...

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        """Copy a block out. Any thread may call this, at the same time as batches that do not write the block.

        Args:
            part: some of the layers, each of which has the same number of bytes; None: all.

        Raises:
            ExecutorLost: all KV is void. `import_block` raises it too. Callers treat the block as missing; the engine learns of the loss on its own.
        """
        ...

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        """Fill a block with exported bytes of the same layers. Any thread may call this, at the same time as batches that do not name the block."""
        ...

    def close(self) -> None: ...


def token_ids(batch: StepBatch) -> Int32:
    """Return the token ids of all rows, [T]."""
    return np.array([token for step in batch.steps for token in step.token_ids], np.int32)


def logits_rows(batch: StepBatch) -> Int32:
    """Return the indices of the batch's rows that need logits, [R]."""
    rows: list[int] = []
    start = 0
    for step in batch.steps:
        rows += [start + row for row in step.logits_rows]
        start += len(step.token_ids)
    return np.array(rows, np.int32)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A batch as arrays, so that `collect` can go straight to the kernels."""

    batch_id: BatchId
    token_ids_T: Int32
    plan: RowPlan
    rows_R: Int32
    """Indices into T of the rows that need logits."""
    watch: StepWatch


class LocalExecutor(Generic[Activations]):
    """Runs whole batches on one runner, in the caller's thread."""

    depth = 1

    def __init__(self, runner: LayerRunner[Activations]) -> None:
        self.n_blocks, self.block_size = runner.n_blocks, runner.block_size
        self.one_path, self.numerics_id, self.holds_identity = runner.one_path, runner.numerics_id, runner.holds_identity
        self._runner = runner
        self._tables = BlockTables()
        self._pending: deque[_Prepared] = deque()
        self._layers_done = 0
        """Layers run by finished batches."""

    @property
    def advanced(self) -> int:
        return self._layers_done + sum(batch.watch.layers_done for batch in tuple(self._pending))

    @property
    def lacks(self) -> str | None:
        """The lost part that is being replaced; None: nothing is missing. Any thread may read it."""
        return None

    @property
    def away(self) -> tuple[int, ...]:
        """Ranks that run on other machines now. Any thread may read it."""
        return ()

    def ready(self) -> bool:
        return True

    def restore(self, held: Sequence[HeldSequence]) -> tuple[()]:
        """Return nothing, because this executor never loses KV."""
        del held
        return ()

    def notices(self) -> Sequence[Notice]:
        return ()

    def submit(self, batch: StepBatch) -> None:
        if len(self._pending) >= self.depth:
            raise RuntimeError(f"batch {batch.batch_id} submitted with {len(self._pending)} in flight; depth is {self.depth}")
        self._tables.update(batch, self.block_size)
        steps = batch.steps
        tables_SB = self._tables.of([step.sequence for step in steps])
        watch = StepWatch()
        plan = row_plan(
            [len(step.token_ids) for step in steps],
            [step.first_position for step in steps],
            [step.path for step in steps],
            tables_SB,
            watch,
        )
        self._pending.append(_Prepared(batch.batch_id, token_ids(batch), plan, logits_rows(batch), watch))

    def recall(self, batch_id: BatchId) -> None:
        for batch in tuple(self._pending):
            if batch.batch_id == batch_id:
                batch.watch.give_up()

    def collect(self, deadline: float) -> StepOutput | None:  # noqa: ARG002  the caller's own thread computes
        batch = self._pending[0]
        try:
            x = self._runner.run_layers(self._runner.embed(batch.token_ids_T), batch.plan)
            if batch.watch.gives_up:
                return None
            return StepOutput(batch.batch_id, self._runner.logits(x, batch.rows_R))
        finally:
            self._layers_done += batch.watch.layers_done
            self._pending.popleft()

    def reset(self) -> None:
        self._tables = BlockTables()
        self._pending.clear()

    def close(self) -> None:
        self.reset()
        self._runner.close()
