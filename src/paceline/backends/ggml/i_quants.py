"""GGML's I-quants, whose codes name points of a grid, to float32.

Each function writes out_NK [N, K] from rows_NB, uint8 [N, row bytes]; `grid` is float32 [points, weights a point], and `signs` holds the
eight signs that a 7-bit index stands for. Both come from gguf-py. The arithmetic is gguf-py's, rounding for rounding.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.backends.ggml.bits import half_at, single, u16, u32
from paceline.backends.kernel_cache import in_use

F = np.float32


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
