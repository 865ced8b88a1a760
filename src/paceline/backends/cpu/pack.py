"""Rows as GGUF stores them, put into records (`forms.py`): every bit of the file, in another place.

Each form has a packer of its own, compiled when it is first needed. Several threads may pack rows of one matrix at once: each row
writes its own lane. What no row writes stays as it was: memory is zeroed, so outputs beyond the last weigh nothing.

Shapes: N rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.core import types

from paceline.backends.cpu.forms import LANES, LAYOUT, Form, Scales
from paceline.backends.cpu.words import read, write
from paceline.backends.ggml.k_quants import six_bits
from paceline.backends.kernel_cache import in_use
from paceline.core.weights import TENSOR_TYPES


def row_bytes(form: Form, k: int) -> int:
    """Bytes of a row of K weights in a file of the form's GGML type; bf16 is plain."""
    return TENSOR_TYPES[form.name].row_bytes(k)


def pack_rows(form: Form, rows: npt.NDArray[np.uint8], first: int, out: npt.NDArray[np.uint8]) -> None:
    """Write rows of a matrix to its records. Lets go of the interpreter's lock.

    Args:
        rows: uint8 [N, `row_bytes`]: GGML's blocks, or bf16 bits.
        first: which row of the matrix the first of them is.
        out: the whole matrix's records, uint8 in one piece of `Layout.packed_bytes`, zeroed.
    """
    if rows.ndim != 2 or rows.strides[1] != 1 or not out.flags.c_contiguous:
        raise ValueError("rows of bytes in one piece each, and records in one piece")
    block = rows.shape[1] * LANES
    if (first + len(rows) + LANES - 1) // LANES * block > out.nbytes or rows.shape[1] % (LAYOUT[form].record_bytes // LANES):
        raise ValueError(f"{len(rows)} rows of {rows.shape[1]} bytes from row {first} in {out.nbytes} bytes of {form.name} records")
    _packer(form)(rows.ctypes.data, len(rows), rows.shape[1], rows.strides[0], first, out.ctypes.data)


@njit
def _spread(bits, i):
    """Bits i, i + 4, i + 8, ... of 32 as the bits of a byte."""
    picked = bits >> i & 0x11111111
    picked = (picked | picked >> 3) & 0x03030303
    picked = (picked | picked >> 6) & 0x000F000F
    return (picked | picked >> 12) & 0xFF


@cache
def _packer(form: Form) -> Callable[..., None]:
    layout = LAYOUT[form]
    bits, groups, record_bytes, block_bytes = layout.bits, layout.groups, layout.record_bytes, layout.record_bytes // LANES
    codes_bytes, plane_bytes, plane_at, scales_at = layout.codes_bytes, layout.plane_bytes, layout.plane_at, layout.scales_at
    offset, minimums = (layout.scales is kind for kind in (Scales.SCALE_OFFSET, Scales.SUB_MINIMUMS))
    # Where a block of the file has its low four bits, and those above.
    if groups == 1:
        upper_at = 4 if offset else 2
        codes_at = upper_at + (4 if bits == 5 else 0)
    elif minimums:
        upper_at, codes_at = 16, 16 + (32 if bits == 5 else 0)
    else:
        upper_at, codes_at = 128, 0

    def pack_scales(block, record, lane):
        if groups == 1:
            write(16, record + scales_at + 2 * lane, read(16, block))
            if offset:
                write(16, record + scales_at + 32 + 2 * lane, read(16, block + 2))
        elif minimums:
            for pair in range(4):
                high = 0
                for i in range(2):
                    g = 2 * pair + i
                    scale = six_bits(read(8, block + 4 + g % 4), read(8, block + 8 + g), g, 0)
                    minimum = six_bits(read(8, block + 8 + g % 4), read(8, block + 8 + g), g, 1)
                    write(8, record + scales_at + 16 * g + lane, scale & 15 | (minimum & 15) << 4)
                    high |= (scale >> 4 | minimum >> 4 << 2) << 4 * i
                write(8, record + scales_at + 128 + 16 * pair + lane, high)
            write(16, record + scales_at + 192 + 2 * lane, read(16, block))
            write(16, record + scales_at + 224 + 2 * lane, read(16, block + 2))
        else:
            for half in range(16):
                write(8, record + scales_at + 16 * half + lane, read(8, block + 192 + half))
            write(16, record + scales_at + 256 + 2 * lane, read(16, block + 208))

    def pack_codes(block, g, record, lane):
        if groups == 1:
            codes, step, shift = block + codes_at, 16, 0
        elif minimums:
            codes, step, shift = block + codes_at + 32 * (g >> 1), 32, 4 * (g & 1)
        else:
            codes, step, shift = block + codes_at + 64 * (g >> 2) + 32 * (g & 1), 32, 4 * (g >> 1 & 1)
        target = record + codes_bytes * g + 4 * lane
        for pair in range(4):
            # In blocks of 32 inputs, the second sixteen are the high halves of the first sixteen's bytes.
            at, turn = 8 * pair % step, shift + 8 * pair // step * 4
            first, second = read(32, codes + at) >> turn & 0x0F0F0F0F, read(32, codes + at + 4) >> turn & 0x0F0F0F0F
            write(32, target + 64 * pair, first | second << 4)

    def pack_planes(block, g, record, lane):
        upper, target = block + upper_at, record + plane_at + plane_bytes * g + 4 * lane
        if groups == 1:
            every, plane = read(32, upper), 0
            for i in range(4):
                plane |= _spread(every, i) << 8 * i
            write(32, target, plane)
        elif bits == 5:
            plane = 0
            for word in range(8):
                plane |= (read(32, upper + 4 * word) >> g & 0x01010101) << word
            write(32, target, plane)
        else:
            for part in range(2):
                plane = 0
                for word in range(4):
                    plane |= (read(32, upper + 32 * (g >> 2) + 16 * part + 4 * word) >> 2 * (g & 3) & 0x03030303) << 2 * word
                write(32, target + 64 * part, plane)

    pack_scales, pack_codes, pack_planes = njit(pack_scales), njit(pack_codes), njit(pack_planes)

    def pack(rows, count, row_bytes, stride, first, out):
        matrix_block = row_bytes * LANES
        start = 0
        while start < count:
            # The rows of one block of outputs together, so that each record is written once.
            lanes = min(count - start, LANES - (first + start) % LANES)
            lane = (first + start) % LANES
            records = out + (first + start) // LANES * matrix_block
            for at in range(row_bytes // block_bytes):
                record = records + at * record_bytes
                for i in range(lanes):
                    block, to = rows + (start + i) * stride + at * block_bytes, lane + i
                    if bits == 16:
                        for pair in range(16):
                            write(32, record + 64 * pair + 4 * to, read(32, block + 4 * pair))
                    else:
                        pack_scales(block, record, to)
                        if bits == 8:
                            for pair in range(16):
                                write(16, record + 32 * pair + 2 * to, read(16, block + 2 + 2 * pair))
                        else:
                            for g in range(groups):
                                pack_codes(block, g, record, to)
                                if bits > 4:
                                    pack_planes(block, g, record, to)
            start += lanes

    pack.__qualname__ = f"pack_{form.name.lower()}"
    return njit(types.void(*[types.int64] * 6), nogil=True, cache=in_use())(pack)
