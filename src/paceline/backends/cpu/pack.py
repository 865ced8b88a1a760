"""Puts rows from GGUF's layout into records (`forms.py`): every bit of the file is kept, in another place.

Each form has its own packer, compiled when it is first needed. It packs sixteen rows at once, one in each lane, at the speed of memory. So a model is
packed at every start, and no packed copy is stored.

Shapes: N rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.forms import LANES, LAYOUT, Form, Layout, Scales
from paceline.backends.cpu.lowering import lowered
from paceline.backends.cpu.simd import I8, I16, Emit, I, Value
from paceline.backends.kernel_cache import in_use
from paceline.core.weights import TENSOR_TYPES

_BYTES_16, _HALVES_16 = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES)


def row_bytes(form: Form, k: int) -> int:
    """Return the bytes of a row of K weights in a file of the form's GGML type."""
    return TENSOR_TYPES[form.name].row_bytes(k)


def pack_rows(form: Form, rows: npt.NDArray[np.uint8], first: int, out: npt.NDArray[np.uint8]) -> None:
    """Write rows of a matrix to its records. Outputs of the last block that lie beyond the last row get zeros. Releases the interpreter's lock.

    Args:
        rows: uint8 [N, `row_bytes`]: GGML's blocks, or bf16 bits. They are whole blocks of 16 outputs, or the matrix's last rows.
        first: number in the matrix of the first of these rows; a multiple of 16.
        out: the whole matrix's records, contiguous uint8 of `Layout.packed_bytes`.

    Raises:
        ValueError: the arrays don't fit the form, `first`, or each other.
    """
    if rows.ndim != 2 or rows.strides[1] != 1 or not out.flags.c_contiguous:
        raise ValueError("rows of bytes in one piece each, and records in one piece")
    block = rows.shape[1] * LANES
    if first % LANES or rows.shape[1] % (LAYOUT[form].record_bytes // LANES) or rows.strides[0] * LANES >= 1 << 31:
        raise ValueError(f"{len(rows)} rows of {rows.shape[1]} bytes from row {first} are no blocks of {form.name}")
    if (first + len(rows) + LANES - 1) // LANES * block > out.nbytes:
        raise ValueError(f"{len(rows)} rows of {rows.shape[1]} bytes from row {first} in {out.nbytes} bytes of {form.name} records")
    packer(form)(rows.ctypes.data, len(rows), rows.shape[1], rows.strides[0], out.ctypes.data + first // LANES * block)


class _Rows:
    """One block of the file from each of sixteen rows, one in each lane. Lanes without a row hold zeros."""

    def __init__(self, e: Emit, blocks: Value, stride: Value, count: Value) -> None:
        self._e, self._blocks = e, blocks
        b = e.b
        lanes = ir.Constant(I, list(range(LANES)))
        self._at = b.mul(lanes, e.splat(b.trunc(stride, I.element), I))
        self._some = b.icmp_signed("<", lanes, e.splat(b.trunc(count, I.element), I))
        self._read: dict[int, Value] = {}

    def word(self, place: int) -> Value:
        """Return the 32 bits at a place of the block, an I."""
        if place not in self._read:
            self._read[place] = self._e.gather(self._e.at(self._blocks, place), self._at, self._some)
        return self._read[place]

    def bits(self, place: int, shift: int) -> Value:
        """Return the 32 bits at a place of the block, shifted right by `shift`."""
        return self._e.b.lshr(self.word(place), self._e.const_i(shift)) if shift else self.word(place)

    def byte(self, place: int, mask: int = 0xFF) -> Value:
        """Return the byte at a place of the block, an I. It is read together with the other bytes of its word."""
        within = place % 4
        return self._e.b.and_(self.bits(place - within, 8 * within), self._e.const_i(mask))


class _Packing:
    """Writes the code that packs a block of sixteen rows into one record."""

    def __init__(self, e: Emit, layout: Layout, rows: _Rows, record: Value) -> None:
        self._e, self._layout, self._rows, self._record = e, layout, rows, record
        self._minimums = layout.scales is Scales.SUB_MINIMUMS
        self._offset = layout.scales is Scales.SCALE_OFFSET
        # Offsets in a block of the file of the codes' low four bits, and of the bits above them.
        if layout.groups == 1:
            self._upper_at = {Scales.SCALE_OFFSET: 4, Scales.POWER: 1}.get(layout.scales, 2)
            self._codes_at = self._upper_at + (4 if layout.bits == 5 else 0)
        elif self._minimums:
            self._upper_at, self._codes_at = 16, 16 + (32 if layout.bits == 5 else 0)
        else:
            self._upper_at, self._codes_at = 128, 0

    def write(self) -> None:
        layout, rows = self._layout, self._rows
        if layout.bits == 16:
            for pair in range(16):
                self._put(64 * pair, rows.word(4 * pair))
            return
        self._scales()
        if layout.bits == 8:
            for pair in range(16):
                self._put(32 * pair, rows.bits(2 + 4 * (pair // 2), 16 * (pair % 2)), _HALVES_16)
            return
        for group in range(layout.groups):
            self._codes(group)
            if layout.bits > 4:
                self._planes(group)

    def _put(self, place: int, value: Value, kind: ir.VectorType = I) -> None:
        e = self._e
        e.store(value if kind is I else e.b.trunc(value, kind), self._record, place)

    def _scales(self) -> None:
        e, rows, at = self._e, self._rows, self._layout.scales_at
        b = e.b
        if self._layout.scales is Scales.POWER:
            self._put(at, rows.word(0), _BYTES_16)
        elif self._layout.groups == 1:
            self._put(at, rows.word(0), _HALVES_16)
            if self._offset:
                self._put(at + 32, rows.bits(0, 16), _HALVES_16)
        elif self._minimums:
            high: list[Value] = []
            for group in range(8):
                # Six bits of scale and of minimum, as Q4_K and Q5_K store them: the low four of both, then the high two of both.
                if group < 4:
                    both = [rows.byte(4 + 4 * i + group, 63) for i in range(2)]
                    low = [b.and_(each, e.const_i(15)) for each in both]
                    upper = [b.lshr(each, e.const_i(4)) for each in both]
                else:
                    second = rows.byte(8 + group)
                    low = [b.and_(second, e.const_i(15)), b.lshr(second, e.const_i(4))]
                    upper = [b.lshr(rows.byte(4 + 4 * i + group % 4), e.const_i(6)) for i in range(2)]
                self._put(at + 16 * group, b.or_(low[0], b.shl(low[1], e.const_i(4))), _BYTES_16)
                high.append(b.or_(upper[0], b.shl(upper[1], e.const_i(2))))
            for pair in range(4):
                self._put(at + 128 + 16 * pair, b.or_(high[2 * pair], b.shl(high[2 * pair + 1], e.const_i(4))), _BYTES_16)
            self._put(at + 192, rows.word(0), _HALVES_16)
            self._put(at + 224, rows.bits(0, 16), _HALVES_16)
        else:
            for half in range(16):
                self._put(at + 16 * half, rows.bits(192 + half // 4 * 4, 8 * (half % 4)), _BYTES_16)
            self._put(at + 256, rows.bits(206, 16), _HALVES_16)

    def _codes(self, group: int) -> None:
        e, layout = self._e, self._layout
        b = e.b
        if layout.groups == 1:
            codes, step, shift = self._codes_at, 16, 0
        elif self._minimums:
            codes, step, shift = self._codes_at + 32 * (group >> 1), 32, 4 * (group & 1)
        else:
            codes, step, shift = self._codes_at + 64 * (group >> 2) + 32 * (group & 1), 32, 4 * (group >> 1 & 1)
        for pair in range(4):
            # In blocks of 32 inputs, the second sixteen codes are the high halves of the bytes of the first sixteen.
            at, turn = codes + 8 * pair % step, shift + 8 * pair // step * 4
            first, second = (b.and_(self._rows.bits(at + 4 * i, turn), e.const_i(0x0F0F0F0F)) for i in range(2))
            self._put(layout.codes_bytes * group + 64 * pair, b.or_(first, b.shl(second, e.const_i(4))))

    def _planes(self, group: int) -> None:
        e, layout, rows = self._e, self._layout, self._rows
        b = e.b
        target = layout.plane_at + layout.plane_bytes * group
        if layout.groups == 1:
            parts = [b.shl(self._spread(rows.bits(self._upper_at, i)), e.const_i(8 * i)) for i in range(4)]
            self._put(target, self._any(parts))
        elif layout.bits == 5:
            planes = [b.and_(rows.bits(self._upper_at + 4 * word, group), e.const_i(0x01010101)) for word in range(8)]
            self._put(target, self._any([b.shl(plane, e.const_i(word)) for word, plane in enumerate(planes)]))
        else:
            for half in range(2):
                upper = self._upper_at + 32 * (group >> 2) + 16 * half
                planes = [b.and_(rows.bits(upper + 4 * word, 2 * (group & 3)), e.const_i(0x03030303)) for word in range(4)]
                self._put(target + 64 * half, self._any([b.shl(plane, e.const_i(2 * word)) for word, plane in enumerate(planes)]))

    def _spread(self, bits: Value) -> Value:
        """Return bits 0, 4, 8, ... of 32 as the bits of a byte."""
        e = self._e
        b = e.b
        picked = b.and_(bits, e.const_i(0x11111111))
        for shift, mask in ((3, 0x03030303), (6, 0x000F000F), (12, 0xFF)):
            picked = b.and_(b.or_(picked, b.lshr(picked, e.const_i(shift))), e.const_i(mask))
        return picked

    def _any(self, parts: Sequence[Value]) -> Value:
        whole, *rest = parts
        for part in rest:
            whole = self._e.b.or_(whole, part)
        return whole


@intrinsic(prefer_literal=True)
def _pack_block(_, form, blocks, stride, count, record):
    """Pack one block of each of `count` rows (at most 16, `stride` bytes apart) into their common record."""
    layout = LAYOUT[Form(form.literal_value)]

    def body(e: Emit, args: Sequence[Value]) -> None:
        blocks, stride, count, record = args
        _Packing(e, layout, _Rows(e, blocks, stride, count), e.at(record)).write()

    return lowered(body, types.void, form, *[types.int64] * 4)


@cache
def packer(form: Form) -> Callable[..., None]:
    """Return the function that packs rows of a form. The first call for a form compiles it."""
    kind, record_bytes = int(form), LAYOUT[form].record_bytes
    block_bytes = record_bytes // LANES

    def pack(rows, count, row_bytes, stride, out):
        for first in range(0, count, LANES):
            records = out + first * row_bytes
            for at in range(row_bytes // block_bytes):
                _pack_block(kind, rows + first * stride + at * block_bytes, stride, min(count - first, LANES), records + at * record_bytes)

    pack.__qualname__ = f"pack_{form.name.lower()}"
    return njit(types.void(*[types.int64] * 5), nogil=True, cache=in_use())(pack)
