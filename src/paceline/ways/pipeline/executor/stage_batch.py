"""A step batch as stages see it: which rows stand where, and no token ids.

Stages run activations; the orchestrator alone knows tokens. What a stage must know of a batch is where each row's KV belongs.

Whether rows that another machine sent can be activations at all is checked. Shapes: T rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import ShardCorrupt
from paceline.core.ids import BatchId, SequenceId
from paceline.core.model import LayerRange
from paceline.engine.executor import StepBatch
from paceline.engine.local import WireBits


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
