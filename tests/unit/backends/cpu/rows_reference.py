"""`docs/internals/arithmetic.md`, Between the products, in plain NumPy: norms, rotary embedding, the gate, rounding to bf16.

Shapes: D dimensions of a row or a head.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tests.unit.backends.cpu.arithmetic import Float32, fma

from paceline.backends.quantize import round_to_bf16
from paceline.core.model import Activation

Bits = npt.NDArray[np.uint16]
EXP2 = (1.3264728e-3, 9.6715130e-3, 5.5507336e-2, 2.4022242e-1, 6.9314700e-1, 1.0)
LEAST_NORMAL = np.float32(2.0**-126)


def bf16(x: Float32) -> Bits:
    """Rounded to nearest even; denormals are zeros of their sign, before and after."""
    return round_to_bf16(np.where(np.abs(x) < LEAST_NORMAL, np.copysign(np.float32(0), x), x))


def exp2(x: Float32) -> Float32:
    whole = np.rint(x)
    rest = np.where(np.isinf(x), np.float32(0), x - whole)
    power = np.full_like(x, EXP2[0])
    for coefficient in EXP2[1:]:
        power = fma(power, rest, np.full_like(x, coefficient))
    with np.errstate(over="ignore"):
        scaled = np.ldexp(power, np.clip(whole, -126, 300).astype(np.int32))
    return np.where(x < np.float32(-126), np.float32(0), scaled)


def inverse_rms(x_D: Float32, eps: np.float32) -> np.float32:
    """Of all values: sixteen lanes, then a tree of halves."""
    lanes = np.zeros(16, np.float32)
    for values in x_D.reshape(-1, 16):
        lanes = fma(values, values, lanes)
    for width in (8, 4, 2, 1):
        lanes = lanes[:width] + lanes[width : 2 * width]
    return np.float32(1) / np.sqrt(lanes[0] / np.float32(len(x_D)) + eps)


def norm(x_D: Float32, weight_D: Float32, eps: np.float32) -> Float32:
    """Before it is rounded to bf16, which a head's is not."""
    return x_D * inverse_rms(x_D, eps) * weight_D


def rotate(x_D: Float32, cos: Float32, sin: Float32) -> Bits:
    a, z = np.split(x_D, 2)
    return bf16(np.concatenate([a * cos - z * sin, z * cos + a * sin]))


def gate(g: Float32, u: Float32, kind: Activation = Activation.SILU) -> Bits:
    with np.errstate(over="ignore", invalid="ignore"):
        slope = np.full_like(g, -1.44269504)
        if kind is Activation.CLAMPED:
            g, u = np.minimum(g, np.float32(7)), np.clip(u, np.float32(-7), np.float32(7)) + np.float32(1)
            slope = np.full_like(g, -2.45546696)
        if kind is Activation.GELU_TANH:
            square = g * g
            slope = fma(np.where(np.isinf(square), 0, square), np.full_like(g, -0.102943242), np.full_like(g, -2.30220819))
            slope = np.where(np.isinf(square), -square, slope)
        return bf16(g / (np.float32(1) + exp2(g * slope)) * u)


def added(x_D: Float32, y_D: Float32, scale: np.float32, weight_D: Float32 | None = None, eps: np.float32 = LEAST_NORMAL) -> Float32:
    """The residual with what attention or feed-forward gave, normed first where there is a norm behind it."""
    return x_D + (y_D if weight_D is None else norm(y_D, weight_D, eps)) * scale
