"""A pipeline in one thread: batches in flight, run in order when they are collected, and checked for what a real one would trip over.

Law it holds the scheduler to: a batch may neither write a block that a batch in flight names for another sequence, nor name a block that a
batch in flight writes for another sequence; and a sequence is in two batches in flight only where the later goes on behind the earlier, or takes back
what that guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from math import inf

from tests.fakes.null_backend import NullRunner

from paceline.core.errors import ExecutorLost
from paceline.core.ids import BatchId, BlockId, NodeId, SequenceId
from paceline.core.model import LayerRange, LayerSpan
from paceline.engine.executor import HeldSequence, StepBatch, StepOutput
from paceline.engine.local import LocalExecutor, blocks_for
from paceline.ways.pipeline.executor.restoring import Restored, restoring_batches


class InOrderExecutor:
    """An `Executor` of any depth over a `NullRunner`."""

    def __init__(
        self, runner: NullRunner, depth: int = 1, lose: Collection[int] = (), break_at: int | None = None, *, restores: bool = False
    ) -> None:
        """An executor with nothing in flight.

        Args:
            depth: how many may be in flight.
            lose: ordinals of `collect` at which all KV and all batches in flight are lost.
            break_at: ordinal of `collect` at which it fails for good.
            restores: whether it computes anew what is lost.
        """
        self.depth, self.n_blocks, self.block_size = depth, runner.n_blocks, runner.block_size
        self.one_path, self.numerics_id, self.holds_identity = runner.one_path, runner.numerics_id, runner.holds_identity
        self._runner = runner
        self._inner = LocalExecutor(runner)
        self._lose = frozenset(lose)
        self._break_at = break_at
        self._collects = 0
        self._recalled: set[BatchId] = set()
        self._tables: dict[SequenceId, list[BlockId]] = {}
        self._pending: dict[BatchId, StepBatch] = {}
        self._named: dict[BatchId, dict[SequenceId, frozenset[BlockId]]] = {}
        self._written: dict[BatchId, dict[SequenceId, frozenset[BlockId]]] = {}
        self._restores = restores
        self.restored = 0
        """Rows."""

    def ready(self) -> bool:
        return True

    def restore(self, held: Sequence[HeldSequence]) -> Collection[SequenceId]:
        if not self._restores:
            return ()
        ids = count()
        lacking = [Restored(each, 0) for each in held]
        for batch in restoring_batches(lacking, self.block_size, 8, lambda: BatchId(next(ids))):
            self.restored += sum(len(step.token_ids) for step in batch.steps)
            self._inner.submit(batch)
            self._inner.collect(inf)
        return [each.sequence for each in held]

    def notices(self) -> tuple[()]:
        return ()

    def submit(self, batch: StepBatch) -> None:
        assert len(self._pending) < self.depth, "more batches in flight than the executor is deep"
        for sequence in batch.released:
            self._tables.pop(sequence, None)
        named: dict[SequenceId, frozenset[BlockId]] = {}
        written: dict[SequenceId, frozenset[BlockId]] = {}
        for step in batch.steps:
            assert step.sequence not in named, "a sequence stands in a batch twice"
            table = self._tables.setdefault(step.sequence, [])
            first, last = step.first_position, step.first_position + len(step.token_ids) - 1
            del table[blocks_for(first, self.block_size) :]
            table.extend(step.new_blocks)
            named[step.sequence] = frozenset(table)
            written[step.sequence] = frozenset(table[first // self.block_size : last // self.block_size + 1])
        for other in (*self._pending, batch.batch_id):
            theirs_named, theirs_written = (named, written) if other == batch.batch_id else (self._named[other], self._written[other])
            _assert_apart(written, theirs_named)
            _assert_apart(theirs_written, named)
        for earlier in self._pending.values():
            _assert_follows(earlier, batch)
        self._pending[batch.batch_id] = batch
        self._named[batch.batch_id] = named
        self._written[batch.batch_id] = written

    def recall(self, batch_id: BatchId) -> None:
        self._recalled.add(batch_id)

    @property
    def advanced(self) -> int:
        return self._inner.advanced

    def collect(self, deadline: float) -> StepOutput | None:
        self._collects += 1
        if self._collects - 1 == self._break_at:
            raise ZeroDivisionError("the executor broke")
        if self._collects - 1 in self._lose:
            self._runner.wipe()
            for batch_id in tuple(self._pending):
                self._drop(batch_id)
            self._inner = LocalExecutor(self._runner)
            raise ExecutorLost("stage 0 went away", (LayerSpan(NodeId("elsewhere"), LayerRange(0, 1)),))
        batch_id = next(iter(self._pending))
        self._inner.submit(self._drop(batch_id))
        if batch_id in self._recalled:
            self._inner.recall(batch_id)
        return self._inner.collect(deadline)

    def reset(self) -> None:
        for batch_id in tuple(self._pending):
            self._drop(batch_id)
        self._tables.clear()
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()

    def _drop(self, batch_id: BatchId) -> StepBatch:
        del self._named[batch_id], self._written[batch_id]
        return self._pending.pop(batch_id)


def _assert_follows(earlier: StepBatch, later: StepBatch) -> None:
    before = {step.sequence: step for step in earlier.steps}
    for step in later.steps:
        other = before.get(step.sequence)
        if other is not None and step.epoch == other.epoch:
            assert step.first_position >= other.first_position + len(other.token_ids), "a sequence is in two batches in flight"


def _assert_apart(written: dict[SequenceId, frozenset[BlockId]], named: dict[SequenceId, frozenset[BlockId]]) -> None:
    for writer, blocks in written.items():
        for reader, table in named.items():
            assert writer == reader or not blocks & table, f"sequence {writer} writes blocks {blocks & table} that sequence {reader} holds"
