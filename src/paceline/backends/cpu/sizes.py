"""Defines the sizes that kernels are compiled with and that memory is planned by, and allocates memory aligned to a cache line. Imports no kernel."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.support import MOST_HEAD_DIM
from paceline.backends.instructions import Lowering

BLOCK = 16
"""Tokens of a KV block: the lanes of a vector."""

NEIGHBOURS = 16
"""KV blocks in a group. A head's blocks of a group are contiguous, and a pool has whole groups. Without groups, a head's blocks would be a stride of all
heads apart, and would use only some of a cache's sets."""

SEGMENT = 512
"""Keys in a segment of attention. Changing it changes results (docs/internals/arithmetic.md). For a head of 128, the keys and values of a segment take
256 KiB, which fits a second-level cache."""

QUERY_STRIDE = 4 * MOST_HEAD_DIM + 64
WEIGHT_STRIDE = 4 * SEGMENT + 64
"""Bytes from one row to the next in attention's scratch: of queries, and of scores or weights. Both are fixed, so that one address reaches all rows of
a tile."""

TILE = 8
"""Most M rows (query heads of neighbouring positions that share one KV head) that a product of attention takes at once."""


class AttentionTile(NamedTuple):
    """The sums that a product of attention keeps in registers: `rows` M rows, each with `blocks` blocks of keys or `slices` slices of 16 values."""

    rows: int
    blocks: int
    slices: int


_IN_32_WIDE = (AttentionTile(8, 2, 2), AttentionTile(4, 4, 2), AttentionTile(3, 4, 2), AttentionTile(2, 4, 2), AttentionTile(1, 4, 2))
"""Tiles for 32 registers of 512 bits, where a sum of 16 lanes takes one register."""
_IN_16_WIDE = (AttentionTile(4, 1, 1), AttentionTile(3, 1, 1), AttentionTile(2, 2, 2), AttentionTile(1, 4, 2))
"""Tiles for 16 registers of 256 bits, or 32 of 128. A sum of 16 lanes takes an eighth of them. Larger tiles would keep some sums in memory, at half the
speed."""

ATTENTION_TILES: Final = {
    Lowering.AVX512_BF16: _IN_32_WIDE,
    Lowering.AVX512_VNNI: _IN_32_WIDE,
    Lowering.AVX_VNNI: _IN_16_WIDE,
    Lowering.AVX2: _IN_16_WIDE,
    Lowering.NEON_I8MM: _IN_16_WIDE,
    Lowering.NEON: _IN_16_WIDE,
}
"""Tiles of each instruction set, most rows first. No tile has more than `TILE` rows. Results are the same bytes with any tiles."""

EXPANDED_BYTES = 704
"""Bytes from one group to the next in unpacked weights. A group holds 32 inputs of a block of 16 outputs; no format needs more."""
TILE_BLOCKS = 2
"""Maximum number of blocks of 16 outputs in a tile of a matrix product, and so of blocks unpacked at once."""

CHUNK = 2
"""Blocks of 16 outputs in a task of a matrix product (of gate and up, each). Raising it: threads wait longer for the last task. A task of the q, k, v
products takes one head instead, a task of the output head `phases.HEAD_CHUNK` blocks."""

PART = 192
"""Maximum rows in a task of a matrix product, a multiple of `forms.PANEL`. Raising it: its inputs no longer fit the second-level cache."""

# Places in a row of PIECES (int32): rows of a tile, segments [start, stop) of their keys, number of pieces that the tile is cut into. If it is
# cut: its number among such tiles, and the number of records of a query head before its own.
PIECE_ROW, PIECE_ROWS, PIECE_START, PIECE_STOP, PIECE_OF, PIECE_TILE, PIECE_RECORDS, N_PIECE = range(8)


def expanded_bytes(k: int) -> int:
    """Return the bytes of scratch that a product of K inputs needs for unpacked weights: `TILE_BLOCKS` blocks."""
    return TILE_BLOCKS * k // 32 * EXPANDED_BYTES


def record_bytes(head_dim: int) -> int:
    """Return the bytes of a row's record of its segments so far: head_dim sums (fp32), then the maximum and the sum of the weights."""
    return 4 * head_dim + 64


def scratch_bytes(m_rows: int, head_dim: int) -> int:
    """Return the bytes of scratch for a thread's attention with up to `m_rows` M rows at once: queries, the weights of a tile, and records of rows."""
    return m_rows * QUERY_STRIDE + TILE * WEIGHT_STRIDE + (m_rows + TILE) * (4 * head_dim + 64)


CACHE_LINE = 64


def aligned(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Return an array of zeroed bytes that starts on a cache line."""
    raw = np.zeros(n_bytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + n_bytes]
