"""Row-wise steps between the matrix products: norms, rotary embedding, the gate, sums of groups. Vectors of 16 lanes in fixed order.

Addresses are i64; activations bf16, the residual and products fp32. Dimensions are multiples of 32.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.simd import F32, I32, Emit, F, Value, lowered


def _float(e: Emit, bits: Value) -> Value:
    return e.b.bitcast(e.b.trunc(bits, I32), F32)


def _rms(e: Emit, x: Value, n: Value, eps_bits: Value) -> Value:
    """1 / sqrt(mean(x ** 2) + eps) over n fp32 values, in all lanes."""
    b = e.b
    squares = e.var(e.const(0.0))
    with e.loop(b.lshr(n, e.i64(4))) as i:
        v = e.load(F, x, e.mul(i, 64))
        b.store(e.fma(v, v, b.load(squares)), squares)
    mean = b.fdiv(e.sum(b.load(squares)), b.sitofp(n, F32))
    root = e.call("llvm.sqrt.f32", F32, b.fadd(mean, _float(e, eps_bits)))
    return e.splat(b.fdiv(ir.Constant(F32, 1.0), root), F)


def _group_sum(e: Emit, low: Value, high: Value) -> Value:
    """Sum of a group of 32, as its bf16 roundings: float."""
    widen = lambda half: e.b.bitcast(e.b.shl(e.b.zext(half, ir.VectorType(I32, 16)), e.const_i(16)), F)  # noqa: E731
    return e.sum(e.b.fadd(widen(low), widen(high)))


@intrinsic
def rms_norm(_, x, weight, n, eps_bits, out, sums):
    """out = bf16(x / rms(x) * weight), and the sums of its groups of 32. x, weight: fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, weight, n, eps_bits, out, sums = args
        b = e.b
        scale = _rms(e, x, n, eps_bits)
        with e.loop(b.lshr(n, e.i64(5))) as g:
            halves = []
            for half in range(2):
                at = b.add(e.mul(g, 128), e.i64(64 * half))
                y = b.fmul(b.fmul(e.load(F, x, at), scale), e.load(F, weight, at))
                halves.append(e.to_bf16(y))
                e.store(halves[-1], out, b.add(e.mul(g, 64), e.i64(32 * half)))
            e.store(_group_sum(e, *halves), sums, e.mul(g, 4), align=4)

    return lowered(body, types.void, *[types.int64] * 6)


@intrinsic
def head_norm(_, x, weight, n, eps_bits):
    """x = x / rms(x) * weight in place: the query and key norm of Qwen3. x, weight: fp32 [n]."""

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
    """out = bf16(rotary embedding of x); pairs are (i, i + half). x: fp32 [2 * half]; cos, sin: fp32 [half]."""

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
    """out = bf16(x): fp32 [n] to bf16 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, out = args
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            e.store(e.to_bf16(e.load(F, x, e.mul(i, 64))), out, e.mul(i, 32))

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic
def widen_bf16(_, x, n, out):
    """out = fp32(x): bf16 [n] to fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, out = args
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            e.store(e.load_bf16(x, e.mul(i, 32)), out, e.mul(i, 64))

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic
def group_sums(_, x, n, sums):
    """Sums of the groups of 32 of a bf16 row."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, sums = args
        with e.loop(e.b.lshr(n, e.i64(5))) as g:
            at = e.mul(g, 64)
            pair = e.b.fadd(e.load_bf16(x, at), e.load_bf16(x, e.b.add(at, e.i64(32))))
            e.store(e.sum(pair), sums, e.mul(g, 4), align=4)

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic
def add_into(_, x, y, n):
    """x += y: fp32 [n]."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, y, n = args
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            e.store(e.b.fadd(e.load(F, x, at), e.load(F, y, at)), x, at)

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic
def add_rounded(_, x, y, n):
    """x = bf16(x + y), kept as fp32 [n]: the residual at a layer's end."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, y, n = args
        with e.loop(e.b.lshr(n, e.i64(4))) as i:
            at = e.mul(i, 64)
            half = e.to_bf16(e.b.fadd(e.load(F, x, at), e.load(F, y, at)))
            wide = e.b.bitcast(e.b.shl(e.b.zext(half, ir.VectorType(I32, 16)), e.const_i(16)), F)
            e.store(wide, x, at)

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic
def gate(_, x, out, sums):
    """One group of 32 outputs: out = bf16(silu(g) * u), and its sum. x: fp32 blocks of 16 in the order g, u, g, u."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, out, sums = args
        b = e.b
        halves = []
        for half in range(2):
            g, u = e.load(F, x, 128 * half), e.load(F, x, 128 * half + 64)
            denominator = b.fadd(e.const(1.0), e.exp2(b.fmul(g, e.const(-1.44269504))))
            halves.append(e.to_bf16(b.fmul(b.fdiv(g, denominator), u)))
            e.store(halves[-1], out, 32 * half)
        e.store(_group_sum(e, *halves), sums, align=4)

    return lowered(body, types.void, *[types.int64] * 3)
