"""Stores rows of activations for products, panel by panel, and multiplies them with the matrices of a layer."""

from __future__ import annotations

from paceline.backends.compiling import inner
from paceline.backends.cpu.forms import GROUP_BYTES, PANEL, Inputs
from paceline.backends.cpu.places import AT, EIGHT_GROUPS, INPUTS, PRODUCT
from paceline.backends.cpu.products import call_product
from paceline.backends.cpu.rows import deal_bf16, quantize

_INT8, _INT16, _BF16 = int(Inputs.INT8), int(Inputs.INT16), int(Inputs.BF16)
_GROUP_BYTES = tuple(GROUP_BYTES[kind] for kind in Inputs)


@inner
def hold(kinds, x, n, row, column, k, rows, before, place, buffers):
    """Store `n` bf16 activations from `x` as inputs `column`, `column` + 1, ... (of K) of a row, at `place`, in each of `kinds` (bits by `Inputs`).

    Args:
        rows: number of rows that are stored together, among which `row` counts.
        before: number of rows stored before these.
    """
    panel = row // PANEL * PANEL
    high = min(PANEL, rows - panel)
    group = ((before + panel) * k + column * high) // 32 + row - panel
    if kinds & (1 << _INT8):
        quantize(8, x, n, buffers[place + _INT8] + group * _GROUP_BYTES[_INT8], high * _GROUP_BYTES[_INT8])
    if kinds & (1 << _INT16):
        quantize(16, x, n, buffers[place + _INT16] + group * _GROUP_BYTES[_INT16], high * _GROUP_BYTES[_INT16])
    if kinds & (1 << _BF16):
        deal_bf16(x, n, buffers[place + _BF16] + group * _GROUP_BYTES[_BF16], high * _GROUP_BYTES[_BF16])


@inner
def multiply(weights, layer, place, block, blocks, x, k, row, rows, out, out_stride, bounds, segments, buffers, expanded):
    """Compute out[rows, 16 * blocks] = rows of the activations at `x` (K inputs), from `row` on, times `blocks` blocks of a matrix, from `block` on.

    `row` is the first of a panel. `expanded`: address of scratch for unpacked weights.
    """
    kind, stride = weights[layer, place, INPUTS], k // 32 * weights[layer, place, EIGHT_GROUPS] // 8
    row_bytes = k // 32 * _GROUP_BYTES[kind]
    call_product(weights[layer, place, PRODUCT], weights[layer, place, AT] + block * stride, stride, blocks, buffers[x + kind] + row * row_bytes,
                 PANEL * row_bytes, rows, out, out_stride, bounds, segments, expanded)  # fmt: skip
