"""`docs/internals/arithmetic.md` once more, in plain NumPy and slow: what the compiled products must give, bit for bit.

Shapes: N outputs, K inputs, G groups of 32 inputs, T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.forms import LANES, LAYOUT, Form, Inputs
from paceline.backends.cpu.pack import row_bytes

Float32 = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_HALVES = {
    Form.Q4_0: (0,), Form.Q4_1: (0, 2), Form.Q5_0: (0,), Form.Q5_1: (0, 2), Form.Q8_0: (0,),
    Form.Q4_K: (0, 2), Form.Q5_K: (0, 2), Form.Q6_K: (208,), Form.BF16: (),
    Form.MXFP4: (),
}  # fmt: skip
"""Where a block of the file has its half floats."""


def random_rows(form: Form, n: int, k: int, rng: np.random.Generator) -> Bytes:
    """Rows as a file would have them: every code, every sub-scale, and scales of both signs that sum to values of order one."""
    if form is Form.BF16:
        return (rng.standard_normal((n, k), np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    rows = rng.integers(0, 256, (n, row_bytes(form, k)), np.uint8)
    blocks = rows.reshape(n, -1, LAYOUT[form].record_bytes // LANES)
    for at in _HALVES[form]:
        halves = (rng.standard_normal(blocks.shape[:2]) * (0.1 if LAYOUT[form].groups == 1 else 0.002)).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    if form is Form.MXFP4:
        blocks[:, :, 0] = 120 + blocks[:, :, 0] % 8
        blocks[0, :2, 0] = 0, 1  # scales that are denormal
    return rows


@dataclass(frozen=True)
class Matrix:
    """What the bits of a file stand for: w = scale * sub * (code - zero) + offset."""

    codes_NK: Whole
    """Less `zero` where the group has one scale (Q6_K)."""
    scale_NG: Float32
    offset_NG: Float32 | None
    sub_NG2: Whole | None

    def values(self) -> Float32:
        """[N, K], each rounded once to fp32."""
        groups = self.codes_NK.reshape(*self.scale_NG.shape, 2, 16).astype(np.float64) * self.scale_NG[..., None, None]
        if self.sub_NG2 is not None:
            groups = groups * self.sub_NG2[..., None]
        if self.offset_NG is not None:
            groups = groups + self.offset_NG[..., None, None]
        return groups.astype(np.float32).reshape(self.codes_NK.shape)


def _half(blocks: Bytes, at: int) -> Float32:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def matrix(form: Form, rows: Bytes) -> Matrix:
    """Take a file's rows of an integer form apart."""
    n, layout = len(rows), LAYOUT[form]
    blocks = rows.reshape(n, -1, layout.record_bytes // LANES)
    wide = blocks.astype(np.int64)
    if form is Form.Q8_0:
        return Matrix(blocks[..., 2:].view(np.int8).astype(np.int64).reshape(n, -1), _half(blocks, 0), None, None)
    if form is Form.MXFP4:
        codes = np.concatenate([wide[..., 1:] & 15, wide[..., 1:] >> 4], -1)
        points = np.array([0, 1, 2, 3, 4, 6, 8, 12])[codes & 7] * np.where(codes & 8, -1, 1)
        return Matrix(points.reshape(n, -1), np.ldexp(np.float32(1), wide[..., 0] - 128), None, None)
    bit = np.arange(32)
    if layout.groups == 1:
        halves = _HALVES[form]
        at = 2 * len(halves)
        upper = 0
        if layout.bits == 5:
            every = np.ascontiguousarray(blocks[..., at : at + 4]).view(np.uint32).astype(np.int64)
            upper, at = every >> bit & 1, at + 4
        codes = np.concatenate([wide[..., at:] & 15, wide[..., at:] >> 4], -1) + 16 * upper
        scale = _half(blocks, 0)
        offset = _half(blocks, 2) if len(halves) == 2 else scale * np.float32(-layout.zero)
        return Matrix(codes.reshape(n, -1), scale, offset, None)
    if form is Form.Q6_K:
        low = wide[..., :128].reshape(n, -1, 2, 1, 2, 32) >> np.array([0, 4]).reshape(2, 1, 1) & 15
        high = wide[..., 128:192].reshape(n, -1, 2, 1, 32) >> np.array([0, 2, 4, 6]).reshape(4, 1) & 3
        codes = low.reshape(n, -1, 2, 4, 32) + 16 * high - layout.zero
        sub = blocks[..., 192:208].view(np.int8).astype(np.int64)
        return Matrix(codes.reshape(n, -1), np.repeat(_half(blocks, 208), 8, -1), None, sub.reshape(n, -1, 2))
    six = wide[..., 4:16]
    scales = np.concatenate([six[..., :4] & 63, six[..., 8:] & 15 | six[..., :4] >> 6 << 4], -1)
    minimums = np.concatenate([six[..., 4:8] & 63, six[..., 8:] >> 4 | six[..., 4:8] >> 6 << 4], -1)
    at = 16
    upper = 0
    if layout.bits == 5:
        upper, at = wide[..., None, 16:48] >> np.arange(8).reshape(8, 1) & 1, 48
    codes = (wide[..., at:].reshape(n, -1, 4, 1, 32) >> np.array([0, 4]).reshape(2, 1) & 15).reshape(n, -1, 8, 32) + 16 * upper
    scale, least = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return Matrix(
        codes.reshape(n, -1),
        (scale * scales.astype(np.float32)).reshape(n, -1),
        (-least * minimums.astype(np.float32)).reshape(n, -1),
        None,
    )


def widen(bits: npt.NDArray[np.uint16]) -> Float32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a * b + c, rounded once: the product is exact in float64, the sum is rounded there to odd."""
    product, wide = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(product + wide)
    rest = total - product
    error = (product - (total - rest)) + (wide - rest)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & (bits % 2 == 0), bits + away, bits).view(np.float64).astype(np.float32)


def quantise(x_TK: npt.NDArray[np.uint16], bits: int) -> tuple[Whole, Float32, Float32]:
    """Codes [T, K], scales [T, G] and scale * sum of codes [T, G] of bf16 activations without a group of zeros."""
    groups, most = widen(x_TK).reshape(len(x_TK), -1, 32), np.float32(2 ** (bits - 1) - 1)
    peak = np.abs(groups).max(-1)
    codes = np.rint(groups * (most / peak)[..., None]).astype(np.int64)
    scale = peak / most
    return codes.reshape(x_TK.shape), scale, scale * codes.sum(-1).astype(np.float32)


def tree(sums: Sequence[Float32]) -> Float32:
    """Neighbours are added level by level; an odd last one passes up."""
    if len(sums) == 1:
        return sums[0]
    pairs = [left + right for left, right in zip(sums[::2], sums[1::2], strict=False)]
    return tree(pairs + ([sums[-1]] if len(sums) % 2 else []))


def product(form: Form, rows: Bytes, x_TK: npt.NDArray[np.uint16], bounds: Sequence[int]) -> Float32:
    """[T, N], summed over segments of groups from each of `bounds` to the next."""
    add_group = _add_bf16(rows, x_TK) if form is Form.BF16 else _add_whole(form, rows, x_TK)
    sums = list[Float32]()
    for first, stop in pairwise(bounds):
        total = np.zeros((len(x_TK), len(rows)), np.float32)
        for g in range(first, stop):
            total = add_group(total, g)
        sums.append(total)
    return tree(sums)


def _add_whole(form: Form, rows: Bytes, x_TK: npt.NDArray[np.uint16]) -> Callable[[Float32, int], Float32]:
    weights = matrix(form, rows)
    codes_TK, x_scale, x_sum = quantise(x_TK, 8 if LAYOUT[form].inputs is Inputs.INT8 else 16)

    def add_group(total: Float32, g: int) -> Float32:
        inputs = slice(32 * g, 32 * g + 32)
        products = weights.codes_NK[None, :, inputs] * codes_TK[:, None, inputs]
        if weights.sub_NG2 is not None:
            products = products.reshape(*products.shape[:2], 2, 16) * weights.sub_NG2[None, :, g, :, None]
        exact = products.reshape(*products.shape[:2], -1).sum(-1)
        assert np.abs(exact).max() <= 2**31
        part = exact.astype(np.float32) * x_scale[:, g, None]
        total = fma(np.broadcast_to(weights.scale_NG[:, g], part.shape), part, total)
        if weights.offset_NG is not None:
            total = fma(np.broadcast_to(weights.offset_NG[:, g], part.shape), np.broadcast_to(x_sum[:, g, None], part.shape), total)
        return total

    return add_group


def _add_bf16(rows: Bytes, x_TK: npt.NDArray[np.uint16]) -> Callable[[Float32, int], Float32]:
    weights, x = widen(rows.view(np.uint16)), widen(x_TK)

    def add_group(total: Float32, g: int) -> Float32:
        for pair in range(16 * g, 16 * g + 16):
            for k in (2 * pair + 1, 2 * pair):
                total = fma(np.broadcast_to(weights[:, k], total.shape), np.broadcast_to(x[:, k, None], total.shape), total)
        return total

    return add_group
