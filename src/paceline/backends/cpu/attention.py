"""Causal attention over paged bf16 keys and values, with the same arithmetic for every shape (docs/internals/arithmetic.md).

Keys are cut into segments of `SEGMENT` by their position alone. In each, a row has its own maximum, weights, sum and mix of values,
all in the order of the keys; segments are then folded one after the other. So the sums of a row are the same in any tile, any
chunk and any split of its segments over threads, and keys beyond its position or before its window change nothing.

Products are those of VDPBF16PS: fma(even, even, fma(odd, odd, sum)) in fp32, denormals flushed to zero. Processors that multiply
fp32 twice as fast as bf16 pairs use such fp32 products (see `FUSED`).

Strides and offsets are bytes. M rows: query heads of neighbouring positions that share one KV head, the heads of a position together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.compiling import inner
from paceline.backends.cpu import sizes
from paceline.backends.cpu.lowering import EMIT, lowered
from paceline.backends.cpu.simd import F32, I32, I64, B, Emit, F, H, I, Value
from paceline.backends.cpu.sizes import ATTENTION_TILES, BLOCK, QUERY_STRIDE, SEGMENT, TILE, WEIGHT_STRIDE, AttentionTile
from paceline.backends.instructions import Lowering, lowering_in_use

CAREFUL = 2
"""Third value of `fused` in `score` and `mix`, next to 0 and 1 (see `FUSED`). Slower products, right also where the processor flushes a denormal result
before rounding it (`Emit.has_underflowed`)."""
FUSED = int(lowering_in_use() is Lowering.AVX512_BF16 and binding.get_host_cpu_name().startswith("znver"))
"""1 if VDPBF16PS does more per cycle than FMA on widened pairs: on AMD's processors that have it. On Intel's it does half as much."""

_FLUSHES_EARLY = EMIT.flushes_early
_TILES = ATTENTION_TILES[lowering_in_use() or Lowering.AVX2]
_MOST_ROWS = _TILES[0].rows

record_bytes = inner(sizes.record_bytes)
scratch_bytes = inner(sizes.scratch_bytes)


@intrinsic
def flush_denormals(_):
    """Treat denormals as zero from here on. Returns the former mode, for `restore_denormals`."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.flush_denormals()

    return lowered(body, types.int32)


@intrinsic
def restore_denormals(_, before):
    def body(e: Emit, args: Sequence[Value]) -> None:
        e.restore_denormals(args[0])

    return lowered(body, types.void, types.int32)


@intrinsic
def _watch_underflow(_):
    def body(e: Emit, args: Sequence[Value]) -> None:
        e.watch_underflow()

    return lowered(body, types.void)


@intrinsic
def _has_underflowed(_):
    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.has_underflowed()

    return lowered(body, types.boolean)


class _Pairs:
    """Multiplies a line of 16 bf16 pairs by one pair of a row, and adds to 16 sums. The three ways (0, 1 and `CAREFUL`) give the same bits."""

    def __init__(self, e: Emit, way: int) -> None:
        fused = way == 1
        self._e, self._fused = e, fused
        self._fma = e.careful_fma if way == CAREFUL else e.fma
        self.row_bytes = 2 if fused else 4
        """Bytes of a row's element: bf16, or bf16 widened to fp32."""

    def line(self, address: Value, offset: Value | int) -> tuple[Value, ...]:
        e = self._e
        line = e.load(I, address, offset)
        if self._fused:
            return (e.b.bitcast(line, B),)
        odd = e.b.and_(line, e.const_i(-0x10000))
        return e.b.bitcast(odd, F), e.b.bitcast(e.b.shl(line, e.const_i(16)), F)

    def pair(self, address: Value, offset: Value, pair: int) -> tuple[Value, ...]:
        """Load one pair of a row, repeated over all lanes. `pair` is its number among eight; an odd one is the later half of 16 bytes of fp32."""
        e = self._e
        if self._fused:
            return (e.load_pair(address, offset),)
        return e.load_float_pair(address, offset, bool(pair % 2))

    def add(self, total: Value, line: tuple[Value, ...], pair: tuple[Value, ...]) -> Value:
        if self._fused:
            return self._e.dp(total, line[0], pair[0])
        for one, other in zip(line, pair, strict=True):
            total = self._fma(one, other, total)
        return total


@intrinsic(prefer_literal=True)
def score(_, fused, rows, width, table, blocks, keys, block_stride, q, head_dim, scores):
    """Compute scores (fp32, unscaled) of M rows with the keys of `blocks` blocks, `width` blocks at a time.

    `scores` needs room for a multiple of `width` blocks: after the last block, its scores are repeated up to that multiple.
    """
    n_rows, n_blocks = rows.literal_value, width.literal_value

    def body(e: Emit, args: Sequence[Value]) -> None:
        table, blocks, keys, block_stride, q, head_dim, scores = args
        b, pairs = e.b, _Pairs(e, fused.literal_value)
        acc = [[e.var(e.const(0.0)) for _ in range(n_blocks)] for _ in range(n_rows)]
        last = b.sub(blocks, e.i64(1))
        q_m = [e.at(q, QUERY_STRIDE * m) for m in range(n_rows)]
        with e.loop(b.udiv(b.add(blocks, e.i64(n_blocks - 1)), e.i64(n_blocks))) as group:
            first = e.mul(group, n_blocks)
            block_n = list[Value]()
            for n in range(n_blocks):
                j = b.add(first, e.i64(n))
                j = b.select(b.icmp_signed("<", j, last), j, last)
                block = b.sext(e.load(I32, table, e.mul(j, 4), align=4), I64)
                block_n.append(e.at(b.add(keys, b.mul(block, block_stride))))
            for row in acc:
                for a in row:
                    b.store(e.const(0.0), a)
            with e.loop(b.lshr(head_dim, e.i64(4))) as d:
                for pair in range(8):
                    line_n = [pairs.line(block, b.add(e.mul(d, 512), e.i64(64 * pair))) for block in block_n]
                    at = b.add(e.mul(d, 16 * pairs.row_bytes), e.i64(2 * pairs.row_bytes * pair))
                    for m in range(n_rows):
                        x = pairs.pair(q_m[m], at, pair)
                        for n in range(n_blocks):
                            b.store(pairs.add(b.load(acc[m][n]), line_n[n], x), acc[m][n])
            for m in range(n_rows):
                for n in range(n_blocks):
                    e.store(b.load(acc[m][n]), scores, b.add(e.mul(first, 64), e.i64(WEIGHT_STRIDE * m + 64 * n)))

    return lowered(body, types.void, fused, rows, width, *[types.int64] * 7)


@intrinsic(prefer_literal=True)
def mix(_, fused, rows, width, table, blocks, values, block_stride, weights, head_dim, out, out_stride):
    """Compute out[m] = sum of weight[m, key] * value[key] over `blocks` blocks, in fp32, for `width` (1 or 2) 16-lane slices of the head at a time."""
    n_rows, n_slices = rows.literal_value, width.literal_value

    def body(e: Emit, args: Sequence[Value]) -> None:
        table, blocks, values, block_stride, weights, head_dim, out, out_stride = args
        b, pairs = e.b, _Pairs(e, fused.literal_value)
        acc = [[e.var(e.const(0.0)) for _ in range(n_slices)] for _ in range(n_rows)]
        w_m = [e.at(weights, WEIGHT_STRIDE * m) for m in range(n_rows)]
        with e.loop(b.lshr(head_dim, e.i64(3 + n_slices))) as slice_:
            for row in acc:
                for a in row:
                    b.store(e.const(0.0), a)
            with e.loop(blocks) as j:
                block = b.sext(e.load(I32, table, e.mul(j, 4), align=4), I64)
                v = e.at(b.add(b.add(values, b.mul(block, block_stride)), e.mul(slice_, 512 * n_slices)))
                for pair in range(8):
                    line_n = [pairs.line(v, 512 * n + 64 * pair) for n in range(n_slices)]
                    at = b.add(e.mul(j, 16 * pairs.row_bytes), e.i64(2 * pairs.row_bytes * pair))
                    for m in range(n_rows):
                        x = pairs.pair(w_m[m], at, pair)
                        for n in range(n_slices):
                            b.store(pairs.add(b.load(acc[m][n]), line_n[n], x), acc[m][n])
            for m in range(n_rows):
                for n in range(n_slices):
                    e.store(b.load(acc[m][n]), out, b.add(b.add(e.mul(out_stride, m), e.mul(slice_, 64 * n_slices)), e.i64(64 * n)))

    return lowered(body, types.void, fused, rows, width, *[types.int64] * 8)


def _lanes_below(e: Emit, count: Value) -> Value:
    lanes = ir.Constant(I, [ir.Constant(I32, i) for i in range(16)])
    return e.b.icmp_signed("<", lanes, e.splat(e.b.trunc(count, I32), I))


@intrinsic
def _hide(_, scores, count):
    """Make the first `count` scores of a row minus infinity, so that their keys weigh zero."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        scores, count = args
        b, nothing = e.b, e.const(float("-inf"))
        full, rest = b.lshr(count, e.i64(4)), b.and_(count, e.i64(15))
        with e.loop(full) as j:
            e.store(nothing, scores, e.mul(j, 64))
        end = e.mul(full, 64)
        with b.if_then(b.icmp_signed("!=", rest, e.i64(0))):
            e.store(b.select(_lanes_below(e, rest), nothing, e.load(F, scores, end)), scores, end)

    return lowered(body, types.void, *[types.int64] * 2)


@intrinsic(prefer_literal=True)
def _weigh(_, fused, scores, valid, blocks, head_dim, scale_bits, record):
    """Turn scores of one row, in place, into weights rounded to bf16: 2**(scale * score - maximum), zero from key `valid` to the end of `blocks`.

    The maximum, and the sum of the weights before rounding, are written to the row's record.
    """

    def body(e: Emit, args: Sequence[Value]) -> None:
        scores, valid, blocks, head_dim, scale_bits, record = args
        b = e.b
        scale = e.splat(b.bitcast(b.trunc(scale_bits, I32), F32), F)
        full, rest = b.lshr(valid, e.i64(4)), b.and_(valid, e.i64(15))
        end = e.mul(full, 64)
        peak, total = e.var(e.const(float("-inf"))), e.var(e.const(0.0))
        with e.loop(full) as j:
            b.store(e.maximum(e.load(F, scores, e.mul(j, 64)), b.load(peak)), peak)
        with b.if_then(b.icmp_signed("!=", rest, e.i64(0))):
            tail = b.select(_lanes_below(e, rest), e.load(F, scores, end), e.const(float("-inf")))
            b.store(e.maximum(tail, b.load(peak)), peak)
        top = b.fmul(e.splat(e.max(b.load(peak)), F), scale)
        below = b.fneg(top)

        def put(weight: Value, j: Value) -> None:
            rounded, size = (e.to_bf16(weight), 32) if fused.literal_value else (e.widened_weight(weight), 64)
            e.store(rounded, scores, e.mul(j, size))

        with e.loop(full) as j:
            weight = e.exp2(e.fma(e.load(F, scores, e.mul(j, 64)), scale, below))
            b.store(b.fadd(b.load(total), weight), total)
            put(weight, j)
        with b.if_then(b.icmp_signed("!=", rest, e.i64(0))):
            weight = e.exp2(e.fma(e.load(F, scores, end), scale, below))
            weight = b.select(_lanes_below(e, rest), weight, e.const(0.0))
            b.store(b.fadd(b.load(total), weight), total)
            put(weight, full)
        used = b.lshr(b.add(valid, e.i64(15)), e.i64(4))
        with e.loop(b.sub(blocks, used)) as j:
            put(e.const(0.0), b.add(used, j))
        at = e.mul(head_dim, 4)
        e.store(b.extract_element(top, ir.Constant(I32, 0)), record, at, align=4)
        e.store(e.sum(b.load(total)), record, b.add(at, e.i64(4)), align=4)

    return lowered(body, types.void, fused, *[types.int64] * 6)


@intrinsic
def _fold(_, record, later, head_dim):
    """Add a row's later segment to its record. The one with the lower maximum is scaled down to the higher maximum."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        record, later, head_dim = args
        b, at = e.b, e.mul(args[2], 4)
        behind = b.add(at, e.i64(4))
        tops = [e.load_splat(place, at) for place in (record, later)]
        top = e.maximum(tops[1], tops[0])
        before, now = (e.exp2(b.fsub(one, top)) for one in tops)
        total = e.careful_fma(e.load_splat(record, behind), before, e.careful_mul(e.load_splat(later, behind), now))
        with e.loop(b.lshr(head_dim, e.i64(4))) as i:
            place = e.mul(i, 64)
            mixed = e.careful_mul(e.load(F, later, place), now)
            e.store(e.careful_fma(e.load(F, record, place), before, mixed), record, place)
        for value, place in ((top, at), (total, behind)):
            e.store(b.extract_element(value, ir.Constant(I32, 0)), record, place, align=4)

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic
def _finish(_, record, head_dim, out):
    """Compute out = bf16(mix / sum of weights). A zero result is positive."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        record, head_dim, out = args
        b = e.b
        total = e.load(F32, record, b.add(e.mul(head_dim, 4), e.i64(4)), align=4)
        scale = e.splat(b.fdiv(ir.Constant(F32, 1.0), total), F)
        with e.loop(b.lshr(head_dim, e.i64(4))) as i:
            y = b.fadd(e.careful_mul(e.load(F, record, e.mul(i, 64)), scale), e.const(0.0))
            e.store(e.to_bf16(y), out, e.mul(i, 32))

    return lowered(body, types.void, *[types.int64] * 3)


@intrinsic(prefer_literal=True)
def _take_query(_, fused, q, head_dim, out):
    """Copy a bf16 query to `out`, widened to fp32 unless products are fused."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        q, head_dim, out = args
        with e.loop(e.b.lshr(head_dim, e.i64(5))) as i:
            if fused.literal_value:
                e.store(e.load(H, q, e.mul(i, 64)), out, e.mul(i, 64))
            else:
                for half in range(2):
                    at = e.b.add(e.mul(i, 64), e.i64(32 * half))
                    e.store(e.load_bf16(q, at), out, e.mul(at, 2))

    return lowered(body, types.void, fused, *[types.int64] * 3)


@inner
def first_seen(position, window):
    """Return the first key that the row at a position sees: 0, or the first one of its window."""
    return max(0, position + 1 - window) if window else 0


def _products_in(tiles: Sequence[AttentionTile]) -> Any:
    """Return a function for `rows` M rows, which must be the rows of one of `tiles`.

    If `scores`, it writes scores with the keys at address `at` to `weights`. Otherwise it writes the mix of the values there to `out`.
    """
    (most, blocks_at_once, slices_at_once), fewer = tiles[0], _products_in(tiles[1:]) if tiles[1:] else None

    @inner
    def products(rows, table, blocks, at, block_stride, q, dim, weights, scores, out, out_stride):
        if fewer is not None and rows < most:
            fewer(rows, table, blocks, at, block_stride, q, dim, weights, scores, out, out_stride)
        elif scores:
            score(FUSED, most, blocks_at_once, table, blocks, at, block_stride, q, dim, weights)
        else:
            mix(FUSED, most, slices_at_once, table, blocks, at, block_stride, weights, dim, out, out_stride)

    return products


_products = _products_in(_TILES)


@inner
def _careful_products(rows, table, blocks, at, block_stride, q, dim, weights, scores, out, out_stride):
    """Compute the same as `_products`, but row by row and with `CAREFUL` products."""
    for m in range(rows):
        if scores:
            score(CAREFUL, 1, 1, table, blocks, at, block_stride, q + m * QUERY_STRIDE, dim, weights + m * WEIGHT_STRIDE)
        else:
            mix(CAREFUL, 1, 1, table, blocks, at, block_stride, weights + m * WEIGHT_STRIDE, dim, out + m * out_stride, out_stride)


@inner
def _weigh_rows(rows, position, heads, window, begin, end, blocks, weights, head_dim, scale_bits, records, stride):
    """Turn the scores of M rows with the keys from `begin` to `end` into weights. Row m is of the token at (position + m) // heads."""
    for m in range(rows):
        at = (position + m) // heads
        valid = max(0, min(end, at + 1) - begin)
        hidden = first_seen(at, window) - begin
        if hidden >= valid:
            valid = 0  # the window begins in a later segment, so this segment adds nothing
        elif hidden > 0:
            _hide(weights + m * WEIGHT_STRIDE, hidden)
        _weigh(FUSED, weights + m * WEIGHT_STRIDE, valid, blocks, head_dim, scale_bits, records + m * stride)


@inner
def attend(table, keys, block_stride, q, q_stride, heads, rows, first, window, head_dim, value_dim, scale_bits, start, stop, records, record_step,
           scratch):  # fmt: skip
    """Compute attention of `rows` positions x `heads` query heads over segments [start, stop), and write each row's records.

    Args:
        table: address of the sequence's int32 block ids.
        keys: address of this layer's and KV head's keys in block 0; values follow each block's keys.
        q: address of bf16 queries: `heads` contiguous ones, `q_stride` bytes between positions.
        first: the first row's position.
        window: number of keys that a row sees, including its own; 0: all up to its own.
        head_dim: size of queries and keys; `value_dim`: size of values and of records.
        scale_bits: bits of the fp32 factor on scores, including log2(e).
        records: address of the rows' records; those of one row are contiguous.
        record_step: number of segments that a row has records for. Each segment's record stays separate, and `finish` folds them.
            0: a row has one record, segments are folded in order, and `start` is 0.
        scratch: address of `scratch_bytes` bytes. The last `rows` x `heads` records there are not used: `records` may point to them.
    """
    mode = flush_denormals()
    n, size, values = rows * heads, record_bytes(value_dim), keys + 2 * BLOCK * head_dim
    weights = scratch + n * QUERY_STRIDE
    for i in range(n):
        _take_query(FUSED, q + i // heads * q_stride + i % heads * 2 * head_dim, head_dim, scratch + i * QUERY_STRIDE)
    for segment in range(start, stop):
        key = segment * SEGMENT
        i = 0
        while i < n:
            left = n - i
            take = _MOST_ROWS if left >= _MOST_ROWS else min(4, left)
            seen = first + (i + take - 1) // heads - key + 1
            lowest = first_seen(first + i // heads, window)
            if seen > 0 and lowest < key + SEGMENT:
                # Number of blocks that lie before the windows of all rows.
                passed = max(0, lowest - key) // BLOCK
                table_ = table + 4 * (key // BLOCK + passed)
                blocks = (min(SEGMENT, seen) + BLOCK - 1) // BLOCK - passed
                aside = record_step == 0 and segment > lowest // SEGMENT
                stride = size if record_step == 0 else record_step * size
                target = weights + TILE * WEIGHT_STRIDE if aside else records + i * stride + (segment * size if record_step else 0)
                _watch_underflow()
                query = scratch + i * QUERY_STRIDE
                _products(take, table_, blocks, keys, block_stride, query, head_dim, weights, True, target, stride)
                _weigh_rows(take, first * heads + i, heads, window, key + passed * BLOCK, key + SEGMENT, blocks, weights, value_dim, scale_bits,
                             target, stride)  # fmt: skip
                _products(take, table_, blocks, values, block_stride, query, value_dim, weights, False, target, stride)
                if _FLUSHES_EARLY and _has_underflowed():
                    _careful_products(take, table_, blocks, keys, block_stride, query, head_dim, weights, True, target, stride)
                    _weigh_rows(take, first * heads + i, heads, window, key + passed * BLOCK, key + SEGMENT, blocks, weights, value_dim, scale_bits,
                                 target, stride)  # fmt: skip
                    _careful_products(take, table_, blocks, values, block_stride, query, value_dim, weights, False, target, stride)
                for m in range(take):
                    if aside and first + (i + m) // heads >= key:
                        _fold(records + (i + m) * size, target + m * size, value_dim)
            i += take
    restore_denormals(mode)


@inner
def finish(rows, heads, first, window, head_dim, records, record_step, out, out_stride, sinks):
    """Fold the records of all segments, and write rows of bf16: `heads` contiguous ones, `out_stride` bytes between positions.

    Arguments not listed are as in `attend`; `head_dim` is its `value_dim`.

    Args:
        sinks: address of one record for each head, folded after all segments; 0: the model has none.
    """
    mode = flush_denormals()
    size = record_bytes(head_dim)
    for i in range(rows * heads):
        record = records + i * size * max(1, record_step)
        if record_step:
            position = first + i // heads
            begin = first_seen(position, window) // SEGMENT
            record += begin * size
            for segment in range(1, position // SEGMENT - begin + 1):
                _fold(record, record + segment * size, head_dim)
        if sinks:
            _fold(record, sinks + i % heads * size, head_dim)
        _finish(record, head_dim, out + i // heads * out_stride + i % heads * 2 * head_dim)
    restore_denormals(mode)
