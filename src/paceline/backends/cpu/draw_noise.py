"""Noise of tokens, and the token that wins by it among those that filters leave (docs/arithmetic.md, Sampling).

What is skipped can't change a draw: noise has a least value, so the largest logit of a block tells for which of its tokens noise need be looked at at all.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from paceline.backends.cpu import draw_lanes as lanes
from paceline.backends.cpu.draw_lanes import BLOCK, HASH
from paceline.engine.arithmetic import LN2, LOG_SERIES, ROOT_HALF

_SLACK = 1.001
"""Bounds on noise keep this much more than they must: their rounding errors are 100 times smaller."""
_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@njit(nogil=True)
def _splitmix(x):
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


@njit(nogil=True)
def noise_key(seed, position):
    key = _splitmix(_splitmix(np.uint64(seed)) ^ (np.uint64(position) * _GOLDEN))
    return np.int64(key >> np.uint64(32)), np.int64(key & np.uint64(0xFFFFFFFF))


@njit(nogil=True)
def _noise(token, high, low):
    """32 random bits of a token."""
    mask = np.int64(0xFFFFFFFF)
    x = token ^ high
    x = ((x ^ (x >> 16)) * HASH[0]) & mask
    x = x ^ (x >> 15) ^ low
    x = (x * HASH[1]) & mask
    return x ^ (x >> 16)


@njit(nogil=True, error_model="numpy")
def log_of(x):
    bits = lanes.double_bits(x)
    exponent = (bits - ROOT_HALF) >> 52
    m = lanes.bits_double(bits - (exponent << 52))
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = LOG_SERIES[0]
    for coefficient in LOG_SERIES[1:]:
        series = series * square + coefficient
    return exponent * LN2 + 2.0 * s * series


@njit(nogil=True, error_model="numpy")
def race(x, n, tail, maxima, bounds, best, top, inverse, log_min_p, least, last, high, low):
    """The token of the least log(E) - z among those that the filters leave.

    Args:
        best: a token that they leave, of the largest logit.
        bounds: scratch of a float32 a block.
        least, last: as `draw_filters.last_left` has them.
        high, low: the noise's key.
    """
    lanes.exp_near(maxima.ctypes.data, len(bounds) // 16, top, inverse, bounds.ctypes.data)
    score = log_of(-log_of(1.0 - (_noise(best, high, low) + 0.5) * 2.0**-32))
    bound = math.exp(score) * 2.0**32 * _SLACK
    for block in range(len(maxima)):
        # E is at least v, so who wins has noise of at most exp(score + z).
        most = bounds[block] * bound
        if most < 0.5 or maxima[block] < least:
            continue
        at = x + 4 * BLOCK * block if (block + 1) * BLOCK <= n else tail.ctypes.data
        # Of a block's ids as they are hashed, the last six bits alone differ, and a product is the sum of its parts' products.
        first = block * BLOCK ^ high
        first = first ^ (first >> 16)
        turn = first & (BLOCK - 1)
        hits = lanes.noise_near((first - turn) * HASH[0] & 0xFFFFFFFF, low, np.int64(min(most, 4294967295.0)))
        while hits:
            lane = lanes.trailing_zeros(hits) ^ turn
            hits &= hits - 1
            token, logit = block * BLOCK + lane, lanes.load_float(at + 4 * lane)
            z = (logit - top) * inverse
            if z >= log_min_p and (logit > least or (logit == least and token <= last)):
                here = log_of(-log_of(1.0 - (_noise(token, high, low) + 0.5) * 2.0**-32)) - np.float64(z)
                if here < score or (here == score and token < best):
                    best, score = token, here
                    bound = math.exp(score) * 2.0**32 * _SLACK
    return best
