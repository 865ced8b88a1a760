"""Rows of the embedding, read out of the packed records (a tied head is held once, in the head's layout).

Shapes: T rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu import sync
from paceline.backends.cpu.forms import Form
from paceline.backends.cpu.kernel_cache import in_use
from paceline.backends.cpu.simd import F32, I8, I16, I32, Emit, Value, lowered

INT8 = int(Form.Q8_0)


@intrinsic
def _int8_weight(_, code, scale, out):
    """bf16(scale * code), written as two bytes."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        value = e.b.sitofp(e.load(I8, args[0]), F32)
        scale = e.b.fpext(e.load(ir.HalfType(), args[1], align=2), F32)
        bits = e.b.bitcast(e.b.fmul(value, scale), I32)
        odd = e.b.and_(e.b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
        rounded = e.b.lshr(e.b.add(bits, e.b.add(odd, ir.Constant(I32, 0x7FFF))), ir.Constant(I32, 16))
        e.store(e.b.trunc(rounded, I16), args[2], align=2)

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic
def _copy_word(_, source, out):
    def body(e: Emit, args: Sequence[Value]) -> None:
        e.store(e.load(I32, args[0], align=4), args[1], align=4)

    return lowered(body, types.void, types.int64, types.int64)


@njit(nogil=True, cache=in_use())
def embed_rows(ids, count, form, table, hidden, out):
    """out[T, D] = rows `ids` of an int8 or bf16 table; ids int32, out bf16 (addresses)."""
    groups = hidden // 32
    for row in range(count):
        token = sync.load_int32(ids + 4 * row)
        lane = token % 16
        for g in range(groups):
            at = out + 2 * (row * hidden + 32 * g)
            if form == INT8:
                record = table + (token // 16 * groups + g) * 544
                for k in range(32):
                    code = record + 32 * (k // 2) + 2 * lane + k % 2
                    _int8_weight(code, record + 512 + 2 * lane, at + 2 * k)
            else:
                record = table + (token // 16 * groups + g) * 1024
                for pair in range(16):
                    _copy_word(record + 64 * pair + 4 * lane, at + 4 * pair)
