"""Attention as docs/internals/arithmetic.md defines it, in plain NumPy: slow, and the same bits.

Shapes: K keys, D head dimensions. A row is one query head at one position.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.backends.quantize import round_to_bf16

Float = npt.NDArray[np.float32]

SEGMENT = 512
EXP2 = (1.3264728e-3, 9.6715130e-3, 5.5507336e-2, 2.4022242e-1, 6.9314700e-1)
"""Highest power first."""
LEAST_NORMAL = 2.0**-126


def flush(x: npt.NDArray[np.floating]) -> Float:
    """Denormal inputs as zeros of their sign."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < LEAST_NORMAL, np.copysign(np.float32(0), x), x).astype(np.float32)


def rounded(exact: npt.NDArray[np.float64]) -> Float:
    """float64 to fp32, to nearest even; what is under 2**-126 once it has 24 bits is zero."""
    scaled = exact * 2.0**64  # so that rounding to 24 bits sees no denormals
    with np.errstate(over="ignore"):
        tiny = np.abs(np.where(np.abs(exact) < 2.0**-100, scaled, 1.0).astype(np.float32)) < LEAST_NORMAL * 2.0**64
        return np.where(tiny, np.copysign(0.0, exact), exact).astype(np.float32)


def fma(a: Float, b: Float, c: Float) -> Float:
    """a * b + c, rounded once. The product is exact in float64; the sum is rounded to odd there, which leaves the rounding to fp32 right.

    Source: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008: 53 bits are two more than twice 24.
    """
    product = flush(a).astype(np.float64) * flush(b).astype(np.float64)
    product, c_ = np.broadcast_arrays(product, flush(c).astype(np.float64))
    total = product + c_
    # The exact error of the sum (Knuth's TwoSum).
    late = total - product
    error = (product - (total - late)) + (c_ - late)
    bits = total.view(np.int64) if total.flags.c_contiguous else np.ascontiguousarray(total).view(np.int64)
    inexact_even = (error != 0) & (bits % 2 == 0)
    away = (error > 0) == (total > 0)
    return rounded(np.where(inexact_even, bits + np.where(away, 1, -1), bits).view(np.float64))


def add(a: Float, b: Float) -> Float:
    return fma(a, np.float32(1.0) + np.zeros_like(a), b)


def mul(a: Float, b: Float) -> Float:
    return rounded(flush(a).astype(np.float64) * flush(b).astype(np.float64))


def to_bf16(x: Float) -> Float:
    """Rounded to bf16, widened again."""
    return (round_to_bf16(x).astype(np.uint32) << 16).view(np.float32)


def weight(x: Float) -> Float:
    """2**x, zero below 2**-126."""
    whole = np.rint(x)
    rest = flush(x - whole)
    power = np.full_like(x, EXP2[0])
    for coefficient in (*EXP2[1:], 1.0):
        power = fma(power, rest, np.full_like(x, coefficient))
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(power, np.maximum(whole, -126).astype(np.int32)).astype(np.float32)
    return np.where(x < np.float32(-126), np.float32(0), scaled)


def sum_of_lanes(x_K: Float) -> np.float32:
    """Sixteen lanes, each over every sixteenth value in order, then a tree of halves."""
    lanes = np.zeros(16, np.float32)
    for block in np.resize(np.append(x_K, np.zeros(-len(x_K) % 16, np.float32)), (-(-len(x_K) // 16), 16)):
        lanes = add(lanes, block)
    for width in (8, 4, 2, 1):
        lanes = add(lanes[:width], lanes[width : 2 * width])
    return lanes[0]


def segment(q_D: Float, k_KD: Float, v_KD: Float, scale: np.float32, hidden: int = 0) -> tuple[np.float32, np.float32, Float]:
    """(maximum, sum of weights, mix of values) of one segment's keys up to the row's own; the first `hidden` are before its window."""
    scores = np.zeros(len(k_KD), np.float32)
    for d in range(0, len(q_D), 2):
        for i in (d + 1, d):
            scores = fma(k_KD[:, i], np.broadcast_to(q_D[i], scores.shape), scores)
    top = mul(scores[hidden:].max(keepdims=True), np.array([scale]))[0]
    weights = weight(fma(scores, np.full_like(scores, scale), np.full_like(scores, -top)))
    weights[:hidden] = 0
    shares = to_bf16(weights)
    if len(shares) % 2:
        shares, v_KD = np.append(shares, np.float32(0)), np.vstack([v_KD, np.zeros_like(v_KD[:1])])
    mix = np.zeros(v_KD.shape[1], np.float32)
    for key in range(0, len(shares), 2):
        for i in (key + 1, key):
            mix = fma(v_KD[i], np.full_like(mix, shares[i]), mix)
    return top, sum_of_lanes(weights), mix


def attend(q_D: Float, k_KD: Float, v_KD: Float, window: int = 0, sink: float | None = None) -> Float:
    """One row's attention to all keys given, or to the last ones of a window, as bf16 values in fp32. Inputs are bf16 values."""
    scale = np.float32(len(q_D) ** -0.5 * math.log2(math.e))
    lowest = max(0, len(k_KD) - window) if window else 0
    begin = lowest // SEGMENT * SEGMENT
    top, total, mix = segment(q_D, k_KD[begin : begin + SEGMENT], v_KD[begin : begin + SEGMENT], scale, lowest - begin)
    segments = [
        segment(q_D, k_KD[start : start + SEGMENT], v_KD[start : start + SEGMENT], scale)
        for start in range(begin + SEGMENT, len(k_KD), SEGMENT)
    ]
    if sink is not None:
        segments.append((np.float32(sink) * np.float32(1.44269504), np.float32(1), np.zeros_like(mix)))
    for later in segments:
        most = max(top, later[0])
        before, now = (weight(add(np.array([one]), np.array([-most]))) for one in (top, later[0]))
        total = fma(np.array([total]), before, mul(np.array([later[1]]), now))[0]
        mix = fma(mix, np.broadcast_to(before, mix.shape), mul(later[2], np.broadcast_to(now, mix.shape)))
        top = most
    inverse = rounded(np.array([1.0]) / np.float64(total)) if math.isfinite(total) else np.array([0], np.float32)
    return to_bf16(add(mul(mix, np.broadcast_to(inverse, mix.shape)), np.zeros_like(mix)))
