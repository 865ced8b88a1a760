"""What every `Executor` must do, however it spreads a model.

Subclass `ExecutorSuite` in a test module that has a fixture `executor`: one that is loaded, for a model with at least `VOCAB` tokens and KV of at
least `BLOCKS` blocks, and closed by the fixture. Each test compares rows with the same rows run another way: KV that was not cut, released,
recalled or reset as a batch says shows in the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest

from paceline.core.ids import BatchId, BlockId, SequenceId
from paceline.engine.executor import Executor, Path, SequenceStep, StepBatch
from paceline.engine.local import blocks_for

VOCAB = 64
BLOCKS = 12
BOUND_S = 60.0
"""Longest wait for a batch; reached only when a test fails."""
LOOKS = 1000
"""At an executor that is not ready: machines may be looked for."""

Logits = npt.NDArray[np.float32]
ONE, TWO = SequenceId(1), SequenceId(2)


class Driver:
    """An executor, and ids that no batch had."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._ids = count(1)
        assert any(executor.ready() for _ in range(LOOKS)), "it never becomes ready"

    def blocks(self, tokens: int, first: int = 0) -> tuple[BlockId, ...]:
        """As many as hold so many tokens."""
        return tuple(BlockId(first + place) for place in range(blocks_for(tokens, self.executor.block_size)))

    def step(
        self,
        ids: Sequence[int],
        first: int = 0,
        blocks: Sequence[BlockId] = (),
        *,
        sequence: SequenceId = ONE,
        path: Path = Path.PROMPT,
        rows: Sequence[int] | None = None,
        epoch: int = 0,
    ) -> SequenceStep:
        """Rows of a sequence, all with logits unless said otherwise."""
        return SequenceStep(sequence, epoch, tuple(ids), first, path, tuple(blocks), tuple(range(len(ids)) if rows is None else rows))

    def submit(self, *steps: SequenceStep, released: Sequence[SequenceId] = ()) -> BatchId:
        batch_id = BatchId(next(self._ids))
        self.executor.submit(StepBatch(batch_id, steps, tuple(released), 4))
        return batch_id

    def collect(self, batch_id: BatchId) -> Logits:
        """What came of the batch that is due."""
        output = self.executor.collect(time.monotonic() + BOUND_S)
        assert output is not None, "a batch that was not recalled has an output"
        assert output.batch_id == batch_id
        return np.array(output.logits_RV)

    def run(self, *steps: SequenceStep, released: Sequence[SequenceId] = ()) -> Logits:
        return self.collect(self.submit(*steps, released=released))


def prompt(n: int, seed: int = 0) -> list[int]:
    """Ids of a prompt; other seeds, other ids."""
    return [(7 * seed + 5 * place + place * place) % (VOCAB - 1) + 1 for place in range(n)]


class ExecutorSuite:
    @pytest.fixture
    def drive(self, executor: Executor) -> Driver:
        return Driver(executor)

    @pytest.fixture
    def whole(self, drive: Driver) -> Callable[[Sequence[int]], Logits]:
        """Logits of all of a prompt's rows, run in one batch as a sequence that is forgotten then."""

        def run(ids: Sequence[int]) -> Logits:
            own = SequenceId(99)
            logits = drive.run(drive.step(ids, 0, drive.blocks(len(ids), BLOCKS - 4), sequence=own))
            drive.run(drive.step(ids[:1], 0, drive.blocks(1, BLOCKS - 4), sequence=SequenceId(98)), released=[own])
            return logits

        return run

    def test_what_it_says_of_itself_can_be_meant(self, drive: Driver) -> None:
        executor = drive.executor
        assert executor.depth >= 1
        assert executor.n_blocks >= BLOCKS
        assert executor.block_size >= 1
        assert executor.numerics_id
        assert all(notice.kind for notice in executor.notices())
        assert list(executor.notices()) == []

    def test_logits_are_those_of_the_rows_that_are_named_in_their_order(self, drive: Driver, whole: Callable[..., Logits]) -> None:
        ids, others = prompt(5), prompt(3, 1)
        expected, expected_too = whole(ids), whole(others)
        assert expected.shape[0] == 5
        assert np.isfinite(expected).all()
        got = drive.run(
            drive.step(ids, 0, drive.blocks(5), rows=(1, 4)), drive.step(others, 0, drive.blocks(3, 4), sequence=TWO, rows=(2,))
        )
        if drive.executor.holds_identity:
            assert np.array_equal(got, np.concatenate([expected[[1, 4]], expected_too[[2]]]))
        assert got.shape == (3, expected.shape[1])
        assert drive.run(drive.step(prompt(1), 5, drive.blocks(6)[len(drive.blocks(5)) :], rows=())).shape[0] == 0

    def test_chunks_change_nothing(self, drive: Driver, whole: Callable[..., Logits]) -> None:
        ids = prompt(7)
        expected = whole(ids)
        first = drive.run(drive.step(ids[:3], 0, drive.blocks(3)))
        rest = drive.run(drive.step(ids[3:], 3, drive.blocks(7)[len(drive.blocks(3)) :]))
        same(drive, np.concatenate([first, rest]), expected)

    def test_batches_come_in_the_order_they_were_submitted_in(self, drive: Driver, whole: Callable[..., Logits]) -> None:
        texts = [prompt(4, seed) for seed in range(min(drive.executor.depth, 2))]
        expected = [whole(ids) for ids in texts]
        flying = [
            drive.submit(drive.step(ids, 0, drive.blocks(4, 4 * place), sequence=SequenceId(1 + place))) for place, ids in enumerate(texts)
        ]
        for batch_id, logits in zip(flying, expected, strict=True):
            same(drive, drive.collect(batch_id), logits)

    def test_a_first_position_cuts_what_stood_behind_it(self, drive: Driver, whole: Callable[..., Logits]) -> None:
        ids, guessed = prompt(4), prompt(3, 2)
        expected = whole([*ids[:3], 9, 10])
        blocks = drive.blocks(6)
        drive.run(drive.step(ids[:3], 0, blocks[: len(drive.blocks(3))]))
        drive.run(drive.step(guessed, 3, blocks[len(drive.blocks(3)) :]))
        again = drive.run(drive.step([9, 10], 3, drive.blocks(5, 0)[len(drive.blocks(3)) :], epoch=1))
        same(drive, again, expected[3:])

    def test_a_sequence_that_was_released_begins_anew(self, drive: Driver, whole: Callable[..., Logits]) -> None:
        ids, others = prompt(6), prompt(6, 3)
        expected = whole(others)
        drive.run(drive.step(ids, 0, drive.blocks(6)))
        same(drive, drive.run(drive.step(others, 0, drive.blocks(6, 4)), released=[ONE]), expected)

    def test_a_batch_that_is_recalled_leaves_what_was_before_it(self, drive: Driver, whole: Callable[..., Logits]) -> None:
        ids = prompt(6)
        expected = whole(ids)
        drive.run(drive.step(ids[:4], 0, drive.blocks(4)))
        more = drive.blocks(6)[len(drive.blocks(4)) :]
        batch_id = drive.submit(drive.step(ids[4:], 4, more))
        drive.executor.recall(batch_id)
        output = drive.executor.collect(time.monotonic() + BOUND_S)
        assert output is None or output.batch_id == batch_id
        same(drive, drive.run(drive.step(ids[4:], 4, more, epoch=1)), expected[4:])
        drive.executor.recall(batch_id)
        drive.executor.recall(BatchId(1 << 40))
        same(drive, drive.run(drive.step(ids[5:], 5, (), epoch=2)), expected[5:])

    def test_every_batch_advances_it(self, drive: Driver) -> None:
        before = drive.executor.advanced
        drive.run(drive.step(prompt(2), 0, drive.blocks(2)))
        assert drive.executor.advanced > before

    def test_where_nothing_was_lost_there_is_nothing_to_restore(self, drive: Driver) -> None:
        assert list(drive.executor.restore([]) or ()) == []

    def test_after_a_reset_an_engine_may_begin_anew(self, drive: Driver, whole: Callable[..., Logits]) -> None:
        ids = prompt(5, 4)
        expected = whole(ids)
        drive.run(drive.step(prompt(4), 0, drive.blocks(4)))
        drive.submit(drive.step([3], 4, drive.blocks(5)[len(drive.blocks(4)) :]))
        drive.executor.reset()
        fresh = Driver(drive.executor)
        batch_id = BatchId(1000)
        drive.executor.submit(StepBatch(batch_id, (fresh.step(ids, 0, fresh.blocks(5)),), (), 4))
        same(drive, fresh.collect(batch_id), expected)

    def test_it_may_be_closed_twice_and_with_a_batch_in_flight(self, drive: Driver) -> None:
        drive.submit(drive.step(prompt(2), 0, drive.blocks(2)))
        drive.executor.close()
        drive.executor.close()


def same(drive: Driver, got: Logits, expected: Logits) -> None:
    """Equal bytes, or, on kernels that promise none, nearly equal ones."""
    if drive.executor.holds_identity:
        assert np.array_equal(got, expected)
    else:
        assert np.allclose(got, expected, atol=0.05 * float(np.abs(expected).max()))
