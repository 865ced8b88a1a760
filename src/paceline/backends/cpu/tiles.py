"""One tile of a matrix product, for weights of any form: some rows by some blocks of 16 outputs, all inputs.

The order of operations on one row and one output is the same in every tile (`docs/internals/arithmetic.md`), so a row's bits depend only on the row.
Inputs are cut into segments of whole groups. The sums of segments are added in a binary tree of neighbours; an odd last one passes up unchanged.

Strides and offsets are bytes. Shapes: M rows, NB blocks of 16 outputs, G groups of 32 inputs, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.forms import GROUP_BYTES, LANES, LAYOUT, POINTS, Form, Inputs, Layout, Scales
from paceline.backends.cpu.lowering import lowered
from paceline.backends.cpu.shares import MOST_SEGMENTS
from paceline.backends.cpu.simd import I8, I32, I64, Emit, F, I, ProductSum, Value
from paceline.backends.cpu.sizes import EXPANDED_BYTES

PREFETCH = 8192
"""Bytes ahead of use at which records are prefetched. Without prefetching, 16 rows ran at 0.7 of their speed from memory."""

_LEVELS = MOST_SEGMENTS.bit_length()
"""Most sums that wait for their neighbour."""

_WORDS = {Inputs.INT8: 8, Inputs.INT16: 16, Inputs.BF16: 16}
"""32-bit words of a row's group: one dot product of four or two inputs each."""

_BYTES_16 = ir.VectorType(I8, LANES)

_RAISE = 32
"""Added to MXFP4's points, because bytes of codes are unsigned. `rows.quantize` stores -32 times the sum of the activations to compensate for it."""


class _Record:
    """One group of one block of outputs."""

    def __init__(self, e: Emit, layout: Layout, block: Value, group: Value) -> None:
        self._e, self._layout = e, layout
        b = e.b
        if layout.groups == 1:
            self._base = e.at(block, e.mul(group, layout.record_bytes))
            self._group = e.i64(0)
        else:
            self._base = e.at(block, e.mul(b.lshr(group, e.i64(3)), layout.record_bytes))
            self._group = b.and_(group, e.i64(7))
        self._codes = e.at(self._base, e.mul(self._group, layout.codes_bytes))
        self._plane = e.at(self._base, b.add(e.mul(self._group, layout.plane_bytes), e.i64(layout.plane_at)))

    def codes(self, word: int) -> Value:
        """Return the codes of 16 outputs that word `word` of a row is multiplied with, an I."""
        e, bits = self._e, self._layout.bits
        b = e.b
        if bits == 8:
            return e.words(e.load(ir.VectorType(I8, 32), self._codes, 32 * word))
        if bits == 16:
            return e.load(I, self._codes, 64 * word)
        low = e.nibbles(e.load(I, self._codes, 64 * (word // 2)), bool(word % 2))
        if self._layout.scales is Scales.POWER:
            return e.look_up([point + _RAISE for point in POINTS], low)
        if bits == 4:
            return low
        # A byte of a plane holds the upper bits of one input of eight words, or of four.
        upper = bits - 4
        words = 8 // upper
        plane = e.load(I, self._plane, 64 * (word // words))
        shift = 4 - upper * (word % words)
        plane = b.shl(plane, e.const_i(shift)) if shift >= 0 else b.lshr(plane, e.const_i(-shift))
        return b.or_(low, b.and_(plane, e.const_i(0x10101010 if upper == 1 else 0x30303030)))

    def _half(self, place: int) -> Value:
        return self._e.load_half(self._base, self._layout.scales_at + place)

    def _bytes(self, place: int, index: Value) -> Value:
        """Load sixteen bytes of the scales: 16 x i8."""
        return self._e.load(_BYTES_16, self._base, self._e.b.add(self._e.mul(index, 16), self._e.i64(self._layout.scales_at + place)))

    def scale_offset(self) -> tuple[Value, Value | None]:
        """Return the factors of a group's integer sum and of its activations' sum (None: it does not count). An F each, exact in fp32."""
        e = self._e
        b = e.b
        match self._layout.scales:
            case Scales.SCALE:
                scale = self._half(0)
                return scale, b.fmul(scale, e.const(-self._layout.zero)) if self._layout.zero else None
            case Scales.SCALE_OFFSET:
                return self._half(0), self._half(32)
            case Scales.SUB_SCALES:
                return self._half(256), None
            case Scales.POWER:
                # 2**(exponent - 128), because points are doubled. It is denormal for the two lowest exponents.
                exponent = b.zext(self._bytes(0, e.i64(0)), I)
                normal = b.shl(b.sub(exponent, e.const_i(1)), e.const_i(23))
                denormal = b.icmp_unsigned("<", exponent, e.const_i(2))
                return b.bitcast(b.select(denormal, b.shl(e.const_i(1 << 21), exponent), normal), F), None
            case _:
                # One byte for each group holds the low four bits of both; one byte for two groups holds their high two bits.
                low = b.zext(self._bytes(0, self._group), I)
                shift = e.splat(b.trunc(e.mul(b.and_(self._group, e.i64(1)), 4), I32), I)
                high = b.lshr(b.zext(self._bytes(128, b.lshr(self._group, e.i64(1))), I), shift)
                scale = b.or_(b.and_(low, e.const_i(15)), b.and_(b.shl(high, e.const_i(4)), e.const_i(0x30)))
                minimum = b.or_(b.lshr(low, e.const_i(4)), b.and_(b.shl(high, e.const_i(2)), e.const_i(0x30)))
                least = b.fneg(self._half(224))
                return b.fmul(self._half(192), b.sitofp(scale, F)), b.fmul(least, b.sitofp(minimum, F))

    def sub_scale(self, half: int) -> Value:
        """Return the scale of a half of the group, an F."""
        e = self._e
        return e.b.sitofp(e.b.sext(self._bytes(0, e.b.add(e.mul(self._group, 2), e.i64(half))), I), F)


class _Expanded:
    """One group of one block of outputs, already unpacked for tiles: codes as bytes, scales as fp32.

    Codes by word (8 x 64 bytes), then scales of the halves if the form has them (2 x 64), scale (64), offset (64).
    """

    def __init__(self, e: Emit, layout: Layout, block: Value, group: Value) -> None:
        self._e, self._halves = e, 2 if layout.scales is Scales.SUB_SCALES else 0
        self._base = e.at(block, e.mul(group, EXPANDED_BYTES))
        self._has_offset = layout.scales not in {Scales.SUB_SCALES, Scales.POWER}

    def codes(self, word: int) -> Value:
        return self._e.load(I, self._base, 64 * word, align=64)

    def sub_scale(self, half: int) -> Value:
        return self._e.load(F, self._base, 512 + 64 * half, align=64)

    def scale_offset(self) -> tuple[Value, Value | None]:
        e, at = self._e, 512 + 64 * self._halves
        return e.load(F, self._base, at, align=64), e.load(F, self._base, at + 64, align=64) if self._has_offset else None


class _Tile:
    """Writes the code of one tile.

    Args:
        panel: number of rows stored together, of which the tile takes some. None: the tile takes all of them.
        careful: the tile is also right if the processor flushes results before they are rounded.
    """

    def __init__(
        self,
        e: Emit,
        layout: Layout,
        rows: int,
        blocks: int,
        record: type[_Record | _Expanded],
        panel: Value = None,
        *,
        careful: bool = False,
    ) -> None:
        self._e, self._layout, self._record = e, layout, record
        self._rows: Final = range(rows)
        self._blocks: Final = range(blocks)
        self._words = _WORDS[layout.inputs]
        self._row_bytes = GROUP_BYTES[layout.inputs]
        self._careful: Final = careful
        self._group_bytes = e.i64(self._row_bytes * rows) if panel is None else e.mul(panel, self._row_bytes)
        self.total = [[e.var(e.const(0.0)) for _ in self._blocks] for _ in self._rows]

    def write(self, args: Sequence[Value]) -> None:
        e = self._e
        b = e.b
        w, w_stride, x, out, out_stride, bounds, segments = args
        w_n = [e.at(w, e.mul(w_stride, n)) for n in self._blocks]
        # Not Numba's `alloca_once`, which zeroes: the zeros for all tiles of a product, 16 KB, cost about 300 cycles in each call.
        with b.goto_entry_block():
            waiting = b.alloca(ir.ArrayType(F, _LEVELS * len(self._rows) * len(self._blocks)))
        waiting.align = 64
        depth = e.var(e.i64(0))
        with e.loop(segments) as s:
            for total in self._totals():
                b.store(e.const(0.0), total)
            first, stop = (e.load(I64, bounds, b.add(e.mul(s, 8), e.i64(8 * end)), align=8) for end in range(2))
            with e.flushed() if self._layout.inputs is Inputs.BF16 else nullcontext(), e.loop(stop, first) as group:
                self._add_group(w_n, x, group)
            # The segments so far form whole subtrees. This one completes as many as the number of ones that its number ends in.
            with e.loop(b.cttz(b.add(s, e.i64(1)), ir.Constant(ir.IntType(1), 1))):
                self._join(waiting, depth)
            at = b.load(depth)
            for i, total in enumerate(self._totals()):
                b.store(b.load(total), self._slot(waiting, at, i))
            b.store(b.add(at, e.i64(1)), depth)
        b.store(b.sub(b.load(depth), e.i64(1)), depth)
        with e.loop(b.load(depth)):
            self._join(waiting, depth)
        for m in self._rows:
            for n in self._blocks:
                e.store(b.load(self.total[m][n]), out, b.add(e.mul(out_stride, m), e.i64(64 * n)))

    def _totals(self) -> list[Value]:
        return [total for row in self.total for total in row]

    def _slot(self, waiting: Value, depth: Value, i: int) -> Value:
        e = self._e
        place = e.b.add(e.mul(depth, len(self._rows) * len(self._blocks)), e.i64(i))
        return e.b.gep(waiting, [ir.Constant(I32, 0), place], inbounds=True)

    def _join(self, waiting: Value, depth: Value) -> None:
        """Add the sums that were stored last to the totals, as the left operands."""
        e = self._e
        at = e.b.sub(e.b.load(depth), e.i64(1))
        for i, total in enumerate(self._totals()):
            e.b.store(e.b.fadd(e.b.load(self._slot(waiting, at, i)), e.b.load(total)), total)
        e.b.store(at, depth)

    def _add_group(self, w_n: list[Value], x: Value, group: Value) -> None:
        e, layout = self._e, self._layout
        b = e.b
        if self._record is _Record:
            ahead = layout.bytes_of_eight_groups // 8
            e.prefetch(e.at(w_n[-1], b.add(e.mul(group, ahead), e.i64(PREFETCH))), ahead)
        record_n = [self._record(e, layout, block, group) for block in w_n]
        x_g = e.at(x, b.mul(group, self._group_bytes))
        if layout.scales is Scales.NONE:
            acc = [[b.load(total) for total in row] for row in self.total]
            for row, values in zip(self.total, self._sums(record_n, x_g, range(self._words), acc), strict=True):
                for total, value in zip(row, values, strict=True):
                    b.store(value, total)
            return
        after_codes = 4 * self._words
        if layout.scales is Scales.SUB_SCALES:
            # Exact in fp32: below 2**24 in any order of operations.
            value: list[list[Value]] = []
            for half in range(2):
                acc = [[e.splat(e.load(I32, x_g, self._at(m, after_codes + 8 + 4 * half)), I)] * len(w_n) for m in self._rows]
                words = range(half * self._words // 2, (half + 1) * self._words // 2)
                part = self._sums(record_n, x_g, words, acc)
                sub = [record.sub_scale(half) for record in record_n]
                products = [[b.sitofp(part[m][n], F) for n in self._blocks] for m in self._rows]
                if half == 0:
                    value = [[b.fmul(sub[n], products[m][n]) for n in self._blocks] for m in self._rows]
                else:
                    value = [[e.fma(sub[n], products[m][n], value[m][n]) for n in self._blocks] for m in self._rows]
        else:
            acc = [[self._first_sum(x_g, m, after_codes)] * len(w_n) for m in self._rows]
            sums = self._sums(record_n, x_g, range(self._words), acc)
            value = [[b.sitofp(sums[m][n], F) for n in self._blocks] for m in self._rows]
        for n in self._blocks:
            scale, offset = record_n[n].scale_offset()
            for m in self._rows:
                total = self.total[m][n]
                y = e.fma(scale, b.fmul(value[m][n], e.load_splat(x_g, self._at(m, after_codes))), b.load(total))
                if offset is not None:
                    y = e.fma(offset, e.load_splat(x_g, self._at(m, after_codes + 4)), y)
                b.store(y, total)

    def _first_sum(self, x_g: Value, row: int, after_codes: int) -> Value:
        """Return the start value of a group's integer sum, an I: zero, or the compensation for `_RAISE`."""
        e = self._e
        if self._layout.scales is not Scales.POWER:
            return e.const_i(0)
        return e.splat(e.b.add(*(e.load(I32, x_g, self._at(row, after_codes + 8 + 4 * half)) for half in range(2))), I)

    def _at(self, row: int, place: int) -> int:
        """Return the offset of a place in a row's group, counted from the first row's group."""
        return self._row_bytes * row + place

    def _sums(self, record_n: list[_Record] | list[_Expanded], x_g: Value, words: range, acc: list[list[Value]]) -> list[list[Value]]:
        """Return `acc` plus the products of some words, [M][NB]."""
        e = self._e
        columns = [self._sums_from([row[n] for row in acc]) for n in self._blocks]
        sums = [[column[m] for column in columns] for m in self._rows]
        for first in range(0, len(self._rows), e.rows_at_once):
            for word in words:
                codes = [record.codes(word) for record in record_n]
                for m in self._rows[first : first + e.rows_at_once]:
                    repeated = e.word(x_g, self._at(m, 0), word)
                    for n in self._blocks:
                        sums[m][n].add(codes[n], repeated)
        return [[value.total() for value in row] for row in sums]

    def _sums_from(self, acc_M: list[Value]) -> Sequence[ProductSum]:
        e = self._e
        match self._layout.inputs:
            case Inputs.INT8:
                most = _RAISE + max(POINTS) if self._layout.scales is Scales.POWER else (1 << self._layout.bits) - 1
                return e.byte_sums(acc_M, most)
            case Inputs.INT16:
                return [e.word_sums(acc) for acc in acc_M]
            case Inputs.BF16:
                return [e.pair_sums(acc, self._careful) for acc in acc_M]


@intrinsic(prefer_literal=True)
def tile(_, form, expanded, rows, blocks, w, w_stride, x, out, out_stride, bounds, segments):
    """Compute out[M, 16 * NB] for a panel of `rows` rows and `blocks` blocks of outputs. Segment s is the groups from bounds[s] to bounds[s + 1]."""
    layout = LAYOUT[Form(form.literal_value)]
    n_rows, n_blocks = rows.literal_value, blocks.literal_value
    record = _Expanded if expanded.literal_value else _Record

    def body(e: Emit, args: Sequence[Value]) -> None:
        _Tile(e, layout, n_rows, n_blocks, record).write(args)

    return lowered(body, types.void, form, expanded, rows, blocks, *[types.int64] * 7)


@intrinsic(prefer_literal=True)
def part_of_panel(_, form, expanded, careful, rows, panel, w, x, out, out_stride, bounds, segments):
    """Compute a tile of `rows` of the `panel` rows that are stored together, for one block of outputs.

    Returns whether it must be computed again with `careful`, because a result may have been flushed before it was rounded.
    """
    layout, n_rows = LAYOUT[Form(form.literal_value)], rows.literal_value
    record, is_careful = _Expanded if expanded.literal_value else _Record, bool(careful.literal_value)

    def body(e: Emit, args: Sequence[Value]) -> Value:
        panel, w, x, out, out_stride, bounds, segments = args
        flushes = layout.inputs is Inputs.BF16
        if flushes:
            e.watch_underflow()
        _Tile(e, layout, n_rows, 1, record, panel, careful=is_careful).write([w, e.i64(0), x, out, out_stride, bounds, segments])
        return e.has_underflowed() if flushes else ir.Constant(ir.IntType(1), 0)

    return lowered(body, types.boolean, form, expanded, careful, rows, *[types.int64] * 7)


@intrinsic(prefer_literal=True)
def expand(_, form, w, groups, out):
    """Unpack the groups of one block of outputs, so that many tiles can read them."""
    layout = LAYOUT[Form(form.literal_value)]

    def body(e: Emit, args: Sequence[Value]) -> None:
        w, groups, out = args
        with e.loop(groups) as group:
            ahead = layout.bytes_of_eight_groups // 8
            e.prefetch(e.at(w, e.b.add(e.mul(group, ahead), e.i64(PREFETCH))), ahead)
            record, base = _Record(e, layout, e.at(w), group), e.at(out, e.mul(group, EXPANDED_BYTES))
            fields = [record.codes(word) for word in range(8)]
            if layout.scales is Scales.SUB_SCALES:
                fields += [record.sub_scale(half) for half in range(2)]
            fields += [value for value in record.scale_offset() if value is not None]
            for place, value in enumerate(fields):
                e.store(value, base, 64 * place, align=64)

    return lowered(body, types.void, form, *[types.int64] * 3)
