"""Converts GGML's blocks of 256 with several scales to float32: K-quants, with a scale for every 16 or 32 weights, and I-quants, with codes for points
of a grid.

Each function writes out_NK [N, K] from rows_NB, uint8 [N, row bytes]; `grid` is float32 [points, weights a point], and `signs` holds the
eight signs that a 7-bit index stands for. Both come from gguf-py. The arithmetic is gguf-py's, rounding for rounding.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.backends.ggml.plain import half_at, single, u16, u32
from paceline.backends.kernel_cache import in_use

F = np.float32


@njit(nogil=True, inline="always")
def scale_and_min(block, g):
    """Return the 6-bit (scale, minimum) of group `g` of a Q4_K or Q5_K block."""
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


@njit(nogil=True, inline="always")
def _signed(value, signs, bit):
    return -value if signs >> bit & 1 else value


@njit(nogil=True, cache=in_use())
def iq2_xxs(rows_NB, out_NK, grid, signs):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[66 * b : 66 * b + 66], out[256 * b : 256 * b + 256]
            scale = half_at(block, 0)
            for g in range(8):
                packed = u32(block, 6 + 8 * g)
                step = scale * (F(0.5) + F(packed >> 28)) * F(0.25)
                for p in range(4):
                    sign, point = signs[packed >> (7 * p) & 127], grid[block[2 + 8 * g + p]]
                    for i in range(8):
                        y[32 * g + 8 * p + i] = _signed(step * point[i], sign, i)


@njit(nogil=True, cache=in_use())
def iq2_xs(rows_NB, out_NK, grid, signs):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[74 * b : 74 * b + 74], out[256 * b : 256 * b + 256]
            scale = half_at(block, 0)
            for g in range(16):
                step = scale * (F(0.5) + F(block[66 + g // 2] >> (g % 2 * 4) & 15)) * F(0.25)
                for p in range(2):
                    code = u16(block, 2 + 4 * g + 2 * p)
                    sign, point = signs[code >> 9], grid[code & 511]
                    for i in range(8):
                        y[16 * g + 8 * p + i] = _signed(step * point[i], sign, i)


@njit(nogil=True, cache=in_use())
def iq2_s(rows_NB, out_NK, grid, signs):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[82 * b : 82 * b + 82], out[256 * b : 256 * b + 256]
            scale = half_at(block, 0)
            for p in range(32):
                step = scale * (F(0.5) + F(block[74 + p // 4] >> (p // 2 % 2 * 4) & 15)) * F(0.25)
                point = grid[np.uint32(block[2 + p]) | np.uint32(block[66 + p // 4] >> (p % 4 * 2) & 3) << 8]
                for i in range(8):
                    y[8 * p + i] = _signed(step * point[i], block[34 + p], i)


@njit(nogil=True, cache=in_use())
def iq3_xxs(rows_NB, out_NK, grid, signs):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[98 * b : 98 * b + 98], out[256 * b : 256 * b + 256]
            scale = half_at(block, 0)
            for g in range(8):
                packed = u32(block, 66 + 4 * g)
                step = scale * (F(0.5) + F(packed >> 28)) * F(0.5)
                for pair in range(4):
                    sign = signs[packed >> (7 * pair) & 127]
                    first, second = grid[block[2 + 8 * g + 2 * pair]], grid[block[3 + 8 * g + 2 * pair]]
                    for i in range(4):
                        y[32 * g + 8 * pair + i] = _signed(step * first[i], sign, i)
                        y[32 * g + 8 * pair + 4 + i] = _signed(step * second[i], sign, 4 + i)


@njit(nogil=True, cache=in_use())
def iq3_s(rows_NB, out_NK, grid, signs):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[110 * b : 110 * b + 110], out[256 * b : 256 * b + 256]
            scale = half_at(block, 0)
            for p in range(64):
                step = scale * F(1 + 2 * (block[106 + p // 16] >> (p // 8 % 2 * 4) & 15))
                point = grid[np.uint32(block[2 + p]) | np.uint32(block[66 + p // 8] >> (p % 8) & 1) << 8]
                for i in range(4):
                    y[4 * p + i] = _signed(step * point[i], block[74 + p // 2], p % 2 * 4 + i)


@njit(nogil=True, cache=in_use())
def iq1_s(rows_NB, out_NK, grid, signs):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[50 * b : 50 * b + 50], out[256 * b : 256 * b + 256]
            scale = half_at(block, 0)
            for g in range(8):
                high = u16(block, 34 + 2 * g)
                step, delta = scale * F(2 * (high >> 12 & 7) + 1), F(-0.125) if high & 0x8000 else F(0.125)
                for p in range(4):
                    point = grid[np.uint32(block[2 + 4 * g + p]) | (high >> (3 * p) & 7) << 8]
                    for i in range(8):
                        y[32 * g + 8 * p + i] = step * (point[i] + delta)


@njit(nogil=True, cache=in_use())
def iq1_m(rows_NB, out_NK, grid, signs):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[56 * b : 56 * b + 56], out[256 * b : 256 * b + 256]
            scale = single(block[49] >> 4 | block[51] & 0xF0 | (block[53] & 0xF0) << 4 | (block[55] & 0xF0) << 8)
            for p in range(32):
                step = scale * F(2 * (u16(block, 48 + p // 8 * 2) >> (p // 2 % 4 * 3) & 7) + 1)
                high = block[32 + p // 2] >> (p % 2 * 4) & 15
                point, delta = grid[np.uint32(block[p]) | np.uint32(high & 7) << 8], F(-0.125) if high & 8 else F(0.125)
                for i in range(8):
                    y[8 * p + i] = step * (point[i] + delta)
