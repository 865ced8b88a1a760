"""Blocks of keys and values: 16 tokens of one KV head, laid out as attention's products take them, and how a token is put into one.

A block holds 16 keys as [head_dim / 2][16 keys][2 dimensions] and 16 values as [head_dim / 16][8 key pairs][16 dimensions][2 keys],
all bf16: each line of 64 bytes is one vector of pairs. Strides and offsets are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.simd import I32, Emit, H, I, Value, lowered
from paceline.backends.cpu.sizes import BLOCK


@intrinsic
def write_key(_, block, slot, k, head_dim):
    """Put a token's bf16 key (address `k`) in place `slot` of a block: its pairs go to one lane of a line each."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        block, slot, k, head_dim = args
        lane = e.at(block, e.mul(slot, 4))
        with e.loop(e.b.lshr(head_dim, e.i64(1))) as pair:
            e.store(e.load(I32, k, e.mul(pair, 4), align=4), lane, e.mul(pair, 64), align=4)

    return lowered(body, types.void, *[types.int64] * 4)


@intrinsic
def _put_value(_, values, slot, v, head_dim):
    """Value of one token: 16 dimensions a line, every second half of it; the other halves (the next token's) are not touched."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        values, slot, v, head_dim = args
        b = e.b
        odd = b.and_(slot, e.i64(1))
        shift = e.splat(b.trunc(e.mul(odd, 16), I32), I)
        halves = ir.VectorType(ir.IntType(1), 32)
        evens, odds = (ir.Constant(halves, [ir.Constant(ir.IntType(1), i % 2 == parity) for i in range(32)]) for parity in (0, 1))
        mask = b.select(b.trunc(odd, ir.IntType(1)), odds, evens)
        line = e.at(values, e.mul(b.lshr(slot, e.i64(1)), 64))
        with e.loop(b.lshr(head_dim, e.i64(4))) as slice_:
            dims = b.zext(e.load(ir.VectorType(ir.IntType(16), 16), v, e.mul(slice_, 32)), I)
            words = b.bitcast(b.shl(dims, shift), H)
            address = e.at(line, e.mul(slice_, 512))
            e.call("llvm.masked.store.v32i16.p0", ir.VoidType(), words, address, ir.Constant(I32, 2), mask)

    return lowered(body, types.void, *[types.int64] * 4)


@njit(nogil=True)
def write_value(values, slot, n_rows, v, head_dim, zeros):
    """Put a token's bf16 value (address `v`) in place `slot` of a block (address of its KV head's values).

    The first token of a block clears the values that no row of this batch will write (`n_rows` from this token on are its
    sequence's): a masked key weighs zero, and zero times a stale infinity would not be zero. Rows of a block may be written by
    several threads at once, so no row touches another's place. `zeros`: address of a head of zeros.
    """
    _put_value(values, slot, v, head_dim)
    if slot == 0:
        for stale in range(min(n_rows, BLOCK), BLOCK):
            _put_value(values, stale, zeros, head_dim)
