"""Small numbers to float32 and back, in integer arithmetic that every processor has."""

from __future__ import annotations

import numpy as np
from numba import njit

TO_SINGLE = np.float32(2.0**112)
"""Between a half's exponent moved to a float32's place, and what it stands for."""
ROUND = np.float32(1.5 * 2**23)
"""Added and taken away again, it rounds |x| < 2^22 to the nearest whole number, ties to even."""
HALF_MAX = np.float32(65504.0)


@njit(nogil=True, inline="always")
def u16(row, at):
    """The little-endian 16 bits at a byte of a row, as uint32."""
    return np.uint32(row[at]) | np.uint32(row[at + 1]) << np.uint32(8)


@njit(nogil=True, inline="always")
def u32(row, at):
    return u16(row, at) | u16(row, at + 2) << np.uint32(16)


@njit(nogil=True)
def single(half):
    """float32 of the bits of a finite half, exactly."""
    magnitude = np.uint32((half & 0x7FFF) << 13).view(np.float32) * TO_SINGLE
    return -magnitude if half & 0x8000 else magnitude


@njit(nogil=True, inline="always")
def half_at(row, at):
    """float32 of the half at a byte of a row."""
    return single(u16(row, at))


@njit(nogil=True)
def half_bits(value):
    """Bits of the half nearest to a float32, ties to even; beyond the largest, the largest. uint16."""
    clipped = min(max(value, -HALF_MAX), HALF_MAX)
    bits = np.float32(clipped).view(np.uint32)
    sign, magnitude = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    if magnitude < 0x38800000:  # below the smallest normal half: 0.5's last place is a half's
        rounded = np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5)).view(np.uint32) - 0x3F000000
    else:
        rounded = magnitude + 0xFFF + (magnitude >> 13 & 1) - (112 << 23) >> 13
    return np.uint16(sign | rounded)


@njit(nogil=True)
def bf16_bits(value):
    """Bits of the bf16 nearest to a float32, ties to even; a NaN stays one. uint16."""
    bits = np.float32(value).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return np.uint16(rounded if (bits & 0x7FFFFFFF) <= 0x7F800000 else 0x7FC0)
