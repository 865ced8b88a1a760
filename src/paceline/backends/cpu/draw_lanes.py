"""Operations on blocks of 64 logits, in vector instructions that every processor has: without intrinsics of one instruction set, and without fast-math.

The section Sampling of docs/internals/arithmetic.md defines the results; `engine.sampling` computes the same in NumPy. Addresses are i64.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.compiling import inner
from paceline.backends.cpu.lowering import lowered
from paceline.backends.cpu.simd import F32, I32, I64, LANES, Emit, F, I, Value
from paceline.engine.arithmetic import EXP2, LOG2E, WEIGHT_BITS, WEIGHTLESS

BLOCK = 64
WIDE = ir.VectorType(I64, LANES)
DOUBLES = ir.VectorType(ir.DoubleType(), LANES)
ROUNDER = 2.0 ** (52 - WEIGHT_BITS)
"""Added to a small float64, it rounds it to a multiple of 2**-WEIGHT_BITS, with the multiple in the low bits of the sum."""
ROUNDER_BITS = struct.unpack("<q", struct.pack("<d", ROUNDER))[0]
HASH = 0x7FEB352D, 0x846CA68B
"""Factors of the noise's hash (`engine.arithmetic`)."""
_LOADS = range(0, BLOCK * 4, LANES * 4)


def _mask(e: Emit, lanes: Sequence[Value]) -> Value:
    """Combine vectors with one bit for each lane into one i64: bit i is lane i of the block."""
    found = e.i64(0)
    for place, bits in enumerate(lanes):
        part = e.b.zext(e.b.bitcast(bits, ir.IntType(LANES)), I64)
        found = e.b.or_(found, e.b.shl(part, e.i64(LANES * place)))
    return found


def _scaled(e: Emit, x: Value, top: Value, inverse: Value) -> Value:
    """Return (x - top) * inverse, an F."""
    return e.b.fmul(e.b.fsub(x, e.splat(top, F)), e.splat(inverse, F))


def _exp(e: Emit, z: Value, least: float) -> Value:
    """Return exp(z), an F. z * log2(e) is raised to `least`, a whole number, where it is lower."""
    t = e.maximum(e.b.fmul(z, e.const(LOG2E)), e.const(least))
    whole = e.call("llvm.floor.v16f32", F, t)
    rest = e.b.fsub(t, whole)
    p = e.const(EXP2[0])
    for coefficient in EXP2[1:]:
        p = e.b.fadd(e.b.fmul(p, rest), e.const(coefficient))
    return e.b.bitcast(e.b.add(e.b.bitcast(p, I), e.b.shl(e.b.fptosi(whole, I), e.const_i(23))), F)


@intrinsic
def trailing_zeros(_, value):
    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return lowered(body, types.int64, types.int64)


@intrinsic
def block_maxima(_, x, n_blocks, out):
    """Write the largest of each block of float32 at `x`. Returns the largest of all. If any number is NaN, returns NaN, and the blocks are undefined."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        x, n_blocks, out = args
        unsound, top = e.var(ir.Constant(ir.VectorType(ir.IntType(1), LANES), [0] * LANES)), e.var(e.const(-np.inf))
        with e.loop(n_blocks) as block:
            at = e.b.add(x, e.mul(block, 4 * BLOCK))
            a, b, c, d = (e.load(F, at, offset) for offset in _LOADS)
            nan = e.b.or_(e.b.fcmp_unordered("uno", a, b), e.b.fcmp_unordered("uno", c, d))
            e.b.store(e.b.or_(e.b.load(unsound), nan), unsound)
            most = e.maximum(e.maximum(a, b), e.maximum(c, d))
            e.b.store(e.maximum(e.b.load(top), most), top)
            e.store(e.max(most), out, e.mul(block, 4))
        sound = e.b.icmp_unsigned("==", e.b.bitcast(e.b.load(unsound), ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0))
        return e.b.select(sound, e.max(e.b.load(top)), ir.Constant(F32, np.nan))

    return lowered(body, types.float32, types.int64, types.int64, types.int64)


@intrinsic
def block_weight(_, x, top, inverse):
    """Return the sum of the weights of a block of float32 at `x`: int64, in units of 2**-WEIGHT_BITS."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        x, top, inverse = args
        total = ir.Constant(WIDE, [0] * LANES)
        for offset in _LOADS:
            weight = e.b.fpext(_exp(e, _scaled(e, e.load(F, x, offset), top, inverse), WEIGHTLESS), DOUBLES)
            total = e.b.add(total, e.b.bitcast(e.b.fadd(weight, ir.Constant(DOUBLES, [ROUNDER] * LANES)), WIDE))
        return e.b.sub(e.sum_int(total), e.i64(BLOCK * ROUNDER_BITS))

    return lowered(body, types.int64, types.int64, types.float32, types.float32)


@intrinsic
def exp_near(_, x, n, top, inverse, out):
    """Write exp((x - top) * inverse) of `n` * 16 float32, within 1e-4 of each, never below 2**-126. Fit only for bounds."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, n, top, inverse, out = args
        with e.loop(n) as group:
            at = e.mul(group, 4 * LANES)
            e.store(_exp(e, _scaled(e, e.load(F, x, at), top, inverse), -126.0), out, at)

    return lowered(body, types.void, types.int64, types.int64, types.float32, types.float32, types.int64)


@intrinsic
def at_least(_, x, least):
    """Return a mask of the float32 of a block at `x` that are at least `least`: one bit for each."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        least = e.splat(args[1], F)
        return _mask(e, [e.b.fcmp_ordered(">=", e.load(F, args[0], offset), least) for offset in _LOADS])

    return lowered(body, types.int64, types.int64, types.float32)


@intrinsic
def noise_near(_, hashed, low, most):
    """Return a mask of a block's tokens that may have noise bits of at most `most`, judged by their upper 16 bits: one bit for each token.

    Arguments are int64 that hold 32 bits.

    Args:
        hashed: the part of the hash's first product that the block's tokens share (see `draw_filters.race`).
        low: lower word of the noise's key.
    """

    def body(e: Emit, args: Sequence[Value]) -> Value:
        hashed, low, most = (e.splat(e.b.trunc(value, I32), I) for value in args)
        most = e.b.or_(most, e.const_i(0xFFFF))
        found: list[Value] = []
        for start in range(0, BLOCK, LANES):
            x = e.b.add(hashed, ir.Constant(I, [ir.Constant(I32, (start + lane) * HASH[0] & 0xFFFFFFFF) for lane in range(LANES)]))
            x = e.b.xor(x, e.b.lshr(x, e.const_i(15)))
            x = e.b.mul(e.b.xor(x, low), e.const_i(HASH[1]))
            # The hash's last step leaves the upper half as it is.
            found.append(e.b.icmp_unsigned("<=", x, most))
        return _mask(e, found)

    return lowered(body, types.int64, types.int64, types.int64, types.int64)


@inner
def float_bits(value):
    """Return the bits of a float32 as an int64 from 0 to 2**32 - 1."""
    return np.int64(np.float32(value).view(np.uint32))


@inner
def bits_float(bits):
    """Return the float32 with these 32 bits."""
    return np.uint32(bits).view(np.float32)


@inner
def double_bits(value):
    return np.float64(value).view(np.int64)


@inner
def bits_double(bits):
    return np.int64(bits).view(np.float64)
