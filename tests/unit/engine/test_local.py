"""The local executor's tables follow the batches' deltas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.null_backend import NullRunner

from paceline.core.ids import BatchId, BlockId, SequenceId
from paceline.engine.executor import Path, SequenceStep, StepBatch
from paceline.engine.local import BlockTables, LocalExecutor


def step(sequence: int, blocks: Sequence[int] = (), tokens: Sequence[int] = (1,), first: int = 0) -> SequenceStep:
    return SequenceStep(SequenceId(sequence), 0, tokens, first, Path.PROMPT, [BlockId(b) for b in blocks], (len(tokens) - 1,))


def batch(number: int, *steps: SequenceStep, released: Sequence[int] = ()) -> StepBatch:
    return StepBatch(BatchId(number), steps, tuple(SequenceId(i) for i in released))


@given(
    st.lists(st.tuples(st.integers(0, 19), st.lists(st.integers(0, 99), max_size=12), st.integers(0, 40), st.booleans()), max_size=60),
    st.integers(1, 4),
)
def test_tables_match_plain_lists(changes: list[tuple[int, list[int], int, bool]], block_size: int) -> None:
    tables, plain = BlockTables(), dict[int, list[int]]()
    for number, (sequence, blocks, first, released) in enumerate(changes):
        if released:
            plain.pop(sequence, None)
        table = plain.setdefault(sequence, [])
        del table[-(-first // block_size) :]
        table += blocks
        tables.update(batch(number, step(sequence, blocks, first=first), released=[sequence] if released else []), block_size)
        longest = max(map(len, plain.values()))
        table_SB = tables.of([SequenceId(i) for i in plain])
        assert table_SB.dtype == np.int32
        assert table_SB.flags.c_contiguous
        assert table_SB.tolist() == [[*row, *[-1] * (longest - len(row))] for row in plain.values()]


def test_a_batch_beyond_the_depth_is_refused() -> None:
    executor = LocalExecutor(NullRunner(n_blocks=4))
    executor.submit(batch(0, step(0, [0])))
    with pytest.raises(RuntimeError, match="depth is 1"):
        executor.submit(batch(1, step(1, [1])))
    executor.close()


def test_logits_come_in_the_order_of_steps_whatever_the_batch() -> None:
    together = LocalExecutor(NullRunner(n_blocks=8))
    together.submit(batch(0, step(0, [0, 1], [5, 6, 7, 8, 9]), step(1, [2], [3]), step(2, [3], [4, 4])))
    rows = together.collect(0).logits_RV
    assert rows.shape == (3, 64)
    for i, (blocks, tokens) in enumerate([([0, 1], [5, 6, 7, 8, 9]), ([2], [3]), ([3], [4, 4])]):
        single = LocalExecutor(NullRunner(n_blocks=8))
        single.submit(batch(0, step(0, blocks, tokens)))
        assert np.array_equal(single.collect(0).logits_RV[0], rows[i])


def test_a_released_sequence_may_return_in_the_same_batch() -> None:
    executor = LocalExecutor(NullRunner(n_blocks=8))
    executor.submit(batch(0, step(0, [0, 1], [1, 2, 3, 4, 5])))
    before = executor.collect(0).logits_RV
    executor.submit(batch(1, step(0, [6, 7], [1, 2, 3, 4, 5]), released=[0]))
    assert np.array_equal(executor.collect(0).logits_RV, before)


class TestNullBackend:
    """It must notice what it is there to notice."""

    def test_a_missing_block_is_an_error(self) -> None:
        executor = LocalExecutor(NullRunner(n_blocks=4))
        executor.submit(batch(0, step(0, [0], [1, 2, 3, 4, 5])))
        with pytest.raises(IndexError, match="no block for position 4"):
            executor.collect(0)

    def test_unwritten_history_is_an_error(self) -> None:
        executor = LocalExecutor(NullRunner(n_blocks=4))
        executor.submit(batch(0, step(0, [0], [1], first=2)))
        with pytest.raises(ValueError, match="position 0"):
            executor.collect(0)

    def test_an_overwritten_block_changes_the_logits(self) -> None:
        def second_row(intruder: list[int]) -> np.ndarray:
            executor = LocalExecutor(NullRunner(n_blocks=4))
            executor.submit(batch(0, step(0, [0], [1, 2])))
            executor.collect(0)
            executor.submit(batch(1, step(1, intruder, [9])))
            executor.collect(0)
            executor.submit(batch(2, step(0, [], [3], first=2)))
            return executor.collect(0).logits_RV

        assert not np.array_equal(second_row([0]), second_row([1]))
