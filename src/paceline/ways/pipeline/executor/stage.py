"""A range of layers that runs batches of one orchestrator, in blocks of its own.

Law: whatever a batch says, nothing outside the leased blocks is read or written, nothing is read that this session has not written, and a batch
that is refused changes nothing. Kernels reach KV by address, and blocks still hold what an earlier session left there, so what comes from another
node is checked here, before they run: the batch, and whether its rows can be activations at all.

Stages run activations; the orchestrator alone knows tokens. A `StageBatch` says where each row's KV belongs. Shapes: T rows, D hidden, S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from paceline.core.errors import BadPipelineRequest, ShardCorrupt
from paceline.core.ids import BatchId, BlockId, SequenceId
from paceline.core.model import LayerRange
from paceline.engine.executor import Path, StepBatch
from paceline.engine.local import BlockTables, Int32, LayerRunner, WireBits, blocks_for, row_plan


@dataclass(frozen=True, slots=True)
class StageBatch:
    """One batch: columns of a table with an entry a sequence. Rows of a sequence are contiguous, in the order of the columns."""

    batch_id: BatchId
    sequences: Sequence[SequenceId]
    row_counts: Sequence[int]
    first_positions: Sequence[int]
    paths: Sequence[int]
    block_counts: Sequence[int]
    """Blocks that follow what is left of each sequence's table, cut at its first position."""
    blocks: Sequence[int]
    """Those blocks, one sequence after the other."""
    released: Sequence[SequenceId] = ()
    """Sequences to forget before this batch runs."""
    fills_to: int = 0
    """It fills KV of the layers before this one, and no others: those hold it already. 0: it goes through all."""

    @property
    def n_rows(self) -> int:
        return sum(self.row_counts)

    def behind(self, layers: LayerRange) -> StageBatch:
        """What these layers hand on: nothing but its id where no layers behind them lack its rows."""
        return StageBatch(self.batch_id, (), (), (), (), (), ()) if 0 < self.fills_to <= layers.stop else self


def without_tokens(batch: StepBatch, fills_to: int = 0) -> StageBatch:
    """What stages are told of a batch."""
    steps = batch.steps
    return StageBatch(
        batch.batch_id,
        [step.sequence for step in steps],
        [len(step.token_ids) for step in steps],
        [step.first_position for step in steps],
        [int(step.path) for step in steps],
        [len(step.new_blocks) for step in steps],
        [block for step in steps for block in step.new_blocks],
        batch.released,
        fills_to,
    )


LARGEST = 0x477F
"""The bits of the largest bf16 below 2^16, which fp16 could still carry. Residuals of real models stay far below; infinities and NaN are above."""


def check_activations(x_TD: WireBits, n_rows: int, width: int) -> None:
    """Refuse what can't be rows of a residual.

    Args:
        x_TD: bits of bf16.

    Raises:
        ShardCorrupt: another shape, or values that are not finite, or far too large.
    """
    if x_TD.shape != (n_rows, width):
        raise ShardCorrupt(f"Activations of shape {x_TD.shape} came where ({n_rows}, {width}) was due")
    if x_TD.size and int(np.bitwise_and(x_TD, 0x7FFF).max()) > LARGEST:
        raise ShardCorrupt("Activations came that are not finite, or beyond 2^16")


class StageBlocks:
    """The blocks of some layers of a runner as batches name them, for those who copy them (`machine.kv_spans.KvBlocks`).

    Args:
        base: the runner's block with which the first begins.
        run_length: blocks of the runner that one is made of.
    """

    def __init__(self, runner: LayerRunner[Any], layers: LayerRange, base: int = 0, run_length: int = 1) -> None:
        self.layers, self.numerics_id, self.kv_layout = layers, runner.numerics_id, runner.kv_layout
        self.block_size = run_length * runner.block_size
        self.layer_bytes = run_length * (runner.block_bytes // len(runner.layers))
        self.block_bytes = self.layer_bytes * len(layers)
        self._runner, self._base, self._run_length = runner, base, run_length

    @property
    def are_whole(self) -> bool:
        """They lie as the runner's own do: a part of the layers is what lies of them in any machine's block."""
        return self._run_length == 1

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        for own, data in self._own(block, into):
            self._runner.export_block(own, data, part or self.layers)

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        for own, piece in self._own(block, data):
            self._runner.import_block(own, piece, part or self.layers)

    def _own(self, block: BlockId, data: memoryview) -> Iterator[tuple[BlockId, memoryview]]:
        first, size = self._base + self._run_length * block, len(data) // self._run_length
        return ((BlockId(first + i), data[i * size : (i + 1) * size]) for i in range(self._run_length))


_PATHS = frozenset(int(path) for path in Path)


class Stage:
    """One session's part of a runner. For one thread.

    Args:
        runner: holds the layers, maybe more, and the blocks, certainly more.
        base_block: the first block leased, in the runner's pool.
        n_blocks: leased from there on.
        max_context: positions of a sequence at most.
    """

    def __init__(
        self, runner: LayerRunner[Any], layers: LayerRange, *, base_block: int, n_blocks: int, max_rows: int, max_context: int, width: int
    ) -> None:
        self._runner, self._layers = runner, layers
        self._base, self._leased = base_block, n_blocks
        # Batches name blocks of `_block_size` tokens, each of which is a run of the runner's own. Tables hold the runner's.
        self._block_size, self._run_length, self._n_blocks = runner.block_size, 1, n_blocks
        self._max_rows, self._max_context, self._width = max_rows, max_context, width
        self._tables = BlockTables()
        self._reach: dict[SequenceId, int] = {}
        """Positions of each sequence that are written, from 0 on."""
        self._full: set[int] = set()
        """Blocks that this session has filled: those a new sequence may begin with."""

    def take_blocks_of(self, tokens: int) -> None:
        """Batches name blocks of so many tokens, all of them: asked before the first. Where they were of another size, nothing is held any more.

        Raises:
            BadPipelineRequest: such a block is no run of the runner's own, or more than is leased.
        """
        own = self._runner.block_size
        if tokens < 1 or tokens % own or tokens > self._leased * own:
            raise BadPipelineRequest(f"Blocks of {tokens} tokens can't be made of the {self._leased} blocks of {own} leased here")
        if tokens != self._block_size:
            self._tables, self._reach, self._full = BlockTables(), {}, set()
        self._block_size, self._run_length = tokens, tokens // own
        self._n_blocks = self._leased // self._run_length

    def run(self, batch: StageBatch, x_TD: WireBits) -> WireBits:
        """Run a batch's rows through the layers. The result is good until the runner's next batch.

        Raises:
            BadPipelineRequest: the batch can't be right.
            ShardCorrupt: the activations can't.
        """
        runner = self._runner
        check_activations(x_TD, len(x_TD), self._width)
        self._check(batch, len(x_TD))
        if not batch.sequences:
            return x_TD
        tables_SB = self._gain(batch)
        # Noted before the kernels run, because the next stage waits for what follows them.
        self._note_written(batch, tables_SB)
        return runner.to_wire(self._compute(batch, tables_SB, runner.from_wire(x_TD)))

    @property
    def blocks(self) -> StageBlocks:
        """Its blocks, as batches name them from now on."""
        return StageBlocks(self._runner, self._layers, self._base, self._run_length)

    def check_blocks(self, blocks: Sequence[int], *, full: bool) -> None:
        """Refuse blocks that this session has not.

        Args:
            full: they are to be those that it has filled.

        Raises:
            BadPipelineRequest: it has not.
        """
        if len(set(blocks)) != len(blocks) or (blocks and not 0 <= min(blocks) <= max(blocks) < self._n_blocks):
            raise BadPipelineRequest(f"Blocks are named outside the {self._n_blocks} leased, or twice")
        if full and not self._full.issuperset(blocks):
            raise BadPipelineRequest("Blocks are named that this session has not filled")

    def note_filled(self, blocks: Sequence[int]) -> None:
        """These were filled otherwise than by running rows. For any thread; it must be known before a batch names them."""
        self._full.update(blocks)

    def run_activations(self, batch: StageBatch, x_TD: Any) -> Any:
        """`run`, for a runner's own activations and batches that need no check: the orchestrator's stage."""
        return self._compute(batch, self._gain(batch), x_TD)

    def _gain(self, batch: StageBatch) -> Int32:
        """Tables of a batch's sequences, with what they gain."""
        tables, base = self._tables, self._base
        if batch.released:
            tables.forget(batch.released)
            for sequence in batch.released:
                self._reach.pop(sequence, None)
        at, run = 0, self._run_length
        for sequence, first, count in zip(batch.sequences, batch.first_positions, batch.block_counts, strict=True):
            named = batch.blocks[at : at + count]
            own = [base + block for block in named] if run == 1 else [base + run * block + i for block in named for i in range(run)]
            tables.put(sequence, run * blocks_for(first, self._block_size), own)
            at += count
        return tables.of(batch.sequences)

    def _compute(self, batch: StageBatch, tables_SB: Int32, x_TD: Any) -> Any:
        plan = row_plan(batch.row_counts, batch.first_positions, batch.paths, tables_SB)
        return self._runner.run_layers(x_TD, plan, self._layers)

    def _note_written(self, batch: StageBatch, tables_SB: Int32) -> None:
        size, run, reach = self._block_size, self._run_length, self._reach
        for s, (sequence, count, first) in enumerate(zip(batch.sequences, batch.row_counts, batch.first_positions, strict=True)):
            end = first + count
            reach[sequence] = end
            if end // size > first // size:
                self._full.update(((tables_SB[s, run * (first // size) : run * (end // size) : run] - self._base) // run).tolist())

    def _check(self, batch: StageBatch, n_rows: int) -> None:
        """Refuse what can't be right.

        Raises:
            BadPipelineRequest: naming what is wrong.
        """
        n, name = len(batch.sequences), f"Batch {batch.batch_id}"
        columns = (batch.row_counts, batch.first_positions, batch.paths, batch.block_counts)
        if any(len(column) != n for column in columns) or len(set(batch.sequences)) != n:
            raise BadPipelineRequest(f"{name} has columns of different lengths, or a sequence twice")
        if batch.n_rows != n_rows or n_rows > self._max_rows:
            raise BadPipelineRequest(f"{name} says {batch.n_rows} rows, has {n_rows}, and may have {self._max_rows}")
        if sum(batch.block_counts) != len(batch.blocks):
            raise BadPipelineRequest(f"{name} names {len(batch.blocks)} blocks for {sum(batch.block_counts)}")
        if batch.blocks and not 0 <= min(batch.blocks) <= max(batch.blocks) < self._n_blocks:
            raise BadPipelineRequest(f"{name} names blocks outside the {self._n_blocks} leased")
        released, length, size = frozenset(batch.released), self._tables.length, self._block_size
        new = at = 0
        for sequence, count, first, path, gained in zip(batch.sequences, *columns, strict=True):
            held = 0 if sequence in released else length(sequence) // self._run_length
            if not held:
                new += 1
                written = size * sum(1 for _ in takewhile(self._full.__contains__, batch.blocks[at : at + gained]))
            else:
                written = self._reach[sequence]
            at += gained
            blocks, end = min(held, blocks_for(first, size)) + gained, first + count
            if count < 1 or first < 0 or gained < 0 or path not in _PATHS:
                raise BadPipelineRequest(f"{name} has a sequence with {count} rows from {first} on path {path}")
            if first > written:
                raise BadPipelineRequest(f"{name} has rows from position {first} of a sequence that is written up to {written}")
            if end > self._max_context or end > blocks * size or blocks > self._n_blocks:
                raise BadPipelineRequest(f"{name} has rows up to position {end} of a sequence with {blocks} blocks")
        if new:
            kept = len(self._tables) - sum(length(sequence) > 0 for sequence in released)
            if kept + new > self._n_blocks * size:
                raise BadPipelineRequest(f"{name} makes {kept + new} sequences for {self._n_blocks} blocks")
