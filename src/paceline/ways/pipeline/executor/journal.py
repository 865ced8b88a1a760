"""What went to the first stage, of blocks that live sequences hold: so that a loss behind this machine costs its own layers nothing. In memory alone.

Law: within a budget of bytes, the block that was begun first is dropped first. What is not there is computed anew.

Shapes: T rows of a batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.ids import BlockId
from paceline.engine.block_tables import BlockTables
from paceline.engine.executor import StepBatch
from paceline.engine.local import WireBits


class Journal:
    """By block, as KV is: sequences that begin alike share the rows as they share the blocks.

    Args:
        most_bytes: of rows.
        block_size: tokens of a block.
    """

    def __init__(self, most_bytes: int, block_size: int, width: int) -> None:
        self._size, self._width = block_size, width
        self._most = most_bytes // (2 * block_size * width)
        """Blocks."""
        self._tables = BlockTables()
        self._rows: dict[int, npt.NDArray[np.uint16]] = {}
        """Insertion order is the order of dropping."""
        self._filled: dict[int, int] = {}
        """Rows of each block that are there, from its first on."""

    @property
    def n_bytes(self) -> int:
        return 2 * self._size * self._width * len(self._rows)

    def note(self, batch: StepBatch, x_TD: WireBits) -> None:
        """A batch is sent."""
        size, row = self._size, 0
        self._tables.update(batch, size)
        for step in batch.steps:
            table = self._tables.of([step.sequence])[0]
            at, stop = step.first_position, step.first_position + len(step.token_ids)
            while at < stop:
                block, offset = int(table[at // size]), at % size
                n = min(size - offset, stop - at)
                if self._begun(block, offset):
                    self._rows[block][offset : offset + n] = x_TD[row : row + n]
                    self._filled[block] = offset + n
                row, at = row + n, at + n

    def has(self, blocks: Sequence[BlockId], n_tokens: int) -> bool:
        """Whether all rows of a sequence's first tokens are there, which these blocks hold."""
        size = self._size
        return all(self._filled.get(block, 0) >= min(size, n_tokens - size * place) for place, block in enumerate(blocks))

    def rows(self, blocks: Sequence[BlockId], start: int, stop: int) -> WireBits:
        """Of positions [start, stop) of a sequence that holds these blocks. They must be there."""
        size, found = self._size, list[WireBits]()
        while start < stop:
            offset = start % size
            n = min(size - offset, stop - start)
            found.append(self._rows[blocks[start // size]][offset : offset + n])
            start += n
        return np.concatenate(found)

    def _begun(self, block: int, offset: int) -> bool:
        """Whether a row belongs here: its block begins with it, or all rows before it are there."""
        if offset:
            return self._filled.get(block, 0) >= offset
        if not self._most:
            return False
        rows = self._rows.pop(block, None)
        if rows is None and len(self._rows) >= self._most:
            oldest = next(iter(self._rows))
            rows = self._rows.pop(oldest)
            del self._filled[oldest]
        self._rows[block] = np.empty((self._size, self._width), np.uint16) if rows is None else rows
        return True
