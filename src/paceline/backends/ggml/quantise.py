"""Converts float32 to GGML's Q4_1, Q5_1 and Q8_0, and the 4-bit types to Q4_1 with the same codes. Codes are computed with the scale rounded to a half.

Rows are uint8 [N, row bytes], values float32 [N, K].
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.backends.ggml.k_quants import scale_and_min
from paceline.backends.ggml.plain import ROUND, bf16_bits, half_at, half_bits, single
from paceline.backends.kernel_cache import in_use

F = np.float32


@njit(nogil=True, inline="always")
def _put_half(row, at, half):
    row[at], row[at + 1] = half & 0xFF, half >> 8


@njit(nogil=True, inline="always")
def _inverse(scale):
    return F(1) / scale if scale != F(0) else F(0)


@njit(nogil=True, inline="always")
def _put_range(block, x, steps):
    """Write a block's scale and offset as halves: the range from the smallest to the largest weight, divided by `steps`, and the smallest weight."""
    low, high = x[0], x[0]
    for i in range(32):
        low, high = min(low, x[i]), max(high, x[i])
    _put_half(block, 0, half_bits((high - low) / steps))
    _put_half(block, 2, half_bits(low))


@njit(nogil=True, inline="always")
def _code(x, offset, inverse, steps):
    """Return the code, from 0 to `steps`, that is nearest to a weight."""
    return np.uint32(min(max((x - offset) * inverse, F(0)), steps) + ROUND - ROUND)


@njit(nogil=True, cache=in_use())
def to_q4_1(values_NK, out_NB):
    """Quantise to 16 codes, from a group's smallest weight to its largest."""
    for values, out in zip(values_NK, out_NB):
        for g in range(values.size // 32):
            x, block = values[32 * g : 32 * g + 32], out[20 * g : 20 * g + 20]
            _put_range(block, x, F(15))
            inverse, offset = _inverse(half_at(block, 0)), half_at(block, 2)
            for i in range(16):
                block[4 + i] = _code(x[i], offset, inverse, F(15)) | _code(x[16 + i], offset, inverse, F(15)) << 4


@njit(nogil=True, cache=in_use())
def to_q5_1(values_NK, out_NB):
    """Quantise to 32 codes, from a group's smallest weight to its largest."""
    for values, out in zip(values_NK, out_NB):
        for g in range(values.size // 32):
            x, block = values[32 * g : 32 * g + 32], out[24 * g : 24 * g + 24]
            _put_range(block, x, F(31))
            inverse, offset = _inverse(half_at(block, 0)), half_at(block, 2)
            fifth = np.uint32(0)
            for i in range(16):
                first, second = _code(x[i], offset, inverse, F(31)), _code(x[16 + i], offset, inverse, F(31))
                block[8 + i] = first & 15 | (second & 15) << 4
                fifth |= first >> 4 << i | second >> 4 << (16 + i)
            for byte in range(4):
                block[4 + byte] = fifth >> (8 * byte) & 255


@njit(nogil=True, cache=in_use())
def to_q8_0(values_NK, out_NB):
    """Quantise symmetrically about zero, with 127 steps up to a group's largest magnitude."""
    for values, out in zip(values_NK, out_NB):
        for g in range(values.size // 32):
            x, block = values[32 * g : 32 * g + 32], out[34 * g : 34 * g + 34]
            largest = F(0)
            for i in range(32):
                largest = max(largest, abs(x[i]))
            scale = half_bits(largest / F(127))
            _put_half(block, 0, scale)
            inverse = _inverse(single(scale))
            for i in range(32):
                block[2 + i] = np.int32(min(max(x[i] * inverse, F(-127)), F(127)) + ROUND - ROUND)


@njit(nogil=True, cache=in_use())
def q4_0_to_q4_1(rows_NB, out_NB):
    """Convert with the offset -8 * scale. That is exact unless the offset is beyond the largest half."""
    for row, out in zip(rows_NB, out_NB):
        for g in range(row.size // 18):
            out[20 * g : 20 * g + 2] = row[18 * g : 18 * g + 2]
            _put_half(out, 20 * g + 2, half_bits(F(-8) * half_at(row, 18 * g)))
            out[20 * g + 4 : 20 * g + 20] = row[18 * g + 2 : 18 * g + 18]


@njit(nogil=True, cache=in_use())
def q4_k_to_q4_1(rows_NB, out_NB):
    """Convert with scales and offsets rounded to halves, an error of about 2^-12 of a step."""
    for row, out in zip(rows_NB, out_NB):
        for b in range(row.size // 144):
            block = row[144 * b : 144 * b + 144]
            scale, least = half_at(block, 0), half_at(block, 2)
            for g in range(8):
                code, m = scale_and_min(block, g)
                group = out[20 * (8 * b + g) : 20 * (8 * b + g) + 20]
                _put_half(group, 0, half_bits(scale * F(code)))
                _put_half(group, 2, half_bits(-least * F(m)))
                codes, shift = block[16 + g // 2 * 32 : 48 + g // 2 * 32], g % 2 * 4
                for i in range(16):
                    group[4 + i] = codes[i] >> shift & 15 | (codes[16 + i] >> shift & 15) << 4


@njit(nogil=True, cache=in_use())
def to_bf16(values_NK, out_NK):
    for values, out in zip(values_NK, out_NK):
        for k in range(values.size):
            out[k] = bf16_bits(values[k])
