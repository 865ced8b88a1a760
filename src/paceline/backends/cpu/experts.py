"""Mixture of experts: choose each row's experts, bring the rows of each expert together, compute their products, and sum their outputs.

An expert's weights are read once for `PART` rows of a batch, and not at all if no row chose it. The rows of an expert are stored together, in their
order, like a batch of their own. So the other rows of an expert change no byte of a row. docs/internals/arithmetic.md defines the results.

Shapes: T rows, E experts, K of them for each row, D hidden, F an expert's width. The matrices of all experts are contiguous, like one matrix of E x F
or E x D outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.compiling import inner
from paceline.backends.cpu import sync
from paceline.backends.cpu.forms import GROUP_BYTES, PANEL, Inputs
from paceline.backends.cpu.lowering import lowered, read, read_float, write, write_float
from paceline.backends.cpu.panels import hold, multiply
from paceline.backends.cpu.phases import EXPERTS_DOWN, EXPERTS_GATE, chunks_of
from paceline.backends.cpu.places import (
    ACT,
    ACTIVATION,
    AT,
    CHOICES,
    COUNTS,
    DOWN,
    DOWN_BIAS,
    EXPANDED,
    EXPERT_BOUNDS,
    EXPERT_OUT,
    EXPERT_PARTS,
    EXPERT_ROWS,
    EXPERT_SEGMENT,
    EXPERT_WIDTH,
    EXPERTS,
    GATE,
    GATE_BIAS,
    HIDDEN,
    INPUTS,
    N_EXPERT_PARTS,
    NORMED_SHARES,
    PLACED,
    ROUTED,
    ROUTER,
    ROUTER_BIAS,
    ROWS,
    SHARES,
    TOP_K,
    UP,
    UP_BIAS,
    WHOLE_BOUNDS,
    H,
)  # fmt: skip
from paceline.backends.cpu.rows import add_into, open_gate
from paceline.backends.cpu.shares import LANES, MOST_SEGMENTS
from paceline.backends.cpu.simd import I32, I64, Emit, F, Value
from paceline.backends.cpu.sizes import CHUNK, PART

# Places in an expert's row of COUNTS (int32): the first of its rows, their number, the place of the next one. Then places in a row of EXPERT_PARTS: the
# expert, the first of its rows, the first row of the part counted from there, the number of the expert's rows.
_FIRST, _COUNT, _NEXT, N_COUNT = range(4)
_EXPERT, _BEFORE, _ROW, _N_ROWS, N_PART = range(5)


@intrinsic
def _exponentials(_, x, top, n, out):
    """Compute out = exp2((x - top) * log2(e)): fp32 [n], with n rounded up to whole vectors."""

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, top, n, out = args
        top = e.splat(top, F)
        with e.loop(e.b.lshr(e.b.add(n, e.i64(LANES - 1)), e.i64(4))) as i:
            at = e.mul(i, 64)
            e.store(e.exp2(e.b.fmul(e.b.fsub(e.load(F, x, at), top), e.const(1.44269504))), out, at)

    return lowered(body, types.void, types.int64, types.float32, types.int64, types.int64)


@intrinsic(prefer_literal=True)
def _deal(_, n_bytes, x, x_apart, out, out_apart, n):
    """Copy `n` groups of `n_bytes` bytes. Consecutive groups are `x_apart` and `out_apart` bytes apart."""
    kind = ir.IntType(8 * n_bytes.literal_value)

    def body(e: Emit, args: Sequence[Value]) -> None:
        x, x_apart, out, out_apart, n = args
        with e.loop(n) as i:
            e.store(e.load(kind, x, e.b.mul(i, x_apart), align=4), out, e.b.mul(i, out_apart), align=4)

    return lowered(body, types.void, n_bytes, *[types.int64] * 5)


@intrinsic
def _mix(_, outputs, hidden, k, places, shares, choices, segment_of, out):
    """Compute out = the sum of a row's experts' outputs times their shares, fp32 [hidden].

    Each segment's sum is in the order of experts, and segments are added in their tree.
    """

    def body(e: Emit, args: Sequence[Value]) -> None:
        outputs, hidden, k, places, shares, choices, segment_of, out = args
        b = e.b
        slots = b.ptrtoint(e.var(ir.Constant(ir.ArrayType(F, MOST_SEGMENTS), None)), I64)
        with e.loop(b.lshr(hidden, e.i64(4))) as i:
            for segment in range(MOST_SEGMENTS):
                e.store(e.const(0.0), slots, 64 * segment, align=64)
            with e.loop(k) as j:
                at = e.mul(j, 4)
                expert, place = (b.sext(e.load(I32, table, at, align=4), I64) for table in (choices, places))
                segment = b.sext(e.load(I32, segment_of, e.mul(expert, 4), align=4), I64)
                output = e.load(F, outputs, e.mul(b.add(b.mul(place, hidden), e.mul(i, LANES)), 4))
                slot = e.mul(segment, 64)
                e.store(e.fma(e.load_splat(shares, at), output, e.load(F, slots, slot, align=64)), slots, slot, align=64)
            sums = [e.load(F, slots, 64 * segment, align=64) for segment in range(MOST_SEGMENTS)]
            while len(sums) > 1:
                sums = [b.fadd(left, right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
            e.store(sums[0], out, e.mul(i, 64))

    return lowered(body, types.void, *[types.int64] * 8)


@inner
def _is_among(expert, choices, count):
    for j in range(count):  # noqa: SIM110 - compiled
        if read(32, choices + 4 * j) == expert:
            return True
    return False


@inner
def choose(logits, weights, experts, k, normed, choices, shares):
    """Choose the K experts of a row with the largest logits (of equal ones, the first), and compute their shares. Experts are written in their order.

    Args:
        logits: address of fp32 [E], which are overwritten. `weights`: address of as much scratch. Both are padded to whole vectors.
        choices: address for int32 [K]. `shares`: address for fp32 [K].
    """
    lowest = np.float32(-np.inf)
    top = lowest
    for expert in range(experts):
        value = read_float(logits + 4 * expert)
        top = max(top, value)
    _exponentials(logits, top, experts, weights)
    for j in range(k):
        best, largest = -1, lowest
        for expert in range(experts):
            value = read_float(logits + 4 * expert)
            if value > largest:
                best, largest = expert, value
        if best < 0:  # all other logits are NaN or minus infinity
            best = 0
            while _is_among(best, choices, j):
                best += 1
        write_float(logits + 4 * best, lowest)
        at = j
        while at > 0 and read(32, choices + 4 * (at - 1)) > best:
            write(32, choices + 4 * at, read(32, choices + 4 * (at - 1)))
            at -= 1
        write(32, choices + 4 * at, best)
    total = np.float32(0)
    for j in range(k if normed else experts):
        total += read_float(weights + 4 * (read(32, choices + 4 * j) if normed else j))
    for j in range(k):
        write_float(shares + 4 * j, read_float(weights + 4 * read(32, choices + 4 * j)) / total)


@inner
def _bring_together(sizes, buffers, batch):
    """Assign each row of each expert its place, and cut the experts' rows into parts."""
    experts, n, counts = sizes[EXPERTS], batch[ROWS] * sizes[TOP_K], buffers[COUNTS]
    for expert in range(experts):
        write(32, counts + 4 * (N_COUNT * expert + _COUNT), 0)
    for i in range(n):
        count = counts + 4 * (N_COUNT * read(32, buffers[CHOICES] + 4 * i) + _COUNT)
        write(32, count, read(32, count) + 1)
    before, parts = 0, 0
    for expert in range(experts):
        place = counts + 4 * N_COUNT * expert
        rows = read(32, place + 4 * _COUNT)
        write(32, place + 4 * _FIRST, before)
        write(32, place + 4 * _NEXT, before)
        for row in range(0, rows, PART):
            part = buffers[EXPERT_PARTS] + 4 * N_PART * parts
            write(32, part + 4 * _EXPERT, expert)
            write(32, part + 4 * _BEFORE, before)
            write(32, part + 4 * _ROW, row)
            write(32, part + 4 * _N_ROWS, rows)
            parts += 1
        before += rows
    for i in range(n):
        place = counts + 4 * (N_COUNT * read(32, buffers[CHOICES] + 4 * i) + _NEXT)
        at = read(32, place)
        write(32, buffers[PLACED] + 4 * i, at)
        write(32, place, at + 1)
    batch[N_EXPERT_PARTS] = parts


@inner
def route(task, layer, sizes, weights, buffers, batch, scratch):
    """Choose the experts of a panel of rows. The task that ends last brings the rows of each expert together."""
    experts, k, row = sizes[EXPERTS], sizes[TOP_K], task * PANEL
    blocks, rows = (experts + LANES - 1) // LANES, min(PANEL, batch[ROWS] - row)
    multiply(weights, layer, ROUTER, 0, blocks, H, sizes[HIDDEN], row, rows, scratch, 64 * blocks, buffers[WHOLE_BOUNDS], 1, buffers,
             scratch + sizes[EXPANDED])  # fmt: skip
    for m in range(rows):
        at = 4 * k * (row + m)
        if weights[layer, ROUTER_BIAS, AT]:
            add_into(scratch + 64 * blocks * m, weights[layer, ROUTER_BIAS, AT], LANES * blocks)
        choose(
            scratch + 64 * blocks * m,
            scratch + 64 * blocks * PANEL,
            experts,
            k,
            sizes[NORMED_SHARES],
            buffers[CHOICES] + at,
            buffers[SHARES] + at,
        )
    if sync.fetch_add(buffers[ROUTED], 1) == (batch[ROWS] + PANEL - 1) // PANEL - 1:
        sync.store_release(buffers[ROUTED], 0)
        _bring_together(sizes, buffers, batch)


_INT8, _INT16, _BF16 = (int(kind) for kind in Inputs)
_INT8_BYTES, _INT16_BYTES, _BF16_BYTES = (GROUP_BYTES[kind] for kind in Inputs)


@inner
def gather(row, layer, sizes, weights, buffers, batch):
    """Copy a row's activations to its place in each of its experts."""
    k, groups = sizes[TOP_K], sizes[HIDDEN] // 32
    kinds = 1 << weights[layer, GATE, INPUTS] | 1 << weights[layer, UP, INPUTS]
    panel = row // PANEL * PANEL
    high = min(PANEL, batch[ROWS] - panel)
    source = panel * groups + row - panel
    for i in range(k * row, k * row + k):
        count = buffers[COUNTS] + 4 * N_COUNT * read(32, buffers[CHOICES] + 4 * i)
        first, rows = read(32, count + 4 * _FIRST), read(32, count + 4 * _COUNT)
        own = read(32, buffers[PLACED] + 4 * i) - first
        own_panel = own // PANEL * PANEL
        own_high = min(PANEL, rows - own_panel)
        target = (first + own_panel) * groups + own - own_panel
        if kinds & (1 << _INT8):
            _deal(_INT8_BYTES, buffers[H + _INT8] + source * _INT8_BYTES, high * _INT8_BYTES,
                  buffers[EXPERT_ROWS + _INT8] + target * _INT8_BYTES, own_high * _INT8_BYTES, groups)  # fmt: skip
        if kinds & (1 << _INT16):
            _deal(_INT16_BYTES, buffers[H + _INT16] + source * _INT16_BYTES, high * _INT16_BYTES,
                  buffers[EXPERT_ROWS + _INT16] + target * _INT16_BYTES, own_high * _INT16_BYTES, groups)  # fmt: skip
        if kinds & (1 << _BF16):
            _deal(_BF16_BYTES, buffers[H + _BF16] + source * _BF16_BYTES, high * _BF16_BYTES,
                  buffers[EXPERT_ROWS + _BF16] + target * _BF16_BYTES, own_high * _BF16_BYTES, groups)  # fmt: skip


@inner
def project(unit, down, layer, sizes, weights, buffers, scratch):
    """Compute one chunk of an expert's outputs for a part of its rows: its inner activations, or with `down` its final outputs."""
    hidden, width, chunks = sizes[HIDDEN], sizes[EXPERT_WIDTH], chunks_of(EXPERTS_DOWN if down else EXPERTS_GATE, sizes)
    part, block = buffers[EXPERT_PARTS] + 4 * N_PART * (unit // chunks), unit % chunks * CHUNK
    expert, before, row, n_rows = (
        read(32, part + 4 * _EXPERT),
        read(32, part + 4 * _BEFORE),
        read(32, part + 4 * _ROW),
        read(32, part + 4 * _N_ROWS),
    )
    first, rows, room = before + row, min(PART, n_rows - row), scratch + sizes[EXPANDED]
    if down:
        blocks, out = min(CHUNK, hidden // LANES - block), buffers[EXPERT_OUT] + 4 * (first * hidden + LANES * block)
        multiply(weights, layer, DOWN, expert * hidden // LANES + block, blocks, ACT, width, first, rows, out, 4 * hidden, buffers[EXPERT_BOUNDS], 1,
                 buffers, room)  # fmt: skip
        for m in range(rows if weights[layer, DOWN_BIAS, AT] else 0):
            add_into(out + 4 * hidden * m, weights[layer, DOWN_BIAS, AT] + 4 * (expert * hidden + LANES * block), LANES * blocks)
        return
    for i in range(2):
        multiply(weights, layer, UP if i else GATE, expert * width // LANES + block, CHUNK, EXPERT_ROWS, hidden, first, rows, scratch + 128 * i, 256,
                 buffers[WHOLE_BOUNDS], 1, buffers, room)  # fmt: skip
    at = 4 * (expert * width + LANES * block)
    for m in range(rows):
        outputs = scratch + 256 * m
        if weights[layer, GATE_BIAS, AT]:
            add_into(outputs, weights[layer, GATE_BIAS, AT] + at, 32)
            add_into(outputs + 128, weights[layer, UP_BIAS, AT] + at, 32)
        open_gate(sizes[ACTIVATION], outputs)
        hold(1 << weights[layer, DOWN, INPUTS], outputs, 32, row + m, LANES * block, width, n_rows, before, ACT, buffers)


@inner
def mix(row, sizes, buffers, out):
    """Write the weighted sum of the outputs of a row's experts to `out`, fp32 [D]."""
    at, k = 4 * sizes[TOP_K] * row, sizes[TOP_K]
    _mix(
        buffers[EXPERT_OUT],
        sizes[HIDDEN],
        k,
        buffers[PLACED] + at,
        buffers[SHARES] + at,
        buffers[CHOICES] + at,
        buffers[EXPERT_SEGMENT],
        out,
    )
