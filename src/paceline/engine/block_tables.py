"""Block tables of an executor's sequences, kept from batches' deltas in one array, so that a batch's tables are one gather.

Shapes: S sequences of a batch, B blocks of the longest table among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.ids import SequenceId
from paceline.engine.executor import StepBatch

_NO_BLOCK = -1


class BlockTables:
    """Tables by sequence. Rows of the array are reused; it grows and never shrinks."""

    def __init__(self) -> None:
        self._array = np.full((8, 8), _NO_BLOCK, np.int32)
        self._row: dict[SequenceId, int] = {}
        self._length: dict[SequenceId, int] = {}
        self._free_rows = list(range(8))

    def update(self, batch: StepBatch, block_size: int) -> None:
        """Forget what a batch releases and what its sequences held from their first positions on, then add what they gained."""
        self.forget(batch.released)
        for step in batch.steps:
            self.put(step.sequence, blocks_for(step.first_position, block_size), step.new_blocks)

    def forget(self, sequences: Sequence[SequenceId]) -> None:
        """Drop the tables of sequences; of those unknown there is nothing to drop."""
        for sequence in sequences:
            row = self._row.pop(sequence, None)
            if row is not None:
                self._array[row, : self._length.pop(sequence)] = _NO_BLOCK
                self._free_rows.append(row)

    def length(self, sequence: SequenceId) -> int:
        """Blocks in a sequence's table; 0 where it has none."""
        return self._length.get(sequence, 0)

    def __len__(self) -> int:
        return len(self._row)

    def of(self, sequences: Sequence[SequenceId]) -> npt.NDArray[np.int32]:
        """Tables of sequences, [S, B], padded with -1. A copy, C-contiguous."""
        longest = max((self._length[sequence] for sequence in sequences), default=0)
        return self._array[:, :longest][[self._row[sequence] for sequence in sequences]]

    def put(self, sequence: SequenceId, kept: int, blocks: Sequence[int]) -> None:
        """Cut a table to its first `kept` blocks, if it has more, and append others. A table begins with the first."""
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
    """Blocks that hold this many tokens."""
    return -(-tokens // block_size)
