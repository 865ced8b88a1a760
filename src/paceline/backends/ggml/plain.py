"""Converts GGML's blocks of one scale to float32: Q4_0 to Q8_0, IQ4_NL, the microscaling types, ternary codes. Before them come conversions of small
numbers to float32 and back, in integer arithmetic that every processor has.

Each function of a type writes out_NK [N, K] from rows_NB, uint8 [N, row bytes]. The arithmetic is gguf-py's, rounding for rounding.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from paceline.backends.compiling import inner
from paceline.backends.kernel_cache import in_use

TO_SINGLE = np.float32(2.0**112)
"""Factor that corrects a half's exponent after it was moved to the place of a float32's exponent."""
ROUND = np.float32(1.5 * 2**23)
"""Added and subtracted again, it rounds |x| < 2^22 to the nearest integer, ties to even."""
HALF_MAX = np.float32(65504.0)


@njit(nogil=True, inline="always")
def u16(row, at):
    """Return the little-endian 16 bits at byte `at` of a row, as uint32."""
    return np.uint32(row[at]) | np.uint32(row[at + 1]) << np.uint32(8)


@njit(nogil=True, inline="always")
def u32(row, at):
    return u16(row, at) | u16(row, at + 2) << np.uint32(16)


@inner
def single(half):
    """Convert the bits of a finite half to float32, exactly."""
    magnitude = np.uint32((half & 0x7FFF) << 13).view(np.float32) * TO_SINGLE
    return -magnitude if half & 0x8000 else magnitude


@njit(nogil=True, inline="always")
def half_at(row, at):
    """Return the half at byte `at` of a row as float32."""
    return single(u16(row, at))


@inner
def half_bits(value):
    """Return the bits (uint16) of the half nearest to a float32, ties to even. Numbers beyond the largest half become the largest."""
    clipped = min(max(value, -HALF_MAX), HALF_MAX)
    bits = np.float32(clipped).view(np.uint32)
    sign, magnitude = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    if magnitude < 0x38800000:  # below the smallest normal half: in a sum with 0.5, the last place is that of a denormal half
        rounded = np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5)).view(np.uint32) - 0x3F000000
    else:
        rounded = magnitude + 0xFFF + (magnitude >> 13 & 1) - (112 << 23) >> 13
    return np.uint16(sign | rounded)


@inner
def bf16_bits(value):
    """Return the bits (uint16) of the bf16 nearest to a float32, ties to even; a NaN stays a NaN."""
    bits = np.float32(value).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return np.uint16(rounded if (bits & 0x7FFFFFFF) <= 0x7F800000 else 0x7FC0)


F = np.float32
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Values of the 16 codes of a 4-bit float, doubled."""
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""Values of IQ4's 16 codes."""


@njit(nogil=True, cache=in_use())
def q4_0(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for g in range(out.size // 32):
            block, y = row[18 * g : 18 * g + 18], out[32 * g : 32 * g + 32]
            scale = half_at(block, 0)
            for i in range(16):
                y[i] = scale * (F(block[2 + i] & 15) - F(8))
                y[16 + i] = scale * (F(block[2 + i] >> 4) - F(8))


@njit(nogil=True, cache=in_use())
def q4_1(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for g in range(out.size // 32):
            block, y = row[20 * g : 20 * g + 20], out[32 * g : 32 * g + 32]
            scale, offset = half_at(block, 0), half_at(block, 2)
            for i in range(16):
                y[i] = scale * F(block[4 + i] & 15) + offset
                y[16 + i] = scale * F(block[4 + i] >> 4) + offset


@njit(nogil=True, cache=in_use())
def q5_0(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for g in range(out.size // 32):
            block, y = row[22 * g : 22 * g + 22], out[32 * g : 32 * g + 32]
            scale, high = half_at(block, 0), u32(block, 2)
            for i in range(16):
                y[i] = scale * (F(block[6 + i] & 15 | (high >> i & 1) << 4) - F(16))
                y[16 + i] = scale * (F(block[6 + i] >> 4 | (high >> (16 + i) & 1) << 4) - F(16))


@njit(nogil=True, cache=in_use())
def q5_1(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for g in range(out.size // 32):
            block, y = row[24 * g : 24 * g + 24], out[32 * g : 32 * g + 32]
            scale, offset, high = half_at(block, 0), half_at(block, 2), u32(block, 4)
            for i in range(16):
                y[i] = scale * F(block[8 + i] & 15 | (high >> i & 1) << 4) + offset
                y[16 + i] = scale * F(block[8 + i] >> 4 | (high >> (16 + i) & 1) << 4) + offset


@njit(nogil=True, cache=in_use())
def q8_0(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        codes = row.view(np.int8)
        for g in range(out.size // 32):
            scale = half_at(row, 34 * g)
            for i in range(32):
                out[32 * g + i] = scale * F(codes[34 * g + 2 + i])


@njit(nogil=True, cache=in_use())
def iq4_nl(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for g in range(out.size // 32):
            block, y = row[18 * g : 18 * g + 18], out[32 * g : 32 * g + 32]
            scale = half_at(block, 0)
            for i in range(16):
                y[i] = scale * NONLINEAR[block[2 + i] & 15]
                y[16 + i] = scale * NONLINEAR[block[2 + i] >> 4]


@njit(nogil=True, cache=in_use())
def iq4_xs(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[136 * b : 136 * b + 136], out[256 * b : 256 * b + 256]
            scale, high = half_at(block, 0), u16(block, 2)
            for g in range(8):
                low = block[4 + g // 2] >> (g % 2 * 4) & 15
                step = scale * (F(low | (high >> (2 * g) & 3) << 4) - F(32))
                for i in range(16):
                    code = block[8 + 16 * g + i]
                    y[32 * g + i] = step * NONLINEAR[code & 15]
                    y[32 * g + 16 + i] = step * NONLINEAR[code >> 4]


@njit(nogil=True, cache=in_use())
def mxfp4(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for g in range(out.size // 32):
            block, y = row[17 * g : 17 * g + 17], out[32 * g : 32 * g + 32]
            e = np.uint32(block[0])
            scale = np.uint32(0x00200000 << e if e < 2 else (e - 1) << 23).view(np.float32)
            for i in range(16):
                y[i] = scale * E2M1[block[1 + i] & 15]
                y[16 + i] = scale * E2M1[block[1 + i] >> 4]


@njit(nogil=True, cache=in_use())
def nvfp4(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 64):
            block, y = row[36 * b : 36 * b + 36], out[64 * b : 64 * b + 64]
            for g in range(4):
                e, mantissa = block[g] >> 3 & 15, F(block[g] & 7)
                scale = mantissa * F(2.0**-10)
                if e:
                    scale = (F(8) + mantissa) * np.uint32((e + 127 - 11) << 23).view(np.float32)
                if block[g] == 0x7F:
                    scale = F(0)
                for i in range(8):
                    y[16 * g + i] = scale * E2M1[block[4 + 8 * g + i] & 15]
                    y[16 * g + 8 + i] = scale * E2M1[block[4 + 8 * g + i] >> 4]


@njit(nogil=True, inline="always")
def _trit(byte, power):
    """Return one of the five digits in a byte as -1, 0 or 1. `power`: 3 to the digit's number."""
    return F((byte * power & 255) * 3 >> 8) - F(1)


@njit(nogil=True, cache=in_use())
def tq1_0(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[54 * b : 54 * b + 54], out[256 * b : 256 * b + 256]
            scale, power = half_at(block, 52), 1
            for digit in range(5):
                for i in range(32):
                    y[32 * digit + i] = scale * _trit(block[i], power)
                for i in range(16):
                    y[160 + 16 * digit + i] = scale * _trit(block[32 + i], power)
                if digit < 4:
                    for i in range(4):
                        y[240 + 4 * digit + i] = scale * _trit(block[48 + i], power)
                power *= 3


@njit(nogil=True, cache=in_use())
def tq2_0(rows_NB, out_NK):
    for row, out in zip(rows_NB, out_NK):
        for b in range(out.size // 256):
            block, y = row[66 * b : 66 * b + 66], out[256 * b : 256 * b + 256]
            scale = half_at(block, 64)
            for at in range(256):
                y[at] = scale * (F(block[at // 128 * 32 + at % 32] >> (at % 128 // 32 * 2) & 3) - F(1))
