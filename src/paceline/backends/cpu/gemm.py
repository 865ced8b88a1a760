"""Matrix times rows, in bf16 with fp32 sums, over weights that stay quantised.

One arithmetic for every shape, so that a row's bits depend on nothing but the row: for each group of 32 inputs, in order,
`s` sums 16 VDPBF16PS over input pairs in order, then `total = fma(scale, s, total)` and `total = fma(offset, sum(x in group), total)`.
Codes of 4 and 8 bits are whole numbers that bf16 holds exactly, so they need no rounding before the product. How rows and outputs
are tiled, and whether codes are unpacked into registers or into a scratch buffer first, changes speed alone.

Weights lie in records of one group x 16 outputs, outputs in the lanes (`pack.py`). Strides and offsets are bytes.
Shapes: M rows a tile, NB blocks of 16 outputs a tile, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.simd import I16, B, Emit, F, H, I, Value, lowered

INT4, INT8, BF16 = 4, 8, 16
"""Record formats; literals, since kernels are compiled for each."""

INT4_RECORD, INT8_RECORD, BF16_RECORD = 320, 544, 1024
"""Bytes of one group x 16 outputs: codes, then 16 half-precision scales, then (int4) 16 offsets."""

PAIRS = 16
"""Input pairs a group: one VDPBF16PS each."""

PREFETCH = 8192
"""Bytes ahead that records are asked for; without it, 16 rows ran at 0.7 of their speed out of memory."""

_CODES = {INT4: 256, INT8: 512}
_RECORD = {INT4: INT4_RECORD, INT8: INT8_RECORD, BF16: BF16_RECORD}
_NIBBLES = [int(np.float32(code).view(np.uint32) >> 16) for code in range(16)] * 2
"""bf16 bits of 0..15, twice: VPERMW looks at five bits, the fifth being the next code's."""

Pairs = Callable[[int], Value]
"""Weights of input pair p of a record, for its 16 outputs: B."""


def _unpack(e: Emit, form: int, record: Value) -> Pairs:
    """Reads one record's weights pair by pair, in order."""
    held: dict[int, Value] = {}

    def word(at: int, kind: Any) -> Value:
        if at not in held:
            held.clear()
            held[at] = e.load(kind, record, 64 * at)
        return held[at]

    def int4(p: int) -> Value:
        codes, shift = word(p // 4, H), p % 4 * 4
        if shift:
            codes = e.b.lshr(codes, ir.Constant(H, [ir.Constant(I16, shift)] * 32))
        return e.b.bitcast(e.lookup(ir.Constant(H, [ir.Constant(I16, v) for v in _NIBBLES]), codes), B)

    def int8(p: int) -> Value:
        codes, up = word(p // 2, I), 8 * (1 - p % 2)
        even = e.b.ashr(e.b.shl(codes, e.const_i(16 + up)), e.const_i(24))
        odd = e.b.ashr(e.b.shl(codes, e.const_i(up)) if up else codes, e.const_i(24))
        low = e.b.lshr(e.b.bitcast(e.b.sitofp(even, F), I), e.const_i(16))
        high = e.b.and_(e.b.bitcast(e.b.sitofp(odd, F), I), e.const_i(0xFFFF0000))
        return e.b.bitcast(e.b.or_(low, high), B)

    def bf16(p: int) -> Value:
        return e.b.bitcast(word(p, H), B)

    return {INT4: int4, INT8: int8, BF16: bf16}[form]


def _tile(form: int, rows: int, blocks: int, *, expanded: bool) -> Callable[[Emit, Sequence[Value]], None]:
    """Emits a tile. `expanded`: pairs come as bf16 from `q`, only scales and offsets from the records."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        q, q_stride, w, w_stride, x, x_stride, sums, sums_stride, out, out_stride, groups, resume = args
        w_n = [e.at(w, e.mul(w_stride, n)) for n in range(blocks)]
        q_n = [e.at(q, e.mul(q_stride, n)) for n in range(blocks)]
        x_m = [e.at(x, e.mul(x_stride, m)) for m in range(rows)]
        sums_m = [e.at(sums, e.mul(sums_stride, m)) for m in range(rows)]
        out_mn = [[e.at(out, e.b.add(e.mul(out_stride, m), e.i64(64 * n))) for n in range(blocks)] for m in range(rows)]
        if expanded:
            goes_on = e.b.icmp_signed("!=", resume, e.i64(0))
            total = [[e.var(e.b.select(goes_on, e.load(F, at), e.const(0.0))) for at in row] for row in out_mn]
        else:
            total = [[e.var(e.const(0.0)) for _ in range(blocks)] for _ in range(rows)]
        with e.loop(groups) as g:
            record_n = [e.at(p, e.mul(g, _RECORD[form])) for p in w_n]
            if expanded:
                pairs_n = [_unpack(e, BF16, e.at(p, e.mul(g, BF16_RECORD))) for p in q_n]
            else:
                pairs_n = [_unpack(e, form, record) for record in record_n]
            if not expanded:
                e.prefetch(e.at(record_n[-1], PREFETCH), _RECORD[form])
            x_g = [e.at(p, e.mul(g, 4 * PAIRS)) for p in x_m]
            unscaled = form == BF16
            acc = [[e.b.load(total[m][n]) if unscaled else e.const(0.0) for n in range(blocks)] for m in range(rows)]
            for p in range(PAIRS):
                weights = [pairs(p) for pairs in pairs_n]
                for m in range(rows):
                    pair = e.load_pair(x_g[m], 4 * p)
                    acc[m] = [e.dp(acc[m][n], weights[n], pair) for n in range(blocks)]
            scales = [] if unscaled else [e.load_half(record, _CODES[form]) for record in record_n]
            offsets = [e.load_half(record, _CODES[form] + 32) for record in record_n] if form == INT4 else []
            for m in range(rows):
                group_sum = e.load_splat(sums_m[m], e.mul(g, 4)) if offsets else None
                for n in range(blocks):
                    value = acc[m][n]
                    if scales:
                        value = e.fma(scales[n], value, e.b.load(total[m][n]))
                    if offsets:
                        value = e.fma(offsets[n], group_sum, value)
                    e.b.store(value, total[m][n])
        for m in range(rows):
            for n in range(blocks):
                e.store(e.b.load(total[m][n]), out_mn[m][n])

    return body


@intrinsic(prefer_literal=True)
def _narrow(_, form, rows, blocks, w, w_stride, x, x_stride, sums, sums_stride, out, out_stride, groups):
    """A tile that unpacks codes in registers: for few rows."""
    tile = _tile(form.literal_value, rows.literal_value, blocks.literal_value, expanded=False)

    def body(e: Emit, args: Sequence[Value]) -> None:
        tile(e, [e.i64(0), e.i64(0), *args, e.i64(0)])

    return lowered(body, types.void, form, rows, blocks, *[types.int64] * 9)


@intrinsic(prefer_literal=True)
def _wide(_, form, rows, blocks, q, q_stride, w, w_stride, x, x_stride, sums, sums_stride, out, out_stride, groups, resume):
    """A tile over codes that `_expand` wrote out as bf16: for many rows. `resume`: totals go on from what `out` holds."""
    tile = _tile(form.literal_value, rows.literal_value, blocks.literal_value, expanded=True)
    return lowered(tile, types.void, form, rows, blocks, *[types.int64] * 12)


@intrinsic(prefer_literal=True)
def _expand(_, form, w, q, groups):
    """Write the codes of a block of 16 outputs as bf16 pairs, 1 KiB a group."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        w_, q_, groups_ = args
        with e.loop(groups_) as g:
            record = e.at(w_, e.mul(g, _RECORD[form.literal_value]))
            e.prefetch(e.at(record, PREFETCH), _RECORD[form.literal_value])
            pairs = _unpack(e, form.literal_value, record)
            for p in range(PAIRS):
                e.store(pairs(p), q_, e.b.add(e.mul(g, BF16_RECORD), e.i64(64 * p)), align=64)

    return lowered(body, types.void, form, *[types.int64] * 3)


SLICE = 9
"""Groups whose codes are unpacked together at most: four blocks of outputs take 36 of the 48 KiB of first-level cache."""

WIDE_FROM = 32
"""Rows from which unpacking codes into scratch pays."""


@njit(nogil=True)
def record_bytes(form):
    """Bytes of a record, to compiled code."""
    return INT4_RECORD if form == INT4 else INT8_RECORD if form == INT8 else BF16_RECORD


@njit(nogil=True)
def _few_rows(form, w, blocks, x, x_stride, sums, sums_stride, rows, out, out_stride, groups):
    """Tiles of 16, 8, 4, 2 and 1 rows over one block of outputs after another: one stream of records, which prefetching hides."""
    record = record_bytes(form)
    stride = groups * record
    row = 0
    while row < rows:
        left = rows - row
        step = 16 if left >= 16 else 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        x_, s_ = x + row * x_stride, sums + row * sums_stride
        for n in range(blocks):
            a, o = w + n * stride, out + row * out_stride + 64 * n
            if form == INT4:
                if step == 16:
                    _narrow(INT4, 16, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
                elif step == 8:
                    _narrow(INT4, 8, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
                elif step == 4:
                    _narrow(INT4, 4, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
                elif step == 2:
                    _narrow(INT4, 2, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
                else:
                    _narrow(INT4, 1, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
            elif form == INT8:
                if step == 16:
                    _narrow(INT8, 16, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
                elif step == 8:
                    _narrow(INT8, 8, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
                elif step == 4:
                    _narrow(INT8, 4, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
                elif step == 2:
                    _narrow(INT8, 2, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
                else:
                    _narrow(INT8, 1, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
            elif step == 16:
                _narrow(BF16, 16, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
            elif step == 8:
                _narrow(BF16, 8, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
            elif step == 4:
                _narrow(BF16, 4, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
            elif step == 2:
                _narrow(BF16, 2, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
            else:
                _narrow(BF16, 1, 1, a, stride, x_, x_stride, s_, sums_stride, o, out_stride, groups)
        row += step


@njit(nogil=True)
def _many_rows(form, w, x, x_stride, sums, sums_stride, rows, out, out_stride, groups, scratch):
    """Four blocks of outputs; `rows` a multiple of six. Groups go in slices whose unpacked codes stay in the first-level cache."""
    record = record_bytes(form)
    stride = groups * record
    slices = (groups + SLICE - 1) // SLICE
    per_slice = (groups + slices - 1) // slices
    q_stride = per_slice * BF16_RECORD
    for first in range(0, groups, per_slice):
        count = min(per_slice, groups - first)
        w_ = w + first * record
        for n in range(4):
            if form == INT4:
                _expand(INT4, w_ + n * stride, scratch + n * q_stride, count)
            elif form == INT8:
                _expand(INT8, w_ + n * stride, scratch + n * q_stride, count)
        for row in range(0, rows, 6):
            x_, s_, o_ = x + row * x_stride + first * 64, sums + row * sums_stride + first * 4, out + row * out_stride
            if form == INT4:
                _wide(INT4, 6, 4, scratch, q_stride, w_, stride, x_, x_stride, s_, sums_stride, o_, out_stride, count, first)
            elif form == INT8:
                _wide(INT8, 6, 4, scratch, q_stride, w_, stride, x_, x_stride, s_, sums_stride, o_, out_stride, count, first)
            else:
                _wide(BF16, 6, 4, w_, stride, w_, stride, x_, x_stride, s_, sums_stride, o_, out_stride, count, first)


@njit(nogil=True)
def gemm(form, w, blocks, x, x_stride, sums, sums_stride, rows, out, out_stride, groups, scratch):
    """out[rows, 16 * blocks] = x[rows, 32 * groups] times the weights of `blocks` consecutive blocks of 16 outputs.

    Args:
        form: INT4, INT8 or BF16.
        w: address of the first block's records.
        x: address of bf16 rows, `x_stride` bytes apart; `sums`: fp32 sums of their groups (`group_sums`).
        out: address of fp32 rows.
        scratch: address of `4 * SLICE` KiB, 64-byte aligned, the calling thread's own.
    """
    record = record_bytes(form)
    wide_rows = rows // 6 * 6 if rows >= WIDE_FROM else 0
    wide_blocks = blocks // 4 * 4 if wide_rows else 0
    for n in range(0, wide_blocks, 4):
        a = w + n * groups * record
        _many_rows(form, a, x, x_stride, sums, sums_stride, wide_rows, out + 64 * n, out_stride, groups, scratch)
    # What is left: the last rows of those blocks, then all rows of the last blocks. One call, so that its tiles are compiled once.
    for part in range(2):
        first_row, count = (wide_rows, wide_blocks) if part == 0 else (0, blocks - wide_blocks)
        n = 0 if part == 0 else wide_blocks
        if count and first_row < rows:
            _few_rows(form, w + n * groups * record, count, x + first_row * x_stride, x_stride, sums + first_row * sums_stride, sums_stride,
                      rows - first_row, out + first_row * out_stride + 64 * n, out_stride, groups)  # fmt: skip
