"""One forward pass as one compiled call: a conductor posts the phases of each layer, the team claims their tasks.

A call a step, not a call an operation: at one row a layer's eight operations take some 70 us, and Python between them would take
as long. What a batch looks like reaches the kernels through arrays of fixed size and address, so that the other threads need no
arguments and no interpreter.

A rank of a tensor group (`shares`) runs the same phases over its share of heads, inner activations and outputs. At the end of a sum that ranks share it
leaves partial sums where all see them, waits for the others' (`_meet`), and what comes next begins by adding all of them, row by row (`_add_partials`).

Shapes: T rows, D hidden, HQ query heads, HK key/value heads, HD head dimension, F feed-forward: of the rank's share. Strides are bytes.
"""

from __future__ import annotations

from paceline.backends.compiling import inner
from paceline.backends.cpu import experts, sync
from paceline.backends.cpu.attention import attend, finish, record_bytes, scratch_bytes
from paceline.backends.cpu.heads import norm_heads, norm_low, project_head, project_low
from paceline.backends.cpu.panels import hold, multiply
from paceline.backends.cpu.phases import (
    END,
    EXPERTS_DOWN,
    GATHER,
    HEAD_CHUNK,
    NORM_ATTENTION,
    NORM_FFN,
    NORM_HEAD,
    NORM_HEADS,
    NORM_LOW,
    PROJECT_DOWN,
    PROJECT_GATE,
    PROJECT_HEAD,
    PROJECT_LOW,
    PROJECT_QKV,
    ROUTE,
    START,
    chunks_a_task,
    chunks_of,
)
from paceline.backends.cpu.places import (
    ACT,
    ACTIVATION,
    ADDED,
    ARRIVED,
    AT,
    ATT,
    ATTN_NORM,
    ATTN_OUT_NORM,
    BLOCK_STRIDE,
    DOWN,
    DOWN_BOUNDS,
    DOWN_FROM,
    DOWN_INPUTS,
    DOWN_JOINS,
    DOWN_PARTS,
    DOWN_SEGMENTS,
    EPS,
    EXCHANGE,
    EXPANDED,
    EXPERTS,
    FFN,
    FFN_NORM,
    FFN_OUT_NORM,
    FINAL_NORM,
    FIRST_LAYER,
    GATE,
    HEAD,
    HEAD_DIM,
    HEAD_ROWS,
    HEAD_SPLIT,
    HEAD_STRIDE,
    HIDDEN,
    INPUTS,
    KV,
    KV_HEADS,
    KV_LOW,
    LAYER_STRIDE,
    LOGIT_ROWS,
    LOGITS,
    LOGITS_SCALE,
    LOGITS_STRIDE,
    LOW,
    N_EXPERT_PARTS,
    N_PIECES,
    OUT,
    OUT_BIAS,
    OUT_BOUNDS,
    OUT_FROM,
    OUT_INPUTS,
    OUT_JOINS,
    OUT_PARTS,
    OUT_SEGMENTS,
    PIECES,
    Q_BF16,
    Q_HEADS,
    Q_LOW,
    RANK,
    RANKS,
    RECORDS,
    RESIDUAL_SCALE,
    ROUTER,
    ROW_POSITION,
    ROW_TABLE,
    ROWS,
    ROWS_A_TASK,
    SCALE,
    SCRATCH,
    SCRATCH_STRIDE,
    SINKS,
    STOP_LAYER,
    TABLE_STRIDE,
    TABLES,
    TEAM,
    UNFINISHED,
    UP,
    VALUE_DIM,
    VOCAB,
    WATCH,
    WHOLE_BOUNDS,
    WINDOW,
    X_BF16,
    H,
    K,
    Q,
    V,
    X,
)
from paceline.backends.cpu.rows import (
    add,
    add_into,
    add_normed,
    add_scaled,
    multiply_by,
    open_gate,
    rms_norm,
    round_bf16,
    widen_bf16,
)
from paceline.backends.cpu.sizes import (
    CHUNK,
    N_PIECE,
    PART,
    PIECE_OF,
    PIECE_RECORDS,
    PIECE_ROW,
    PIECE_ROWS,
    PIECE_START,
    PIECE_STOP,
    PIECE_TILE,
    SEGMENT,
)

SPINS_BEFORE_YIELD = 200
"""Spins of a rank that waits for others, a few microseconds. Raising it: each exchange waits longer on a core that also runs other ranks, or the thread
that sends a rank's sums to another host."""


@inner
def _attend(piece, head, first_head, n_heads, layer, sizes, weights, buffers, batch, scratch):
    """A piece of attention for `n_heads` query heads from `first_head`, all of KV head `head`. The last piece of a tile finishes it."""
    dim, value_dim, heads = sizes[HEAD_DIM], sizes[VALUE_DIM], sizes[Q_HEADS]
    place = buffers[PIECES] + 4 * N_PIECE * piece
    row, rows = sync.load_int32(place + 4 * PIECE_ROW), sync.load_int32(place + 4 * PIECE_ROWS)
    start, stop = sync.load_int32(place + 4 * PIECE_START), sync.load_int32(place + 4 * PIECE_STOP)
    pieces, before = sync.load_int32(place + 4 * PIECE_OF), sync.load_int32(place + 4 * PIECE_RECORDS)
    first, window = sync.load_int32(buffers[ROW_POSITION] + 4 * row), weights[layer, WINDOW, AT]
    table = buffers[TABLES] + sync.load_int32(buffers[ROW_TABLE] + 4 * row) * batch[TABLE_STRIDE]
    keys = buffers[KV] + layer * sizes[LAYER_STRIDE] + head * sizes[HEAD_STRIDE]
    # Each query gives its place to what was mixed for it.
    stride, at = 2 * dim * heads, buffers[Q_BF16] + 2 * dim * (row * heads + first_head)
    apart, records = 0, scratch + scratch_bytes(rows * n_heads, value_dim) - rows * n_heads * record_bytes(value_dim)
    if pieces > 1:
        apart = (first + rows - 1) // SEGMENT + 1
        records = buffers[RECORDS] + (before * heads + first_head * rows * apart) * record_bytes(value_dim)
    attend(table, keys, sizes[BLOCK_STRIDE], at, stride, n_heads, rows, first, window, dim, value_dim, sizes[SCALE], start, stop, records,
           apart, scratch)  # fmt: skip
    if pieces > 1:
        unfinished = buffers[UNFINISHED] + 8 * (sync.load_int32(place + 4 * PIECE_TILE) * heads + first_head)
        if sync.fetch_add(unfinished, 1) < pieces - 1:
            return
        sync.store_release(unfinished, 0)
    sinks = weights[layer, SINKS, AT]
    finish(
        rows, n_heads, first, window, value_dim, records, apart, at, stride, sinks + first_head * record_bytes(value_dim) if sinks else 0
    )
    for m in range(rows):
        hold(
            1 << weights[layer, OUT, INPUTS],
            at + m * stride,
            value_dim * n_heads,
            row + m,
            sizes[OUT_FROM] + value_dim * first_head,
            sizes[OUT_INPUTS],
            batch[ROWS],
            0,
            ATT,
            buffers,
        )


@inner
def _add(block, blocks, row, part, x, sizes, scratch, rounded):
    """Add a task's outputs to the residual, rounding it to bf16 at a layer's end."""
    for m in range(part):
        target = x + 4 * ((row + m) * sizes[HIDDEN] + 16 * block)
        if rounded:
            add_scaled(1, target, scratch + m * CHUNK * 64, 16 * blocks, sizes[RESIDUAL_SCALE])
        else:
            add_scaled(0, target, scratch + m * CHUNK * 64, 16 * blocks, sizes[RESIDUAL_SCALE])


@inner
def _multiply_parts(weights, layer, place, block, blocks, x, k, row, rows, parts, sizes, buffers, scratch):
    """A task's outputs, each of this rank's partial sums for itself, where all ranks see them.

    The parts are int64: how many; then of each the bounds of its segments, how many segments, and where its rows go, [parts, 3]. What is there is read
    before the exchange after the next one, which is the first to write there again.
    """
    stride = 4 * sizes[HIDDEN]
    for i in range(sync.load_acquire(parts)):
        part = parts + 8 + 24 * i
        bounds, segments = sync.load_acquire(part), sync.load_acquire(part + 8)
        out = sync.load_acquire(part + 16) + stride * row + 64 * block
        multiply(weights, layer, place, block, blocks, x, k, row, rows, out, stride, bounds, segments, buffers, scratch + sizes[EXPANDED])


@inner
def _add_partials(row, down, sizes, buffers, scratch):
    """Add all ranks' partial sums of a row, as the tree of segments does. Returns where the sum is, which others may read too.

    The joins are int64: how many sums and steps there are; where the rows of each sum are; then of each step the number of the left one, of the
    right one, and of the place in the scratch where their sum goes, [steps, 3]. Numbers after the sums' are places.
    """
    joins, hidden = buffers[DOWN_JOINS if down else OUT_JOINS], sizes[HIDDEN]
    sums, steps, at = sync.load_acquire(joins), sync.load_acquire(joins + 8), 4 * hidden * row
    total = sync.load_acquire(joins + 16) + at
    for i in range(steps):
        step = joins + 16 + 8 * sums + 24 * i
        left, right, place = sync.load_acquire(step), sync.load_acquire(step + 8), sync.load_acquire(step + 16)
        total = scratch + 4 * hidden * place
        add(total, _sum_at(left, joins, sums, at, hidden, scratch), _sum_at(right, joins, sums, at, hidden, scratch), hidden)
    return total


@inner
def _end_half(row, down, layer, sizes, weights, buffers, scratch):
    """Add to a row's residual what attention (`down`: feed-forward) gave, where tasks of its product could not: all ranks' sums, and what is normed first."""
    norm, hidden = weights[layer, FFN_OUT_NORM if down else ATTN_OUT_NORM, AT], sizes[HIDDEN]
    mixed = down and sizes[EXPERTS] > 0
    if sizes[RANKS] == 1 and not norm and not mixed:
        return
    x, eps, scale = buffers[X] + 4 * hidden * row, sizes[EPS], sizes[RESIDUAL_SCALE]
    if mixed:
        added = scratch
        experts.mix(row, sizes, buffers, added)
    else:
        added = _add_partials(row, down, sizes, buffers, scratch) if sizes[RANKS] > 1 else buffers[ADDED] + 4 * hidden * row
    if norm and down:
        add_normed(1, x, added, norm, hidden, eps, scale)
    elif norm:
        add_normed(0, x, added, norm, hidden, eps, scale)
    elif down:
        add_scaled(1, x, added, hidden, scale)
    else:
        add_scaled(0, x, added, hidden, scale)


@inner
def _sum_at(number, joins, sums, at, hidden, scratch):
    """Address of a row of a sum, by its number."""
    if number < sums:
        return sync.load_acquire(joins + 16 + 8 * number) + at
    return scratch + 4 * hidden * (number - sums)


@inner
def do_rows(rank, kind, layer, task, sizes, weights, buffers, batch):
    """One task of a phase that goes row by row."""
    scratch = buffers[SCRATCH] + rank * sizes[SCRATCH_STRIDE]
    hidden, rows, per_task = sizes[HIDDEN], batch[ROWS], batch[ROWS_A_TASK]
    first, last = task * per_task, min(rows, (task + 1) * per_task)
    if kind == NORM_HEAD:
        first, last, norm, kinds = task, task + 1, FINAL_NORM, 1 << weights[layer, HEAD, INPUTS]
        rows = batch[LOGIT_ROWS]
    elif kind == NORM_FFN:
        norm, kinds = FFN_NORM, 1 << weights[layer, GATE, INPUTS] | 1 << weights[layer, UP, INPUTS]
        if sizes[EXPERTS]:
            kinds |= 1 << weights[layer, ROUTER, INPUTS]
    else:
        norm, kinds = ATTN_NORM, 1 << weights[layer, Q, INPUTS] | 1 << weights[layer, K, INPUTS] | 1 << weights[layer, V, INPUTS]
        if sizes[LOW]:
            kinds = 1 << weights[layer, Q_LOW, INPUTS] | 1 << weights[layer, KV_LOW, INPUTS]
    for row in range(first, last):
        if kind == NORM_HEADS:
            norm_heads(row, layer, sizes, weights, buffers, batch, scratch)
            continue
        if kind == NORM_LOW:
            norm_low(row, layer, sizes, weights, buffers, rows, scratch)
            continue
        x, x_bf16 = buffers[X] + 4 * hidden * row, buffers[X_BF16]
        if batch[STOP_LAYER] > batch[FIRST_LAYER] and kind in (NORM_ATTENTION, NORM_FFN, END):
            _end_half(row, kind != NORM_FFN, layer if kind == NORM_FFN else layer - 1, sizes, weights, buffers, scratch)
        if kind == END:
            round_bf16(x, hidden, x_bf16 + 2 * hidden * row)
            continue
        if kind == START:
            widen_bf16(x_bf16 + 2 * hidden * row, hidden, x)
        elif kind == NORM_HEAD:
            widen_bf16(x_bf16 + 2 * hidden * sync.load_int32(buffers[HEAD_ROWS] + 4 * row), hidden, x)
        if weights[layer, norm, AT]:
            rms_norm(x, weights[layer, norm, AT], hidden, sizes[EPS], scratch)
        else:
            round_bf16(x, hidden, scratch)
        hold(kinds, scratch, hidden, row, 0, hidden, rows, 0, H, buffers)


@inner
def do_heads(rank, kind, layer, task, sizes, weights, buffers, batch):
    """One task of attention: some query heads of one KV head, over one piece."""
    scratch = buffers[SCRATCH] + rank * sizes[SCRATCH_STRIDE]
    parts = sizes[KV_HEADS] * batch[HEAD_SPLIT]
    part, n_heads = task % parts, sizes[Q_HEADS] // parts
    # The last piece attends to the most keys: begin with it.
    piece = batch[N_PIECES] - 1 - task // parts
    _attend(piece, part // batch[HEAD_SPLIT], part * n_heads, n_heads, layer, sizes, weights, buffers, batch, scratch)


@inner
def _project_gate(block, row, part, layer, sizes, weights, buffers, batch, scratch):
    """One group of the feed-forward's inner activations: gate and up, side by side in the scratch, and what becomes of them."""
    hidden = sizes[HIDDEN]
    for i in range(2):
        multiply(weights, layer, UP if i else GATE, block, 2, H, hidden, row, part, scratch + 128 * i, 256, buffers[WHOLE_BOUNDS], 1,
                  buffers, scratch + sizes[EXPANDED])  # fmt: skip
    for m in range(part):
        outputs = scratch + 256 * m
        open_gate(sizes[ACTIVATION], outputs)
        hold(1 << weights[layer, DOWN, INPUTS], outputs, 32, row + m, sizes[DOWN_FROM] + 16 * block, sizes[DOWN_INPUTS], batch[ROWS], 0, ACT,
              buffers)  # fmt: skip


@inner
def do_products(rank, kind, layer, task, sizes, weights, buffers, batch):
    """One task of a matrix product: its chunks, one after the other."""
    chunks = chunks_of(kind, sizes)
    many = chunks_a_task(chunks, batch[LOGIT_ROWS] if kind == PROJECT_HEAD else batch[ROWS], sizes[TEAM])
    tasks = (chunks + many - 1) // many
    part, first = task // tasks * chunks, task % tasks * many
    for chunk in range(first, min(first + many, chunks)):
        _do_product(rank, kind, layer, part + chunk, sizes, weights, buffers, batch)


@inner
def _do_product(rank, kind, layer, task, sizes, weights, buffers, batch):
    """One chunk of a matrix product, and what follows it on its outputs."""
    hidden, ffn, rows = sizes[HIDDEN], sizes[FFN], batch[LOGIT_ROWS] if kind == PROJECT_HEAD else batch[ROWS]
    scratch = buffers[SCRATCH] + rank * sizes[SCRATCH_STRIDE]
    if kind == PROJECT_QKV:
        project_head(task, layer, sizes, weights, buffers, batch, scratch)
        return
    n = sizes[VOCAB] if kind == PROJECT_HEAD else ffn if kind == PROJECT_GATE else sizes[LOW] if kind == PROJECT_LOW else hidden
    chunk = HEAD_CHUNK if kind == PROJECT_HEAD else CHUNK
    chunks = (n // 16 + chunk - 1) // chunk
    block, row = task % chunks * chunk, task // chunks * PART
    blocks, part = min(chunk, n // 16 - block), min(PART, rows - row)
    if kind == PROJECT_HEAD:
        out = buffers[LOGITS] + sizes[LOGITS_STRIDE] * row + 64 * block
        multiply(weights, layer, HEAD, block, blocks, H, hidden, row, part, out, sizes[LOGITS_STRIDE], buffers[WHOLE_BOUNDS], 1, buffers,
                  scratch + sizes[EXPANDED])  # fmt: skip
        for m in range(part if sizes[LOGITS_SCALE] else 0):
            multiply_by(out + m * sizes[LOGITS_STRIDE], 16 * blocks, sizes[LOGITS_SCALE])
    elif kind == PROJECT_LOW:
        project_low(block, blocks, row, part, layer, sizes, weights, buffers, scratch)
    elif kind == PROJECT_GATE:
        _project_gate(block, row, part, layer, sizes, weights, buffers, batch, scratch)
    else:
        # Sums over inputs that tensor ranks share: in segments.
        down = kind == PROJECT_DOWN
        place, x, k = (DOWN, ACT, sizes[DOWN_INPUTS]) if down else (OUT, ATT, sizes[OUT_INPUTS])
        if sizes[RANKS] > 1:
            parts = buffers[DOWN_PARTS if down else OUT_PARTS]
            _multiply_parts(weights, layer, place, block, blocks, x, k, row, part, parts, sizes, buffers, scratch)
            return
        bounds, segments = (buffers[DOWN_BOUNDS], sizes[DOWN_SEGMENTS]) if down else (buffers[OUT_BOUNDS], sizes[OUT_SEGMENTS])
        normed = weights[layer, FFN_OUT_NORM if down else ATTN_OUT_NORM, AT] != 0
        out, stride = (buffers[ADDED] + 4 * (row * hidden + 16 * block), 4 * hidden) if normed else (scratch, CHUNK * 64)
        multiply(weights, layer, place, block, blocks, x, k, row, part, out, stride, bounds, segments, buffers,
                  scratch + sizes[EXPANDED])  # fmt: skip
        if not down and weights[layer, OUT_BIAS, AT]:
            for m in range(part):
                add_into(out + m * stride, weights[layer, OUT_BIAS, AT] + 64 * block, 16 * blocks)
        if not normed:
            _add(block, blocks, row, part, buffers[X], sizes, scratch, down)


@inner
def do_experts(rank, kind, layer, task, sizes, weights, buffers, batch):
    """One task of a phase of a mixture's feed-forward."""
    scratch, rows = buffers[SCRATCH] + rank * sizes[SCRATCH_STRIDE], batch[ROWS]
    if kind == ROUTE:
        experts.route(task, layer, sizes, weights, buffers, batch, scratch)
    elif kind == GATHER:
        for row in range(task * batch[ROWS_A_TASK], min(rows, (task + 1) * batch[ROWS_A_TASK])):
            experts.gather(row, layer, sizes, weights, buffers, batch)
    else:
        units = batch[N_EXPERT_PARTS] * chunks_of(kind, sizes)
        many = chunks_a_task(units, rows, sizes[TEAM])
        for unit in range(task * many, min(units, (task + 1) * many)):
            experts.project(unit, kind == EXPERTS_DOWN, layer, sizes, weights, buffers, scratch)


@inner
def meet(sizes, buffers, batch):
    """Say that this rank's part of an exchange is there, and wait for the other ranks'. Returns whether all are; False: the batch was given up, by
    this process or (the word behind all ranks') by another.
    """
    reached, arrived = batch[EXCHANGE], buffers[ARRIVED]
    given_up = arrived + 8 * sync.WORD * sizes[RANKS]
    crowded = sync.load_acquire(given_up + 8)
    sync.store_release(arrived + 8 * sync.WORD * sizes[RANK], reached)
    if crowded:
        sync.wake_at(arrived + 8 * sync.WORD * sizes[RANK])
    for rank in range(sizes[RANKS]):
        spins, word = 0, arrived + 8 * sync.WORD * rank
        while True:
            seen = sync.load_acquire(word)
            if seen >= reached:
                break
            if sync.load_acquire(given_up) or (batch[WATCH] and sync.load_acquire(batch[WATCH])):
                return False
            spins += 1
            if crowded:
                sync.sleep_at(word, seen)
            elif spins > SPINS_BEFORE_YIELD:
                sync.give_way()
            else:
                sync.pause()
    return True
