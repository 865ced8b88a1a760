"""A stage refuses what can't be right, and what it refuses changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.fakes.null_backend import NullRunner

from paceline.core.errors import BadPipelineRequest, ShardCorrupt
from paceline.core.ids import BatchId, SequenceId
from paceline.core.model import LayerRange
from paceline.ways.pipeline.executor.stage import Stage, StageBatch

WIDTH = 4
FIRST = StageBatch(BatchId(1), [SequenceId(7), SequenceId(8)], [5, 1], [0, 0], [0, 0], [2, 1], [3, 0, 1])


def rows(n: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(n * WIDTH, dtype=np.uint16).reshape(n, WIDTH)


def stage(runner: NullRunner, base_block: int = 8) -> Stage:
    return Stage(runner, LayerRange(0, 1), base_block=base_block, n_blocks=4, max_rows=16, max_context=14, width=WIDTH)


def test_sessions_on_one_runner_keep_apart() -> None:
    runner = NullRunner(n_blocks=12)
    alone = stage(NullRunner(n_blocks=4), 0).run(FIRST, rows(6)).tolist()
    one, other = stage(runner, 0), stage(runner, 8)
    assert one.run(FIRST, rows(6)).tolist() == alone
    other.run(replace(FIRST, batch_id=BatchId(9)), rows(6) + 1)
    following = StageBatch(BatchId(2), [SequenceId(7)], [2], [5], [1], [0], [])
    fresh = stage(NullRunner(n_blocks=4), 0)
    fresh.run(FIRST, rows(6))
    assert one.run(following, rows(2)).tolist() == fresh.run(following, rows(2)).tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"sequences": [SequenceId(7), SequenceId(7)]},
        {"sequences": [SequenceId(7)]},
        {"row_counts": [5, 2]},
        {"row_counts": [6, 0]},
        {"paths": [0, 2]},
        {"blocks": [3, 0, 4]},
        {"blocks": [3, 0, -1]},
        {"blocks": [3, 0]},
        {"block_counts": [3, 1]},
        {"first_positions": [4, 0]},
        {"first_positions": [1, 0]},
        {"first_positions": [0, 1 << 31]},
        {"block_counts": [1, 2]},
    ],
)
def test_a_batch_that_can_t_be_right_is_refused(changes: dict[str, object]) -> None:
    runner = NullRunner(n_blocks=12)
    tried = stage(runner)
    with pytest.raises(BadPipelineRequest):
        tried.run(replace(FIRST, **changes), rows(6))  # type: ignore[arg-type]
    assert runner.rows_run == 0
    assert tried.run(FIRST, rows(6)).tolist() == stage(NullRunner(n_blocks=12)).run(FIRST, rows(6)).tolist()


def test_more_rows_positions_or_blocks_than_agreed_are_refused() -> None:
    tried = stage(NullRunner(n_blocks=12))
    with pytest.raises(BadPipelineRequest, match="may have 16"):
        tried.run(StageBatch(BatchId(1), [SequenceId(1)], [17], [0], [0], [4], [0, 1, 2, 3]), rows(17))
    with pytest.raises(BadPipelineRequest, match="position 15"):
        tried.run(StageBatch(BatchId(1), [SequenceId(1)], [15], [0], [0], [4], [0, 1, 2, 3]), rows(15))
    with pytest.raises(BadPipelineRequest, match="5 blocks"):
        tried.run(StageBatch(BatchId(1), [SequenceId(1)], [1], [0], [0], [5], [0, 1, 2, 3, 0]), rows(1))


def test_what_an_earlier_session_left_can_t_be_read() -> None:
    runner = NullRunner(n_blocks=12)
    before = stage(runner)
    before.run(StageBatch(BatchId(1), [SequenceId(1)], [8], [0], [0], [2], [0, 1]), rows(8))
    after = stage(runner)
    with pytest.raises(BadPipelineRequest, match="written up to 0"):
        after.run(StageBatch(BatchId(1), [SequenceId(5)], [1], [8], [1], [3], [0, 1, 2]), rows(1))
    # Its own full blocks may be shared; one that is filled in part may not, and nobody gets ahead of what is written.
    after.run(StageBatch(BatchId(2), [SequenceId(5)], [6], [0], [0], [2], [0, 1]), rows(6))
    after.run(StageBatch(BatchId(3), [SequenceId(6)], [1], [4], [0], [2], [0, 2]), rows(1))
    with pytest.raises(BadPipelineRequest, match="written up to 4"):
        after.run(StageBatch(BatchId(4), [SequenceId(7)], [1], [6], [0], [2], [0, 1]), rows(1))
    with pytest.raises(BadPipelineRequest, match="written up to 6"):
        after.run(StageBatch(BatchId(5), [SequenceId(5)], [1], [7], [1], [0], []), rows(1))
    after.run(StageBatch(BatchId(6), [SequenceId(5)], [2], [6], [1], [0], []), rows(2))
    after.run(StageBatch(BatchId(7), [SequenceId(7)], [1], [8], [0], [3], [0, 1, 3]), rows(1))
    # A draft that was rejected is written over.
    after.run(StageBatch(BatchId(8), [SequenceId(7)], [3], [9], [1], [0], []), rows(3))
    after.run(StageBatch(BatchId(9), [SequenceId(7)], [2], [10], [1], [0], []), rows(2))


def test_sequences_are_bounded() -> None:
    tried = stage(NullRunner(n_blocks=12))
    for number in range(16):
        tried.run(StageBatch(BatchId(number), [SequenceId(number)], [1], [0], [0], [1], [0]), rows(1))
    with pytest.raises(BadPipelineRequest, match="sequences"):
        tried.run(StageBatch(BatchId(99), [SequenceId(99)], [1], [0], [0], [1], [0]), rows(1))
    released = StageBatch(BatchId(100), [SequenceId(3)], [1], [0], [0], [1], [2], [SequenceId(0), SequenceId(3)])
    tried.run(released, rows(1))


def test_rows_that_are_no_activations_are_refused() -> None:
    spoiled = rows(6)
    spoiled[2, 1] = 0x7FC0
    with pytest.raises(ShardCorrupt, match="finite"):
        stage(NullRunner(n_blocks=12)).run(FIRST, spoiled)
    with pytest.raises(ShardCorrupt, match="shape"):
        stage(NullRunner(n_blocks=12)).run(FIRST, rows(6)[:, :3])


def test_batches_may_name_wider_blocks_than_the_runner_keeps() -> None:
    """Blocks of 8 tokens are two of the runner's each: the same rows, within the lease, shared in whole wide blocks alone."""
    runner = NullRunner(n_blocks=12)
    neighbour, wide, plain = stage(runner, 4), stage(runner, 8), stage(NullRunner(n_blocks=12))
    wide.take_blocks_of(8)
    neighbour.run(FIRST, rows(6))
    for batch, own in (
        (StageBatch(BatchId(1), [SequenceId(7)], [9], [0], [0], [2], [1, 0]), [2, 3, 0]),
        (StageBatch(BatchId(2), [SequenceId(7)], [3], [9], [1], [0], []), []),
        (StageBatch(BatchId(3), [SequenceId(9)], [2], [8], [0], [2], [1, 0], [SequenceId(7)]), [2, 3, 0]),
        (StageBatch(BatchId(4), [SequenceId(9)], [1], [8], [0], [1], [0]), [0]),  # what lay behind is cut, and its block gained again
    ):
        narrow = replace(batch, block_counts=[len(own)], blocks=own)
        assert wide.run(batch, rows(batch.n_rows)).tolist() == plain.run(narrow, rows(batch.n_rows)).tolist()
    undisturbed = stage(NullRunner(n_blocks=12))
    undisturbed.run(FIRST, rows(6))
    following = StageBatch(BatchId(2), [SequenceId(7)], [2], [5], [1], [0], [])
    assert neighbour.run(following, rows(2)).tolist() == undisturbed.run(following, rows(2)).tolist()
    with pytest.raises(BadPipelineRequest, match="outside the 2 leased"):
        wide.run(StageBatch(BatchId(5), [SequenceId(1)], [1], [0], [0], [1], [2]), rows(1))
    with pytest.raises(BadPipelineRequest, match="written up to 0"):  # of block 0, half is written
        wide.run(StageBatch(BatchId(6), [SequenceId(2)], [1], [4], [0], [1], [0]), rows(1))


@pytest.mark.parametrize("tokens", [0, 2, 6, 32])
def test_blocks_that_can_t_be_made_of_the_runner_s_are_refused(tokens: int) -> None:
    with pytest.raises(BadPipelineRequest, match="can't be made"):
        stage(NullRunner(n_blocks=12)).take_blocks_of(tokens)
