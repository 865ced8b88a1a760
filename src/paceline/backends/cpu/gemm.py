"""Matrix times rows over weights that stay quantised, with sums that are exact or fp32.

One arithmetic for every shape, so that a row's bits depend on nothing but the row. For each group of 32 inputs, in order:
  int4 and int8: `s` = the exact whole sum of code x activation (VPDPBUSD over int8, VPDPWSSD over int16 activations, which carry a
        scale a group: `rows.quantize`), then `total = fma(weight scale, activation scale * s, total)`, and with int4
        `total = fma(offset, sum of the group's activations, total)`;
  bf16: 16 VDPBF16PS over input pairs in order, into `total`.
How rows and outputs are tiled changes speed alone.

Weights lie in records of one group x 16 outputs, outputs in the lanes (`pack.py`). Strides and offsets are bytes.
Shapes: M rows a tile, NB blocks of 16 outputs a tile, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.simd import I8, I32, B, Emit, F, H, I, Value, lowered

INT4, INT8, BF16 = 4, 8, 16
"""Record formats; literals, since kernels are compiled for each."""

INT4_RECORD, INT8_RECORD, BF16_RECORD = 320, 544, 1024
"""Bytes of one group x 16 outputs: codes, then 16 half-precision scales, then (int4) 16 offsets."""

PREFETCH = 8192
"""Bytes ahead that records are asked for; without it, 16 rows ran at 0.7 of their speed out of memory."""

WIDE_FROM = 32
"""Rows from which tiles of two blocks of outputs pay. For fewer, one stream of records is what prefetching hides."""

TILE_ROWS, TILE_BLOCKS = 8, 2

_CODES = {INT4: 256, INT8: 512}
_RECORD = {INT4: INT4_RECORD, INT8: INT8_RECORD, BF16: BF16_RECORD}
_X_BYTES = {INT4: 1, INT8: 2, BF16: 2}
_WORDS = {INT4: 8, INT8: 16, BF16: 16}
"""32-bit words of a row's group: one dot product of four or two inputs each."""


@njit(nogil=True)
def record_bytes(form):
    """Bytes of a record, to compiled code."""
    return INT4_RECORD if form == INT4 else INT8_RECORD if form == INT8 else BF16_RECORD


@njit(nogil=True)
def input_bytes(form):
    """Bytes of one activation in the rows that `gemm` takes."""
    return 1 if form == INT4 else 2


def _weights(e: Emit, form: int, record: Value, word: int) -> Value:
    """What word `word` of a row is multiplied with, for 16 outputs: I."""
    if form == INT4:
        codes = e.load(I, record, 64 * (word // 2))
        return e.b.and_(e.b.lshr(codes, e.const_i(4)) if word % 2 else codes, e.const_i(0x0F0F0F0F))
    if form == INT8:
        return e.b.bitcast(e.b.sext(e.load(ir.VectorType(I8, 32), record, 32 * word), H), I)
    return e.load(I, record, 64 * word)


def _dot(e: Emit, form: int, acc: Value, weights: Value, x: Value) -> Value:
    if form == INT4:
        return e.dp_bytes(acc, weights, x)
    if form == INT8:
        return e.dp_words(acc, weights, x)
    return e.dp(acc, e.b.bitcast(weights, B), e.b.bitcast(x, B))


@intrinsic(prefer_literal=True)
def _tile(_, form, rows, blocks, w, w_stride, x, x_stride, scales, scales_stride, out, out_stride, groups):
    """out[M, 16 * NB] of `rows` rows and `blocks` blocks of outputs."""
    kind, n_rows, n_blocks = form.literal_value, rows.literal_value, blocks.literal_value

    def body(e: Emit, args: Sequence[Value]) -> None:
        w, w_stride, x, x_stride, scales, scales_stride, out, out_stride, groups = args
        w_n = [e.at(w, e.mul(w_stride, n)) for n in range(n_blocks)]
        x_m = [e.at(x, e.mul(x_stride, m)) for m in range(n_rows)]
        scales_m = [e.at(scales, e.mul(scales_stride, m)) for m in range(n_rows)]
        total = [[e.var(e.const(0.0)) for _ in range(n_blocks)] for _ in range(n_rows)]
        with e.loop(groups) as g:
            record_n = [e.at(p, e.mul(g, _RECORD[kind])) for p in w_n]
            e.prefetch(e.at(record_n[-1], PREFETCH), _RECORD[kind])
            x_g = [e.at(p, e.mul(g, 32 * _X_BYTES[kind])) for p in x_m]
            acc = [[e.b.load(total[m][n]) if kind == BF16 else e.const_i(0) for n in range(n_blocks)] for m in range(n_rows)]
            for word in range(_WORDS[kind]):
                weights = [_weights(e, kind, record, word) for record in record_n]
                for m in range(n_rows):
                    repeated = e.splat(e.load(I32, x_g[m], 4 * word), I)
                    acc[m] = [_dot(e, kind, acc[m][n], weights[n], repeated) for n in range(n_blocks)]
            for n in range(n_blocks):
                scale = None if kind == BF16 else e.load_half(record_n[n], _CODES[kind])
                offset = e.load_half(record_n[n], _CODES[kind] + 32) if kind == INT4 else None
                for m in range(n_rows):
                    value = acc[m][n]
                    if scale:
                        x_scale = e.load_splat(scales_m[m], e.mul(g, 8))
                        value = e.fma(scale, e.b.fmul(e.b.sitofp(value, F), x_scale), e.b.load(total[m][n]))
                    if offset:
                        value = e.fma(offset, e.load_splat(scales_m[m], e.b.add(e.mul(g, 8), e.i64(4))), value)
                    e.b.store(value, total[m][n])
        for m in range(n_rows):
            for n in range(n_blocks):
                e.store(e.b.load(total[m][n]), out, e.b.add(e.mul(out_stride, m), e.i64(64 * n)))

    return lowered(body, types.void, form, rows, blocks, *[types.int64] * 9)


def _product(form: int) -> Callable[..., None]:
    """`gemm` for one format: its tiles are compiled once, each called from one place."""
    record = _RECORD[form]

    @njit(nogil=True)
    def product(w, blocks, x, x_stride, scales, scales_stride, rows, out, out_stride, groups):
        stride = groups * record
        wide_rows = rows // TILE_ROWS * TILE_ROWS if rows >= WIDE_FROM else 0
        wide_blocks = blocks // TILE_BLOCKS * TILE_BLOCKS if wide_rows else 0
        for n in range(0, wide_blocks, TILE_BLOCKS):
            for row in range(0, wide_rows, TILE_ROWS):
                x_, s_, o = x + row * x_stride, scales + row * scales_stride, out + row * out_stride + 64 * n
                _tile(form, TILE_ROWS, TILE_BLOCKS, w + n * stride, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
        # What is left: the last rows of those blocks, and all rows of the last ones.
        row = wide_rows if wide_blocks == blocks else 0
        while row < rows:
            left, first = rows - row, wide_blocks if row < wide_rows else 0
            step = min(left, 8)
            x_, s_ = x + row * x_stride, scales + row * scales_stride
            for n in range(first, blocks):
                a, o = w + n * stride, out + row * out_stride + 64 * n
                if step == 8:
                    _tile(form, 8, 1, a, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
                elif step == 7:
                    _tile(form, 7, 1, a, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
                elif step == 6:
                    _tile(form, 6, 1, a, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
                elif step == 5:
                    _tile(form, 5, 1, a, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
                elif step == 4:
                    _tile(form, 4, 1, a, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
                elif step == 3:
                    _tile(form, 3, 1, a, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
                elif step == 2:
                    _tile(form, 2, 1, a, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
                else:
                    _tile(form, 1, 1, a, stride, x_, x_stride, s_, scales_stride, o, out_stride, groups)
            row += step

    return product


_int4_product, _int8_product, _bf16_product = _product(INT4), _product(INT8), _product(BF16)


@njit(nogil=True)
def gemm(form, w, blocks, x, x_stride, scales, scales_stride, rows, out, out_stride, groups):
    """out[rows, 16 * blocks] = x[rows, 32 * groups] times the weights of `blocks` consecutive blocks of 16 outputs.

    Args:
        form: INT4, INT8 or BF16.
        w: address of the first block's records.
        x: address of rows of int8 (INT4), int16 (INT8) or bf16 (BF16), `x_stride` bytes apart.
        scales: address of the rows' fp32 (scale, sum) of each group; with BF16 not read.
        out: address of fp32 rows.
    """
    if form == INT4:
        _int4_product(w, blocks, x, x_stride, scales, scales_stride, rows, out, out_stride, groups)
    elif form == INT8:
        _int8_product(w, blocks, x, x_stride, scales, scales_stride, rows, out, out_stride, groups)
    else:
        _bf16_product(w, blocks, x, x_stride, scales, scales_stride, rows, out, out_stride, groups)
