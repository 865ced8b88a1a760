"""What the journal keeps of the inputs of blocks, and what it must not say it has."""

from __future__ import annotations

import numpy as np

from paceline.core.ids import BatchId, BlockId, SequenceId
from paceline.engine.executor import Path, SequenceStep, StepBatch
from paceline.ways.pipeline.executor.restoring import Journal


def filled(blocks: tuple[int, ...]) -> tuple[StepBatch, np.ndarray[tuple[int, int], np.dtype[np.uint16]]]:
    n = 4 * len(blocks)
    step = SequenceStep(SequenceId(1), 0, [7] * n, 0, Path.PROMPT, [BlockId(block) for block in blocks], ())
    return StepBatch(BatchId(1), (step,)), np.arange(2 * n, dtype=np.uint16).reshape(n, 2)


def test_a_block_that_came_from_elsewhere_has_no_inputs_though_it_had_some_before() -> None:
    journal = Journal(1 << 20, 4, 2)
    batch, rows = filled((3, 5))
    journal.note(batch, rows)
    assert journal.has([BlockId(3), BlockId(5)], 8)
    journal.forget([BlockId(5), BlockId(6)])
    assert journal.has([BlockId(3)], 4)
    assert not journal.has([BlockId(3), BlockId(5)], 8)
    journal.note(batch, rows)
    assert journal.has([BlockId(3), BlockId(5)], 8)
    assert np.array_equal(journal.rows([BlockId(3), BlockId(5)], 2, 8), rows[2:])
