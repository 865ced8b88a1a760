"""Causal attention over paged bf16 keys and values, one arithmetic for every shape.

A row's scores, maximum, weights, their sum and the mix of values are each reduced over absolute blocks of 16 keys in order, and
keys beyond the row's position weigh exactly zero: a row's bits depend on its query and its sequence, not on the rows beside it.

A block of one KV head holds 16 keys as a bf16 record of `forms.py` (keys in the lanes, head dimensions in pairs) and 16 values as
[head_dim / 16][8 key pairs][16 dimensions][2]: both products are VDPBF16PS against a repeated pair.
Strides and offsets are bytes. Shapes: M rows of one query head (or query heads of one row) that share keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.simd import I32, I64, B, Emit, H, I, Value, lowered

BLOCK = 16
"""Tokens a KV block: the lanes of a vector."""

_MASKED = -1e30


@intrinsic(prefer_literal=True)
def _weigh(_, rows, table, n_blocks, pool, block_stride, q, q_stride, head_dim, scale_bits, first, step, p, p_stride, norm):
    """Scores -> weights. Writes 2**(score - max) as bf16 rows at `p` and 1 / sum at `norm` (float each).

    `p` rows first hold fp32 scores: `p_stride` is at least 64 bytes a block. Row m attends to positions <= first + m * step.
    """
    m_rows = rows.literal_value

    def body(e: Emit, args: Sequence[Value]) -> None:
        table, n_blocks, pool, block_stride, q, q_stride, head_dim, scale_bits, first, step, p, p_stride, norm = args
        b = e.b
        scale = e.splat(b.bitcast(b.trunc(scale_bits, I32), ir.FloatType()), e.const(0).type)
        q_m = [e.at(q, e.mul(q_stride, m)) for m in range(m_rows)]
        p_m = [e.at(p, e.mul(p_stride, m)) for m in range(m_rows)]
        last_m = [e.splat(b.trunc(b.add(first, e.mul(step, m)), I32), I) for m in range(m_rows)]
        lanes = ir.Constant(I, [ir.Constant(I32, i) for i in range(16)])
        peak = [e.var(e.const(_MASKED)) for _ in range(m_rows)]
        with e.loop(n_blocks) as j:
            block = b.sext(e.load(I32, table, e.mul(j, 4), align=4), I64)
            keys = e.at(b.add(pool, b.mul(block, block_stride)))
            acc = [e.var(e.const(0.0)) for _ in range(m_rows)]
            for a in acc:
                b.store(e.const(0.0), a)
            with e.loop(b.lshr(head_dim, e.i64(4))) as d:
                for pair in range(8):
                    at = b.add(e.mul(d, 512), e.i64(64 * pair))
                    weights = b.bitcast(e.load(H, keys, at), B)
                    for m in range(m_rows):
                        x = e.load_pair(q_m[m], b.add(e.mul(d, 32), e.i64(4 * pair)))
                        b.store(e.dp(b.load(acc[m]), weights, x), acc[m])
            position = b.add(e.splat(b.trunc(e.mul(j, BLOCK), I32), I), lanes)
            for m in range(m_rows):
                score = b.fmul(b.load(acc[m]), scale)
                score = b.select(b.icmp_signed("<=", position, last_m[m]), score, e.const(_MASKED))
                e.store(score, p_m[m], e.mul(j, 64))
                b.store(e.maximum(b.load(peak[m]), score), peak[m])
        top = [e.splat(e.max(b.load(peak[m])), e.const(0).type) for m in range(m_rows)]
        total = [e.var(e.const(0.0)) for _ in range(m_rows)]
        with e.loop(n_blocks) as j:
            for m in range(m_rows):
                weight = e.exp2(b.fsub(e.load(e.const(0).type, p_m[m], e.mul(j, 64)), top[m]))
                b.store(b.fadd(b.load(total[m]), weight), total[m])
                e.store(e.to_bf16(weight), p_m[m], e.mul(j, 32))
        for m in range(m_rows):
            one = ir.Constant(ir.FloatType(), 1.0)
            e.store(b.fdiv(one, e.sum(b.load(total[m]))), norm, e.i64(4 * m), align=4)

    return lowered(body, types.void, rows, *[types.int64] * 13)


@intrinsic(prefer_literal=True)
def _mix(_, rows, table, n_blocks, values, block_stride, p, p_stride, norm, head_dim, out, out_stride):
    """out[m] = sum of p[m, key] * value[key] * norm[m], rounded to bf16; two 16-lane slices of the head at a time."""
    m_rows = rows.literal_value

    def body(e: Emit, args: Sequence[Value]) -> None:
        table, n_blocks, values, block_stride, p, p_stride, norm, head_dim, out, out_stride = args
        b = e.b
        p_m = [e.at(p, e.mul(p_stride, m)) for m in range(m_rows)]
        acc = [[e.var(e.const(0.0)) for _ in range(2)] for _ in range(m_rows)]
        with e.loop(b.lshr(head_dim, e.i64(5))) as slice_:
            for row in acc:
                for a in row:
                    b.store(e.const(0.0), a)
            with e.loop(n_blocks) as j:
                block = b.sext(e.load(I32, table, e.mul(j, 4), align=4), I64)
                v = e.at(b.add(b.add(values, b.mul(block, block_stride)), e.mul(slice_, 1024)))
                for pair in range(8):
                    lanes = [b.bitcast(e.load(H, v, 512 * n + 64 * pair), B) for n in range(2)]
                    for m in range(m_rows):
                        x = e.load_pair(p_m[m], b.add(e.mul(j, 32), e.i64(4 * pair)))
                        for n in range(2):
                            b.store(e.dp(b.load(acc[m][n]), lanes[n], x), acc[m][n])
            for m in range(m_rows):
                scale = e.load_splat(norm, 4 * m)
                for n in range(2):
                    y = e.to_bf16(b.fmul(b.load(acc[m][n]), scale))
                    e.store(y, out, b.add(b.add(e.mul(out_stride, m), e.mul(slice_, 64)), e.i64(32 * n)))

    return lowered(body, types.void, rows, *[types.int64] * 10)


@njit(nogil=True)
def attend(table, pool, block_stride, v_offset, q, q_stride, head_dim, scale_bits, first, step, rows, p, p_stride, norm, out, out_stride):
    """Attention of `rows` rows that share one KV head; row m is at position `first + m * step` (step 0 or 1).

    Args:
        table: address of the sequence's int32 block ids.
        pool: address of this layer's and KV head's keys in block 0; values lie `v_offset` bytes on.
        q: address of bf16 queries, `q_stride` bytes apart.
        scale_bits: bits of the fp32 factor on scores, log2(e) included.
        p: the thread's scratch for weights: 8 rows of `p_stride` bytes, 64 a block; `norm`: scratch for 8 floats.
        out: address of bf16 rows, `out_stride` bytes apart.
    """
    row = 0
    while row < rows:
        left, at = rows - row, first + row * step
        q_, o_ = q + row * q_stride, out + row * out_stride
        take = 8 if left >= 8 else 4 if left >= 4 else 3 if left == 3 else 2 if left == 2 else 1
        blocks = (at + (take - 1) * step) // BLOCK + 1
        if take == 8:
            _weigh(8, table, blocks, pool, block_stride, q_, q_stride, head_dim, scale_bits, at, step, p, p_stride, norm)
            _mix(8, table, blocks, pool + v_offset, block_stride, p, p_stride, norm, head_dim, o_, out_stride)
        elif take == 4:
            _weigh(4, table, blocks, pool, block_stride, q_, q_stride, head_dim, scale_bits, at, step, p, p_stride, norm)
            _mix(4, table, blocks, pool + v_offset, block_stride, p, p_stride, norm, head_dim, o_, out_stride)
        elif take == 3:
            _weigh(3, table, blocks, pool, block_stride, q_, q_stride, head_dim, scale_bits, at, step, p, p_stride, norm)
            _mix(3, table, blocks, pool + v_offset, block_stride, p, p_stride, norm, head_dim, o_, out_stride)
        elif take == 2:
            _weigh(2, table, blocks, pool, block_stride, q_, q_stride, head_dim, scale_bits, at, step, p, p_stride, norm)
            _mix(2, table, blocks, pool + v_offset, block_stride, p, p_stride, norm, head_dim, o_, out_stride)
        else:
            _weigh(1, table, blocks, pool, block_stride, q_, q_stride, head_dim, scale_bits, at, step, p, p_stride, norm)
            _mix(1, table, blocks, pool + v_offset, block_stride, p, p_stride, norm, head_dim, o_, out_stride)
        row += take


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
