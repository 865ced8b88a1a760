"""GGML's K-quants, blocks of 256 with scales of their own for every 16 or 32 weights, to float32.

Each function writes out_NK [N, K] from rows_NB, uint8 [N, row bytes]. The arithmetic is gguf-py's, rounding for rounding.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.backends.ggml.bits import half_at
from paceline.backends.kernel_cache import in_use

F = np.float32


@njit(nogil=True, inline="always")
def scale_and_min(block, g):
    """The 6-bit (scale, minimum) of group `g` of a Q4_K or Q5_K block."""
    first, least = block[4 + g % 4], block[8 + g % 4]
    if g < 4:
        return first & 63, least & 63
    return block[8 + g] & 15 | first >> 6 << 4, block[8 + g] >> 4 | least >> 6 << 4


@njit(nogil=True, cache=in_use())
def q2_k(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[84 * b : 84 * b + 84], out[256 * b : 256 * b + 256]
            scale, least = half_at(block, 80), half_at(block, 82)
            for g in range(16):
                step, offset = scale * F(block[g] & 15), least * F(block[g] >> 4)
                at, shift = 16 + g // 8 * 32 + g % 2 * 16, g % 8 // 2 * 2
                for i in range(16):
                    y[16 * g + i] = step * F(block[at + i] >> shift & 3) - offset


@njit(nogil=True, cache=in_use())
def q3_k(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[110 * b : 110 * b + 110], out[256 * b : 256 * b + 256]
            scale = half_at(block, 108)
            for g in range(16):
                low = block[96 + g % 8] >> (g // 8 * 4) & 15
                step = scale * (F(low | (block[104 + g % 4] >> (g // 4 * 2) & 3) << 4) - F(32))
                at, shift, bit = 32 + g // 8 * 32 + g % 2 * 16, g % 8 // 2 * 2, g // 2
                for i in range(16):
                    high = block[g % 2 * 16 + i] >> bit & 1
                    y[16 * g + i] = step * (F(block[at + i] >> shift & 3 | high << 2) - F(4))


@njit(nogil=True, cache=in_use())
def q4_k(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[144 * b : 144 * b + 144], out[256 * b : 256 * b + 256]
            scale, least = half_at(block, 0), half_at(block, 2)
            for pair in range(4):
                codes, y_pair = block[16 + 32 * pair : 48 + 32 * pair], y[64 * pair : 64 * pair + 64]
                (low, low_min), (high, high_min) = scale_and_min(block, 2 * pair), scale_and_min(block, 2 * pair + 1)
                step, offset = scale * F(low), least * F(low_min)
                for i in range(32):
                    y_pair[i] = step * F(codes[i] & 15) - offset
                step, offset = scale * F(high), least * F(high_min)
                for i in range(32):
                    y_pair[32 + i] = step * F(codes[i] >> 4) - offset


@njit(nogil=True, cache=in_use())
def q5_k(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[176 * b : 176 * b + 176], out[256 * b : 256 * b + 256]
            scale, least = half_at(block, 0), half_at(block, 2)
            fifth = block[16:48]
            for pair in range(4):
                codes, y_pair = block[48 + 32 * pair : 80 + 32 * pair], y[64 * pair : 64 * pair + 64]
                (low, low_min), (high, high_min) = scale_and_min(block, 2 * pair), scale_and_min(block, 2 * pair + 1)
                step, offset = scale * F(low), least * F(low_min)
                for i in range(32):
                    y_pair[i] = step * F(codes[i] & 15 | (fifth[i] >> (2 * pair) & 1) << 4) - offset
                step, offset = scale * F(high), least * F(high_min)
                for i in range(32):
                    y_pair[32 + i] = step * F(codes[i] >> 4 | (fifth[i] >> (2 * pair + 1) & 1) << 4) - offset


@njit(nogil=True, cache=in_use())
def q6_k(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[210 * b : 210 * b + 210], out[256 * b : 256 * b + 256]
            scale, scales = half_at(block, 208), block[192:208].view(np.int8)
            for g in range(16):
                step = scale * F(scales[g])
                half, within = g // 8, g % 8 * 16
                low = block[64 * half + within % 64 :]
                high = block[128 + 32 * half + within % 32 :]
                low_shift, high_shift = within // 64 * 4, within // 32 * 2
                for i in range(16):
                    y[16 * g + i] = step * (F(low[i] >> low_shift & 15 | (high[i] >> high_shift & 3) << 4) - F(32))
