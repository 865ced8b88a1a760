"""Rows of the embedding, read out of the packed records (a tied head is held once, in the head's layout).

A weight is `scale * (code - zero) + offset`, rounded once to fp32, then to bf16. Shapes: T rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.core import types

from paceline.backends.cpu.forms import LANES, LAYOUT, Form, Layout, Scales
from paceline.backends.cpu.words import read, read_half, write
from paceline.backends.ggml.bits import bf16_bits
from paceline.backends.kernel_cache import in_use


def embed_rows(form: Form, table: int, ids: npt.NDArray[np.int32], out: npt.NDArray[np.uint16]) -> None:
    """out[T, D] = rows `ids` of a table of records at an address, bf16 bits."""
    ids = np.ascontiguousarray(ids, np.int32)
    reader(form)(ids.ctypes.data, len(ids), table, out.shape[1] // 32, out.ctypes.data)


def _scale_reader(layout: Layout) -> Callable[..., tuple[float, float]]:
    """(scale, offset) of one half of group g in a record, for one output."""
    kind, at = layout.scales, layout.scales_at
    with_offset, minimums, sub_scales = (kind is each for each in (Scales.SCALE_OFFSET, Scales.SUB_MINIMUMS, Scales.SUB_SCALES))

    def read_scale(record, g, half, lane):
        if minimums:
            low, high = read(8, record + at + 16 * g + lane), read(8, record + at + 128 + 16 * (g >> 1) + lane) >> 4 * (g & 1)
            scale, minimum = low & 15 | (high & 3) << 4, low >> 4 | (high >> 2 & 3) << 4
            lane_ = record + at + 192 + 2 * lane
            return read_half(lane_) * np.float32(scale), -read_half(lane_ + 32) * np.float32(minimum)
        if sub_scales:
            sub = read(8, record + at + 32 * g + 16 * half + lane)
            return read_half(record + at + 256 + 2 * lane) * np.float32(sub - 256 if sub > 127 else sub), np.float32(0)
        return read_half(record + at + 2 * lane), read_half(record + at + 32 + 2 * lane) if with_offset else np.float32(0)

    return njit(read_scale)


@cache
def reader(form: Form) -> Callable[..., None]:
    """The compiled reader of a form, compiled when a model needs it."""
    layout = LAYOUT[form]
    bits, groups, record_bytes = layout.bits, layout.groups, layout.record_bytes
    codes_bytes, plane_bytes, plane_at = layout.codes_bytes, layout.plane_bytes, layout.plane_at
    zero, with_offset = layout.zero, layout.scales in {Scales.SCALE_OFFSET, Scales.SUB_MINIMUMS}
    read_scale = _scale_reader(layout)

    @njit
    def read_code(record, g, k, lane):
        if bits == 8:
            code = read(8, record + k // 2 * 32 + 2 * lane + k % 2)
            return code - 256 if code > 127 else code
        at = 4 * lane + k % 4
        word = k // 4
        code = read(8, record + codes_bytes * g + word // 2 * 64 + at) >> word % 2 * 4 & 15
        if bits == 5:
            code |= (read(8, record + plane_at + plane_bytes * g + at) >> word & 1) << 4
        if bits == 6:
            code |= (read(8, record + plane_at + plane_bytes * g + word // 4 * 64 + at) >> word % 4 * 2 & 3) << 4
        return code

    def read_rows(ids, count, table, n_groups, out):
        for row in range(count):
            token = read(32, ids + 4 * row)
            lane, block = token % LANES, table + token // LANES * (n_groups // groups) * record_bytes
            for i in range(n_groups):
                record, g, at = block + i // groups * record_bytes, i % groups, out + 64 * (row * n_groups + i)
                if bits == 16:
                    for pair in range(16):
                        write(32, at + 4 * pair, read(32, record + 64 * pair + 4 * lane))
                else:
                    for half in range(2):
                        scale, offset = read_scale(record, g, half, lane)
                        for k in range(16 * half, 16 * half + 16):
                            weight = np.float32(read_code(record, g, k, lane) - zero) * scale
                            write(16, at + 2 * k, bf16_bits(weight + offset if with_offset else weight))

    read_rows.__qualname__ = f"embed_{form.name.lower()}"
    return njit(types.void(*[types.int64] * 5), nogil=True, cache=in_use())(read_rows)
