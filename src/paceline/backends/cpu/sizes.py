"""Sizes that kernels are compiled with and memory is planned by, and memory on a cache line. Importing this imports no kernel."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.support import MOST_HEAD_DIM
from paceline.backends.instructions import Lowering

BLOCK = 16
"""Tokens a KV block: the lanes of a vector."""

NEIGHBOURS = 16
"""KV blocks of one head that lie side by side, a group's: a pool has whole groups. At a stride of all heads' blocks, a head's would share a part of
the sets of a cache."""

SEGMENT = 512
"""Keys a segment. Part of the arithmetic. Keys and values of one, of a head of 128, take 256 KiB: a part of a second-level cache."""

QUERY_STRIDE = 4 * MOST_HEAD_DIM + 64
WEIGHT_STRIDE = 4 * SEGMENT + 64
"""Bytes between rows of attention's scratch: fixed, so that one address reaches all rows of a tile."""

TILE = 8
"""M rows (query heads of neighbouring positions that share one KV head) a product of attention takes at once."""


class AttentionTile(NamedTuple):
    """The sums that a product of attention keeps in registers: those of `rows` M rows, each with `blocks` blocks of keys or `slices` slices of 16 values."""

    rows: int
    blocks: int
    slices: int


_IN_32_WIDE = (AttentionTile(8, 2, 2), AttentionTile(4, 4, 2), AttentionTile(3, 4, 2), AttentionTile(2, 4, 2), AttentionTile(1, 4, 2))
"""For 32 registers of 512 bits: a sum of 16 lanes takes one."""
_IN_16_WIDE = (AttentionTile(4, 1, 1), AttentionTile(3, 1, 1), AttentionTile(2, 2, 2), AttentionTile(1, 4, 2))
"""For 16 registers of 256 bits, or 32 of 128: a sum takes an eighth of half of them. More sums at once go through memory, at half the speed."""

ATTENTION_TILES: Final = {
    Lowering.AVX512_BF16: _IN_32_WIDE,
    Lowering.AVX512_VNNI: _IN_32_WIDE,
    Lowering.AVX_VNNI: _IN_16_WIDE,
    Lowering.AVX2: _IN_16_WIDE,
    Lowering.NEON_I8MM: _IN_16_WIDE,
    Lowering.NEON: _IN_16_WIDE,
}
"""The tiles of each instruction set, most rows first. `TILE` bounds their rows. They change no byte."""

EXPANDED_BYTES = 704
"""Of a group of one block of unpacked weights, at most."""
TILE_BLOCKS = 2
"""Blocks of outputs that a tile of unpacked weights has at most."""

CHUNK = 2
"""Blocks of 16 outputs a task of a matrix product takes, and of the gate and up products each: few enough not to wait for one thread's
last. A task of the q, k, v products takes a head; of the head `phases.HEAD_CHUNK`."""

PART = 192
"""Rows a task of a matrix product takes at most, whole panels: its inputs stay in the second-level cache."""

# Places in a row of PIECES (int32): rows of a tile, the segments [start, stop) of their keys, into how many pieces the tile is cut; where it
# is, its number among such tiles, and how many records of a query head lie before its own.
PIECE_ROW, PIECE_ROWS, PIECE_START, PIECE_STOP, PIECE_OF, PIECE_TILE, PIECE_RECORDS, N_PIECE = range(8)


def expanded_bytes(k: int) -> int:
    """Room for the unpacked weights of K inputs that a product asks for."""
    return TILE_BLOCKS * k // 32 * EXPANDED_BYTES


def record_bytes(head_dim: int) -> int:
    """Bytes of what a row has of its segments so far: head_dim sums (fp32), then their maximum and the sum of the weights."""
    return 4 * head_dim + 64


def scratch_bytes(m_rows: int, head_dim: int) -> int:
    """Bytes of a thread that attends with up to `m_rows` M rows at once: their queries, weights of a tile, and a record a row."""
    return m_rows * QUERY_STRIDE + TILE * WEIGHT_STRIDE + (m_rows + TILE) * (4 * head_dim + 64)


CACHE_LINE = 64


def aligned(n_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that start on a cache line."""
    raw = np.zeros(n_bytes + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + n_bytes]
