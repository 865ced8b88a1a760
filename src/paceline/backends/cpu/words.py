"""Whole numbers at any address, for compiled code that moves bits: packing, and rows read back out of records."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.simd import F32, I64, Emit, Value, lowered


@intrinsic(prefer_literal=True)
def read(_, bits, address):
    """The unsigned number of `bits` bits at an address."""
    kind = ir.IntType(bits.literal_value)

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.zext(e.load(kind, args[0]), I64)

    return lowered(body, types.int64, bits, types.int64)


@intrinsic(prefer_literal=True)
def write(_, bits, address, value):
    kind = ir.IntType(bits.literal_value)

    def body(e: Emit, args: Sequence[Value]) -> None:
        e.store(e.b.trunc(args[1], kind), args[0])

    return lowered(body, types.void, bits, types.int64, types.int64)


@intrinsic
def read_half(_, address):
    """The IEEE half float at an address, as fp32."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.fpext(e.load(ir.HalfType(), args[0]), F32)

    return lowered(body, types.float32, types.int64)
