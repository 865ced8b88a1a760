"""Weights laid out as `tiles.py` reads them: records of one group of 32 inputs x 16 outputs, block after block of outputs.

Outputs that do not fill the last block of 16 are followed by zeros.
Shapes: N outputs, K inputs (a multiple of 32), G groups, blocks of 16 outputs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from paceline.backends.cpu.forms import LANES
from paceline.backends.cpu.kernel_cache import in_use
from paceline.core.weights import GROUP, GroupedTensor

Words = npt.NDArray[np.uint16]


def pack_grouped(tensor: GroupedTensor, out: Words) -> None:
    """Write the records of an int4 or int8 matrix to `out`: uint16 [blocks, G, record / 2], zeroed."""
    pack_codes = _pack_quads if tensor.bits == 4 else _pack_pairs
    pack_codes(np.ascontiguousarray(tensor.codes_NK).view(np.uint8), out.view(np.uint8))
    at = GROUP * tensor.bits
    _pack_lanes(np.ascontiguousarray(tensor.scale_NG, np.float16).view(np.uint16), at, out)
    if tensor.bits == 4 and tensor.offset_NG is not None:
        _pack_lanes(np.ascontiguousarray(tensor.offset_NG, np.float16).view(np.uint16), at + LANES, out)


def pack_bf16(bits_NK: npt.NDArray[np.uint16], out: Words) -> None:
    """Write the records of a bf16 matrix to `out`: uint16 [blocks, G, 512], zeroed."""
    _pack_words(np.ascontiguousarray(bits_NK), out)


@njit(nogil=True, cache=in_use())
def _pack_quads(codes_NK, out):
    """Byte [quad // 2, lane, place in quad] of a record holds two 4-bit codes: of an even quad, and above it of the next one."""
    for n in range(codes_NK.shape[0]):
        block, lane = n // LANES, n % LANES
        for g in range(out.shape[1]):
            for k in range(GROUP):
                at, shift = k // 8 * 4 * LANES + 4 * lane + k % 4, np.uint8(k // 4 % 2 * 4)
                out[block, g, at] |= codes_NK[n, g * GROUP + k] << shift


@njit(nogil=True, cache=in_use())
def _pack_pairs(codes_NK, out):
    """Byte [pair, lane, place in pair] of a record holds an 8-bit code."""
    for n in range(codes_NK.shape[0]):
        block, lane = n // LANES, n % LANES
        for g in range(out.shape[1]):
            for k in range(GROUP):
                out[block, g, k // 2 * 2 * LANES + 2 * lane + k % 2] = codes_NK[n, g * GROUP + k]


@njit(nogil=True, cache=in_use())
def _pack_lanes(halves_NG, at, words):
    for n in range(halves_NG.shape[0]):
        for g in range(words.shape[1]):
            words[n // LANES, g, at + n % LANES] = halves_NG[n, g]


@njit(nogil=True, cache=in_use())
def _pack_words(bits_NK, words):
    for n in range(bits_NK.shape[0]):
        block, lane = n // LANES, n % LANES
        for g in range(words.shape[1]):
            for pair in range(GROUP // 2):
                k, at = g * GROUP + 2 * pair, pair * 2 * LANES + 2 * lane
                words[block, g, at] = bits_NK[n, k]
                words[block, g, at + 1] = bits_NK[n, k + 1]
