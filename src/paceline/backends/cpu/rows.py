"""Row-wise steps between the matrix products: norms, rotary embedding, the gate, quantised activations, in vectors of 16 lanes in fixed order. It also
reads rows of the embedding from the packed records of the head's layout, so that a tied head is in memory once.

Addresses are i64; activations are bf16, the residual and products fp32. Dimensions are multiples of 32. An embedding's weight is
`scale * (code - zero) + offset`, rounded once to fp32, times the embedding's scale, then bf16. Shapes: T rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.compiling import inner
from paceline.backends.cpu.forms import LANES, LAYOUT, POINTS, Form, Scales
from paceline.backends.cpu.lowering import lowered, read, read_half, write
from paceline.backends.cpu.simd import F32, I32, Emit, F, I, Value
from paceline.backends.ggml.plain import bf16_bits
from paceline.backends.kernel_cache import in_use
from paceline.core.model import Activation


def _float(e: Emit, bits: Value) -> Value:
    return e.b.bitcast(e.b.trunc(bits, I32), F32)


def _rms(e: Emit, x: Value, n: Value, eps_bits: Value) -> Value:
    """Return 1 / sqrt(mean(x ** 2) + eps) over n fp32 values, in all lanes."""
    b = e.b
    squares = e.var(e.const(0.0))
    with e.loop(b.lshr(n, e.i64(4))) as i:
        v = e.load(F, x, e.mul(i, 64))
        b.store(e.fma(v, v, b.load(squares)), squares)
    mean = b.fdiv(e.sum(b.load(squares)), b.sitofp(n, F32))
    root = e.call("llvm.sqrt.f32", F32, b.fadd(mean, _float(e, eps_bits)))
    return e.splat(b.fdiv(ir.Constant(F32, 1.0), root), F)


@intrinsic
def rms_norm(_, x, weight, n, eps_bits, out):
    """Compute out = bf16(x / rms(x) * weight). x, weight: fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, weight, n, eps_bits, out = args
        b = e.b
        scale = _rms(e, x, n, eps_bits)
        with e.loop(b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            y = b.fmul(b.fmul(e.load(F, x, at), scale), e.load(F, weight, at))
            e.store(e.to_bf16(y), out, e.mul(i, 32))

    return lowered(body, types.void, *[types.int64] * 5)


@intrinsic(prefer_literal=True)
def add_normed(_, rounded, x, y, weight, n, eps_bits, scale_bits):
    """Compute x = x + y / rms(y) * weight * scale. `rounded`: x is rounded to bf16 but stays fp32, as at a layer's end. x, y, weight: fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, y, weight, n, eps_bits, scale_bits = args
        b = e.b
        root, scale = _rms(e, y, n, eps_bits), e.splat(_float(e, scale_bits), F)
        with e.loop(b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            normed = b.fmul(b.fmul(e.load(F, y, at), root), e.load(F, weight, at))
            total = b.fadd(e.load(F, x, at), b.fmul(normed, scale))
            e.store(_rounded(e, total) if rounded.literal_value else total, x, at)

    return lowered(body, types.void, rounded, *[types.int64] * 6)


@intrinsic
def head_norm(_, x, weight, n, eps_bits):
    """Compute x = x / rms(x) * weight in place: the query and key norm of Qwen3. x, weight: fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, weight, n, eps_bits = args
        b = e.b
        scale = _rms(e, x, n, eps_bits)
        with e.loop(b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            e.store(b.fmul(b.fmul(e.load(F, x, at), scale), e.load(F, weight, at)), x, at)

    return lowered(body, types.void, *[types.int64] * 4)


@intrinsic
def rotate(_, x, cos, sin, half, out):
    """Compute out = bf16(rotary embedding of x), with the pairs (i, i + half). x: fp32 [2 * half]; cos, sin: fp32 [half]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, cos, sin, half, out = args
        b = e.b
        with e.loop(b.lshr(half, e.i64(4))) as i:
            at = e.mul(i, 64)
            second = b.add(at, e.mul(half, 4))
            c, s = e.load(F, cos, at), e.load(F, sin, at)
            a, z = e.load(F, x, at), e.load(F, x, second)
            e.store(e.to_bf16(b.fsub(b.fmul(a, c), b.fmul(z, s))), out, e.mul(i, 32))
            e.store(e.to_bf16(b.fadd(b.fmul(z, c), b.fmul(a, s))), out, b.add(e.mul(i, 32), e.mul(half, 2)))

    return lowered(body, types.void, *[types.int64] * 5)


@intrinsic
def round_bf16(_, x, n, out):
    """Compute out = bf16(x): fp32 [n] to bf16 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, out = args
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            e.store(e.to_bf16(e.load(F, x, e.mul(i, 64))), out, e.mul(i, 32))

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic
def deal_bf16(_, x, n, out, apart):
    """Copy a bf16 row [n] as groups of 32 that are `apart` bytes apart."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, out, apart = args
        with e.loop(e.b.lshr(n, e.i64(5))) as g:
            e.store(e.load(I, x, e.mul(g, 64)), out, e.b.mul(g, apart))

    return lowered(body, types.void, *[types.int64] * 4)


@intrinsic
def widen_bf16(_, x, n, out):
    """Compute out = fp32(x): bf16 [n] to fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, out = args
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            e.store(e.load_bf16(x, e.mul(i, 32)), out, e.mul(i, 64))

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic(prefer_literal=True)
def quantize(_, bits, x, n, out, apart):
    """Quantise a bf16 row to codes of `bits` (8 or 16), with one scale for each group of 32: x = scale * code, scale = max |x| / 127 or 32767.

    Each group becomes a record (`forms.GROUP_BYTES` lists its fields); records are `apart` bytes apart. This is the scheme of llama.cpp's Q8_1. A number
    that is not finite makes the scale not finite, and so reaches the products; a group of zeros has scale 0.
    """
    width = bits.literal_value
    most = ir.Constant(F32, float(2 ** (width - 1) - 1))

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, out, apart = args
        b = e.b
        with e.loop(b.lshr(n, e.i64(5))) as g:
            halves = [e.load_bf16(x, b.add(e.mul(g, 64), e.i64(32 * half))) for half in range(2)]
            # Read as integers, the magnitudes of floats keep their order, and NaN is the greatest.
            size = [b.and_(b.bitcast(half, I), e.const_i(0x7FFFFFFF)) for half in halves]
            peak = b.bitcast(e.max_int(b.select(b.icmp_signed(">", *size), *size)), F32)
            scale, inverse = b.fdiv(peak, most), e.splat(b.fdiv(most, peak), F)
            codes = [e.narrow(e.to_int(b.fmul(half, inverse)), width) for half in halves]
            record = e.at(out, b.mul(g, apart))
            for half in range(2):
                e.store(codes[half], record, 2 * width * half)
            halves_sums = [e.sum_int(b.sext(half, I)) for half in codes]
            e.store(scale, record, 4 * width, align=4)
            e.store(b.fmul(scale, b.sitofp(b.add(*halves_sums), F32)), record, 4 * width + 4, align=4)
            for half in range(2 if width == 8 else 0):
                e.store(b.mul(halves_sums[half], ir.Constant(I32, -32)), record, 4 * width + 8 + 4 * half, align=4)

    return lowered(body, types.void, bits, *[types.int64] * 4)


@intrinsic
def add(_, out, x, y, n):
    """Compute out = x + y: fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        out, x, y, n = args
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            e.store(e.b.fadd(e.load(F, x, at), e.load(F, y, at)), out, at)

    return lowered(body, types.void, *[types.int64] * 4)


@inner
def add_into(x, y, n):
    """Compute x += y: fp32 [n]."""
    add(x, x, y, n)


def _rounded(e: Emit, x: Value) -> Value:
    """Return x rounded to bf16, as fp32."""
    return e.b.bitcast(e.b.shl(e.b.zext(e.to_bf16(x), ir.VectorType(I32, 16)), e.const_i(16)), F)


@intrinsic(prefer_literal=True)
def add_scaled(_, rounded, x, y, n, scale_bits):
    """Compute x = x + y * scale, fp32 [n]. `rounded`: x is rounded to bf16 but stays fp32, as the residual at a layer's end."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, y, n, scale_bits = args
        scale = e.splat(_float(e, scale_bits), F)
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            total = e.b.fadd(e.load(F, x, at), e.b.fmul(e.load(F, y, at), scale))
            e.store(_rounded(e, total) if rounded.literal_value else total, x, at)

    return lowered(body, types.void, rounded, *[types.int64] * 4)


@intrinsic
def multiply_by(_, x, n, scale_bits):
    """Compute x *= scale: fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, scale_bits = args
        scale = e.splat(_float(e, scale_bits), F)
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            e.store(e.b.fmul(e.load(F, x, at), scale), x, at)

    return lowered(body, types.void, *[types.int64] * 3)


GATES = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED: 2}
"""Numbers that stand for the activations in the kernels."""
GELU = (-0.102943242, -2.30220819)
"""Coefficients c3, c1 of tanh-GELU as g / (1 + exp2(c3 * g ** 3 + c1 * g)). c1 = -2 log2(e) root(2 / pi), c3 = 0.044715 * c1, in fp32."""
STEEPER, MOST = -2.45546696, 7.0
"""Constants of the clamped gate: -1.702 log2(e) in fp32, and the bound to which it clips g from above, and u from both sides."""


@intrinsic(prefer_literal=True)
def gate(_, kind, x, out):
    """Compute one group of 32 outputs: out = bf16(silu(g) * u), or another activation of `GATES`. x: fp32, 32 of g and 32 of u; may be `out`."""
    gelu, clamped = (kind.literal_value == GATES[each] for each in (Activation.GELU_TANH, Activation.CLAMPED))

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, out = args
        b = e.b
        for half in range(2):
            g, u = e.load(F, x, 64 * half), e.load(F, x, 64 * half + 128)
            if clamped:
                g, u = (b.select(b.fcmp_ordered(">", each, e.const(MOST)), e.const(MOST), each) for each in (g, u))
                u = b.fadd(b.select(b.fcmp_ordered("<", u, e.const(-MOST)), e.const(-MOST), u), e.const(1.0))
            slope = e.fma(b.fmul(g, g), *map(e.const, GELU)) if gelu else e.const(STEEPER if clamped else -1.44269504)
            denominator = b.fadd(e.const(1.0), e.exp2(b.fmul(g, slope)))
            e.store(e.to_bf16(b.fmul(b.fdiv(g, denominator), u)), out, 32 * half)

    return lowered(body, types.void, kind, *[types.int64] * 2)


@inner
def open_gate(kind, outputs):
    """Compute `gate` in place at address `outputs`, with the activation that has number `kind` in `GATES`."""
    if kind == 1:
        gate(1, outputs, outputs)
    elif kind == 2:
        gate(2, outputs, outputs)
    else:
        gate(0, outputs, outputs)


def embed_rows(form: Form, table: int, ids: npt.NDArray[np.int32], out: npt.NDArray[np.uint16], scale: float = 1.0) -> None:
    """Write rows `ids` of the table of records at address `table`, times the scale, to out[T, D] as bf16 bits."""
    ids = np.ascontiguousarray(ids, np.int32)
    reader(form)(ids.ctypes.data, len(ids), table, out.shape[1] // 32, out.ctypes.data, np.float32(scale))


@inner
def _read_scale(record, g, half, lane, kind, at):
    """Return (scale, offset) of one half of group g in a record, for one output. at: offset of the scales in a record."""
    if kind == Scales.SUB_MINIMUMS:
        low, high = read(8, record + at + 16 * g + lane), read(8, record + at + 128 + 16 * (g >> 1) + lane) >> 4 * (g & 1)
        scale, minimum = low & 15 | (high & 3) << 4, low >> 4 | (high >> 2 & 3) << 4
        lane_ = record + at + 192 + 2 * lane
        return read_half(lane_) * np.float32(scale), -read_half(lane_ + 32) * np.float32(minimum)
    if kind == Scales.SUB_SCALES:
        sub = read(8, record + at + 32 * g + 16 * half + lane)
        return read_half(record + at + 256 + 2 * lane) * np.float32(sub - 256 if sub > 127 else sub), np.float32(0)
    if kind == Scales.POWER:
        exponent = read(8, record + at + lane)
        return np.uint32(1 << 21 + exponent if exponent < 2 else exponent - 1 << 23).view(np.float32), np.float32(0)
    return read_half(record + at + 2 * lane), read_half(record + at + 32 + 2 * lane) if kind == Scales.SCALE_OFFSET else np.float32(0)


@inner
def _read_code(record, g, k, lane, bits, codes_bytes, plane_at, plane_bytes):
    """Return the code of input k of 32 in group g of a record, for one output."""
    if bits == 8:
        code = read(8, record + k // 2 * 32 + 2 * lane + k % 2)
        return code - 256 if code > 127 else code
    at = 4 * lane + k % 4
    word = k // 4
    code = read(8, record + codes_bytes * g + word // 2 * 64 + at) >> word % 2 * 4 & 15
    if bits == 5:
        code |= (read(8, record + plane_at + plane_bytes * g + at) >> word & 1) << 4
    if bits == 6:
        code |= (read(8, record + plane_at + plane_bytes * g + word // 4 * 64 + at) >> word % 4 * 2 & 3) << 4
    return code


@cache
def reader(form: Form) -> Callable[..., None]:
    """Return the compiled reader of a form. The first call for a form compiles it.

    The reader closes over numbers only, because Numba's cache key includes a hash of closed-over values, and that of a function differs between
    processes.
    """
    layout = LAYOUT[form]
    bits, groups, record_bytes = layout.bits, layout.groups, layout.record_bytes
    codes_bytes, plane_bytes, plane_at = layout.codes_bytes, layout.plane_bytes, layout.plane_at
    zero, kind, scales_at = layout.zero, layout.scales, layout.scales_at
    with_offset = kind in {Scales.SCALE_OFFSET, Scales.SUB_MINIMUMS}

    def read_rows(ids, count, table, n_groups, out, multiplier):
        for row in range(count):
            token = read(32, ids + 4 * row)
            lane, block = token % LANES, table + token // LANES * (n_groups // groups) * record_bytes
            for i in range(n_groups):
                record, g, at = block + i // groups * record_bytes, i % groups, out + 64 * (row * n_groups + i)
                if bits == 16:
                    for k in range(32):
                        stored = read(16, record + 64 * (k // 2) + 4 * lane + 2 * (k % 2))
                        write(
                            16, at + 2 * k, bf16_bits(np.uint32(stored << 16).view(np.float32) * multiplier) if multiplier != 1 else stored
                        )
                else:
                    for half in range(2):
                        scale, offset = _read_scale(record, g, half, lane, kind, scales_at)
                        for k in range(16 * half, 16 * half + 16):
                            code = _read_code(record, g, k, lane, bits, codes_bytes, plane_at, plane_bytes)
                            if kind == Scales.POWER:
                                code = POINTS[code]
                            weight = np.float32(code - zero) * scale
                            weight = weight + offset if with_offset else weight
                            write(16, at + 2 * k, bf16_bits(weight * multiplier))

    read_rows.__qualname__ = f"embed_{form.name.lower()}"
    return njit(types.void(*[types.int64] * 5, types.float32), nogil=True, cache=in_use())(read_rows)


@intrinsic
def _exp2(_, x, n, out):
    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, out = args
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            e.store(e.exp2(e.load(F, x, at)), out, at)

    return lowered(body, types.void, *[types.int64] * 3)


@njit(nogil=True, cache=in_use())
def exponentials(x, n, out):
    """Compute out = exp2(x): fp32 [n], n a multiple of 16."""
    _exp2(x, n, out)
