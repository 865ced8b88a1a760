"""Products of a matrix with rows: one function for each form, compiled when a model needs it, cached with the other kernels, and called by its address."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import cfunc
from numba.core import types
from numba.extending import intrinsic, overload

from paceline.backends.cpu.forms import GROUP_BYTES, LAYOUT, PANEL, Form, Inputs, Scales
from paceline.backends.cpu.lowering import EMIT, lowered
from paceline.backends.cpu.shares import segment_bounds
from paceline.backends.cpu.simd import I64, Emit, Value
from paceline.backends.cpu.sizes import TILE_BLOCKS
from paceline.backends.cpu.tiles import EXPANDED_BYTES, expand, part_of_panel, tile
from paceline.backends.kernel_cache import in_use

WIDE_FROM = 32
"""Least rows for which weights are unpacked once for all of them. Lowering it: for few rows unpacking costs more than it saves, because prefetching
hides reads from a single stream of records."""

_ARGUMENTS = 11


def multiply_panel(form, expanded, w, x, rows, out, out_stride, bounds, segments):
    """Multiply a panel of at most eight rows with one block of outputs, as many rows at once as fit the registers. Compiled code calls it by this name.

    If `multiply` enclosed a compiled function instead, Numba's cache would see a new `multiply` at each start.
    """


@overload(multiply_panel, jit_options={"nogil": True}, prefer_literal=True)
def _multiply_panel(form, expanded, w, x, rows, out, out_stride, bounds, segments):
    kind, unpacked, most = form.literal_value, expanded.literal_value, EMIT.rows_at_once
    inputs = LAYOUT[Form(kind)].inputs
    row_bytes, flushes = GROUP_BYTES[inputs], inputs is Inputs.BF16

    def multiply_rows(form, expanded, w, x, rows, out, out_stride, bounds, segments):
        for row in range(0, rows, most):
            left, x_, o = rows - row, x + row * row_bytes, out + row * out_stride
            if left >= 4:
                again = part_of_panel(kind, unpacked, 0, 4, rows, w, x_, o, out_stride, bounds, segments)
            elif left == 3:
                again = part_of_panel(kind, unpacked, 0, 3, rows, w, x_, o, out_stride, bounds, segments)
            elif left == 2:
                again = part_of_panel(kind, unpacked, 0, 2, rows, w, x_, o, out_stride, bounds, segments)
            else:
                again = part_of_panel(kind, unpacked, 0, 1, rows, w, x_, o, out_stride, bounds, segments)
            if flushes and again:
                for m in range(min(left, most)):
                    place = o + m * out_stride
                    part_of_panel(kind, unpacked, 1, 1, rows, w, x_ + m * row_bytes, place, out_stride, bounds, segments)

    return multiply_rows


@cache
def product(form: Form) -> int:
    """Return the address of the compiled product of a form.

    The function takes 64-bit integers: `w`, bytes of a block, blocks; `x`, bytes of a panel of eight rows; rows; `out` and its stride; `bounds`,
    segments; `room`. It writes out[rows, 16 * blocks] = x[rows, K] times the weights of consecutive blocks of 16 outputs.

      w: address of the first block's records.
      x: address of a panel of rows, and the panels after it (`forms.Inputs`).
      out: address of fp32 rows.
      bounds: address of int64 [segments + 1]: the first group of each segment, and the end of the last.
      room: address of `expanded_bytes(K)`.
    """
    kind, layout = int(form), LAYOUT[form]
    expands = int(layout.inputs is Inputs.INT8)
    # With sub-scales, or in 16 registers of 8 lanes, a second block's sums would leave the registers.
    tile_blocks = 1 if layout.scales is Scales.SUB_SCALES or EMIT.rows_at_once < PANEL else TILE_BLOCKS
    panel_group_bytes = PANEL * GROUP_BYTES[layout.inputs]
    in_parts = EMIT.parts_of_panels

    def multiply(w, w_stride, blocks, x, panel_bytes, rows, out, out_stride, bounds, segments, room):
        wide_rows = rows // PANEL * PANEL if rows >= WIDE_FROM else 0
        wide_blocks = blocks // tile_blocks * tile_blocks if wide_rows else 0
        groups = panel_bytes // panel_group_bytes
        for n in range(0, wide_blocks, tile_blocks):
            a, a_stride = w + n * w_stride, w_stride
            if expands:
                a, a_stride = room, groups * EXPANDED_BYTES
                for i in range(tile_blocks):
                    expand(kind, w + (n + i) * w_stride, groups, room + i * a_stride)
            for row in range(0, wide_rows, PANEL):
                x_, o = x + row // PANEL * panel_bytes, out + row * out_stride + 64 * n
                if in_parts:
                    multiply_panel(kind, expands, a, x_, PANEL, o, out_stride, bounds, segments)
                    continue
                tile(kind, expands, PANEL, tile_blocks, a, a_stride, x_, o, out_stride, bounds, segments)
        # The rest: the last rows of these blocks, and all rows of the last blocks.
        row = wide_rows if wide_blocks == blocks else 0
        while row < rows:
            left, first = rows - row, wide_blocks if row < wide_rows else 0
            step, x_ = min(left, PANEL), x + row // PANEL * panel_bytes
            for n in range(first, blocks):
                a, o = w + n * w_stride, out + row * out_stride + 64 * n
                if in_parts:
                    multiply_panel(kind, 0, a, x_, step, o, out_stride, bounds, segments)
                elif step == 8:
                    tile(kind, 0, 8, 1, a, w_stride, x_, o, out_stride, bounds, segments)
                elif step == 7:
                    tile(kind, 0, 7, 1, a, w_stride, x_, o, out_stride, bounds, segments)
                elif step == 6:
                    tile(kind, 0, 6, 1, a, w_stride, x_, o, out_stride, bounds, segments)
                elif step == 5:
                    tile(kind, 0, 5, 1, a, w_stride, x_, o, out_stride, bounds, segments)
                elif step == 4:
                    tile(kind, 0, 4, 1, a, w_stride, x_, o, out_stride, bounds, segments)
                elif step == 3:
                    tile(kind, 0, 3, 1, a, w_stride, x_, o, out_stride, bounds, segments)
                elif step == 2:
                    tile(kind, 0, 2, 1, a, w_stride, x_, o, out_stride, bounds, segments)
                else:
                    tile(kind, 0, 1, 1, a, w_stride, x_, o, out_stride, bounds, segments)
            row += step

    # Each form has its own file in the cache, which does not change when another form is compiled.
    multiply.__qualname__ = f"multiply_{form.name.lower()}"
    return cfunc(types.void(*[types.int64] * _ARGUMENTS), cache=in_use())(multiply).address


@intrinsic
def call_product(_, address, w, w_stride, blocks, x, panel_bytes, rows, out, out_stride, bounds, segments, room):
    """Call the product at an address."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * _ARGUMENTS)
        e.b.call(e.b.inttoptr(args[0], kind.as_pointer()), args[1:])

    return lowered(body, types.void, *[types.int64] * (1 + _ARGUMENTS))


def bounds_of(units: int, groups_a_unit: int) -> npt.NDArray[np.int64]:
    """Return the bounds, in groups, of the segments of a sum over inputs that tensor ranks share: [S + 1].

    Args:
        units: number of indivisible units: KV heads with their queries, or groups.
        groups_a_unit: groups of inputs in each unit.
    """
    return np.array(segment_bounds(units), np.int64) * groups_a_unit
