"""One forward pass as one compiled call: a conductor posts the phases of each layer, the team claims their tasks.

A call a step, not a call an operation: at one row a layer's eight operations take some 70 us, and Python between them would take
as long. What a batch looks like reaches the kernels through arrays of fixed size and address, so that the other threads need no
arguments and no interpreter.

Shapes: T rows, D hidden, HQ query heads, HK key/value heads, HD head dimension, F feed-forward. Strides are bytes.
"""

from __future__ import annotations

from numba import njit

from paceline.backends.cpu import sync
from paceline.backends.cpu.attention import BLOCK, attend, write_key, write_value
from paceline.backends.cpu.gemm import BF16, INT4, gemm, input_bytes, record_bytes
from paceline.backends.cpu.rows import add_into, add_rounded, gate, head_norm, quantize, rms_norm, rotate, round_bf16, widen_bf16

# Places in `sizes` (int64): what never changes.
(HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, EPS, SCALE, FORM, HEAD_FORM, TEAM, BLOCK_STRIDE, LAYER_STRIDE,
 P_STRIDE, SCRATCH_STRIDE, N_SIZES) = range(16)  # fmt: skip

# Places in `weights` [layer, place] (addresses; 0 where a family has no such tensor).
ATTN_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, FFN_NORM, GATE_UP, DOWN, N_WEIGHTS = range(10)

# Places in `edges` (addresses).
FINAL_NORM, HEAD, COS, SIN, N_EDGES = range(5)

# Places in `buffers` (addresses).
(X, X_BF16, H, H_SCALES, Q_BF16, ATT, ATT_SCALES, ACT, ACT_SCALES, KV, TABLES, ROW_POSITION, ROW_TABLE, ROW_LEFT, TILE_ROW, TILE_ROWS,
 HEAD_ROWS, LOGITS, SCRATCH, ZEROS, CONTROL, N_BUFFERS) = range(22)  # fmt: skip

# Places in `batch` (int64): what changes with each batch.
ROWS, N_TILES, TABLE_STRIDE, LOGIT_ROWS, ROWS_A_TASK, HEAD_SPLIT, FIRST_LAYER, STOP_LAYER, N_BATCH = range(9)

# Kinds of phases: by rows, by heads, matrix products.
START, NORM_ATTENTION, NORM_FFN, NORM_HEAD, END, ATTEND, PROJECT_QKV, PROJECT_OUT, GATE, PROJECT_DOWN, PROJECT_HEAD = range(11)
LAST_BY_ROWS = END

LAYERS, HEADS = 0, 1
"""Pieces of work: the layers, X_BF16 to X_BF16; final norm and head of HEAD_ROWS, X_BF16 to LOGITS (fp32 [rows, vocab])."""

CHUNK, HIDDEN_CHUNK = 4, 2
"""Blocks of 16 outputs a task of a matrix product takes; with as many outputs as `hidden`, few enough not to wait for one thread's
last. Of the fused q, k, v product a task takes a head."""

PART = 192
"""Rows a task of a matrix product takes at most: its inputs stay in the second-level cache."""

TILE = 8
"""Rows of one sequence an attention task takes."""


@njit(nogil=True)
def _quantize(form, x, n, at, rows, scales):
    """Quantise `n` bf16 inputs from `x` as inputs `at`, ... of the rows that a product of weights in `form` takes."""
    if form == INT4:
        quantize(8, x, n, rows + at, scales + at // 4)
    else:
        quantize(16, x, n, rows + 2 * at, scales + at // 4)


@njit(nogil=True)
def _place_heads(task, layer, sizes, weights, edges, buffers, batch, scratch):
    """What follows a task of the fused q, k, v product, whose outputs are one head of a part of the rows (fp32, in the scratch).

    Bias, head norm, rotary embedding; a query goes to its row, a key or a value to its block.
    """
    dim, q_heads, kv_heads = sizes[HEAD_DIM], sizes[Q_HEADS], sizes[KV_HEADS]
    n_heads = q_heads + 2 * kv_heads
    head, first = task % n_heads, task // n_heads * PART
    bias = weights[layer, QKV_BIAS]
    is_query, is_value = head < q_heads, head >= q_heads + kv_heads
    norm = 0 if is_value else weights[layer, Q_NORM] if is_query else weights[layer, K_NORM]
    place = scratch + PART * 4 * dim
    pool = buffers[KV] + layer * sizes[LAYER_STRIDE] + (head - q_heads) % kv_heads * 4 * BLOCK * dim
    for m in range(min(PART, batch[ROWS] - first)):
        row, x = first + m, scratch + m * 4 * dim
        position = sync.load_int32(buffers[ROW_POSITION] + 4 * row)
        if bias:
            add_into(x, bias + 4 * dim * head, dim)
        if norm:
            head_norm(x, norm, dim, sizes[EPS])
        out = buffers[Q_BF16] + 2 * dim * (row * q_heads + head) if is_query else place
        if is_value:
            round_bf16(x, dim, out)
        else:
            rotate(x, edges[COS] + position * dim * 2, edges[SIN] + position * dim * 2, dim // 2, out)
        if not is_query:
            table = buffers[TABLES] + sync.load_int32(buffers[ROW_TABLE] + 4 * row) * batch[TABLE_STRIDE]
            block = pool + sync.load_int32(table + 4 * (position // BLOCK)) * sizes[BLOCK_STRIDE]
            if is_value:
                left = sync.load_int32(buffers[ROW_LEFT] + 4 * row)
                write_value(block + 2 * BLOCK * dim, position % BLOCK, left, out, dim, buffers[ZEROS])
            else:
                write_key(block, position % BLOCK, out, dim)


@njit(nogil=True)
def _attend(tile, head, first_head, n_heads, layer, sizes, buffers, batch, scratch):
    """Attention of a tile of rows for `n_heads` query heads from `first_head`, all of KV head `head`."""
    dim, heads = sizes[HEAD_DIM], sizes[Q_HEADS]
    row = sync.load_int32(buffers[TILE_ROW] + 4 * tile)
    rows = sync.load_int32(buffers[TILE_ROWS] + 4 * tile)
    first = sync.load_int32(buffers[ROW_POSITION] + 4 * row)
    table = buffers[TABLES] + sync.load_int32(buffers[ROW_TABLE] + 4 * row) * batch[TABLE_STRIDE]
    keys = buffers[KV] + layer * sizes[LAYER_STRIDE] + head * 4 * BLOCK * dim
    norm = scratch
    weights = scratch + 64
    # One row: its query heads share the keys. Many rows: each head on its own. One call, so that it is compiled once.
    turns, step, count, stride = (1, 0, n_heads, 2 * dim) if rows == 1 else (n_heads, 1, rows, 2 * dim * heads)
    for turn in range(turns):
        # Each query gives its place to what was mixed for it.
        at = buffers[Q_BF16] + 2 * dim * (row * heads + first_head + turn)
        attend(table, keys, sizes[BLOCK_STRIDE], 2 * BLOCK * dim, at, stride, dim, sizes[SCALE],
               first, step, count, weights, sizes[P_STRIDE], norm, at, stride)  # fmt: skip
    if sizes[FORM] != BF16:
        for m in range(rows):
            at = dim * ((row + m) * heads + first_head)
            _quantize(sizes[FORM], buffers[Q_BF16] + 2 * at, dim * n_heads, at, buffers[ATT], buffers[ATT_SCALES])


@njit(nogil=True)
def _project(task, chunk, form, w, n, k, x, scales, rows, out, scratch):
    """One task of a matrix product: `chunk` blocks of outputs from `task % chunks` on, part `task // chunks` of the rows.

    Writes fp32 rows to `out` (rows of all n outputs), or side by side to the scratch where `out` is 0.
    """
    blocks = n // 16
    chunks = (blocks + chunk - 1) // chunk
    block, row = task % chunks * chunk, task // chunks * PART
    count, part = min(chunk, blocks - block), min(PART, rows - row)
    groups = k // 32
    target = out + row * 4 * n + 64 * block if out else scratch
    stride = 4 * n if out else chunk * 64
    x_stride = k * input_bytes(form)
    gemm(form, w + block * groups * record_bytes(form), count, x + row * x_stride, x_stride, scales + row * 8 * groups, 8 * groups,
         part, target, stride, groups)  # fmt: skip


@njit(nogil=True)
def _tasks(n, rows, chunk):
    return (n // 16 + chunk - 1) // chunk * ((rows + PART - 1) // PART)


@njit(nogil=True)
def _add(task, chunk, rows, hidden, x, scratch, rounded):
    """Add a task's outputs to the residual, rounding it to bf16 at a layer's end."""
    blocks = hidden // 16
    chunks = (blocks + chunk - 1) // chunk
    block, row = task % chunks * chunk, task // chunks * PART
    width = 16 * min(chunk, blocks - block)
    for m in range(min(PART, rows - row)):
        target = x + 4 * ((row + m) * hidden + 16 * block)
        if rounded:
            add_rounded(target, scratch + m * chunk * 64, width)
        else:
            add_into(target, scratch + m * chunk * 64, width)


@njit(nogil=True)
def _do_rows(rank, kind, layer, task, sizes, weights, edges, buffers, batch):
    """One task of a phase that goes row by row."""
    scratch = buffers[SCRATCH] + rank * sizes[SCRATCH_STRIDE]
    hidden, rows, per_task = sizes[HIDDEN], batch[ROWS], batch[ROWS_A_TASK]
    first, last = task * per_task, min(rows, (task + 1) * per_task)
    norm = weights[layer, FFN_NORM] if kind == NORM_FFN else weights[layer, ATTN_NORM]
    if kind == NORM_HEAD:
        first, last, norm = task, task + 1, edges[FINAL_NORM]
    for row in range(first, last):
        x, x_bf16 = buffers[X] + 4 * hidden * row, buffers[X_BF16]
        if kind == END:
            round_bf16(x, hidden, x_bf16 + 2 * hidden * row)
            continue
        if kind == START:
            widen_bf16(x_bf16 + 2 * hidden * row, hidden, x)
        elif kind == NORM_HEAD:
            widen_bf16(x_bf16 + 2 * hidden * sync.load_int32(buffers[HEAD_ROWS] + 4 * row), hidden, x)
        form = sizes[HEAD_FORM] if kind == NORM_HEAD else sizes[FORM]
        rms_norm(x, norm, hidden, sizes[EPS], buffers[H] + 2 * hidden * row if form == BF16 else scratch)
        if form != BF16:
            _quantize(form, scratch, hidden, hidden * row, buffers[H], buffers[H_SCALES])


@njit(nogil=True)
def _do_heads(rank, layer, task, sizes, buffers, batch):
    """One task of attention: some query heads of one KV head, over one tile of rows."""
    scratch = buffers[SCRATCH] + rank * sizes[SCRATCH_STRIDE]
    parts = sizes[KV_HEADS] * batch[HEAD_SPLIT]
    part, n_heads = task % parts, sizes[Q_HEADS] // parts
    # The last tile attends to the most keys: begin with it.
    tile = batch[N_TILES] - 1 - task // parts
    _attend(tile, part // batch[HEAD_SPLIT], part * n_heads, n_heads, layer, sizes, buffers, batch, scratch)


@njit(nogil=True)
def _do_product(rank, kind, layer, task, sizes, weights, edges, buffers, batch):
    """One task of a matrix product, and what follows it on its outputs."""
    hidden, ffn, dim, rows = sizes[HIDDEN], sizes[FFN], sizes[HEAD_DIM], batch[ROWS]
    scratch = buffers[SCRATCH] + rank * sizes[SCRATCH_STRIDE]
    form, x, scales, k, out, chunk = sizes[FORM], buffers[H], buffers[H_SCALES], hidden, 0, CHUNK
    if kind == PROJECT_QKV:
        w, n, chunk = weights[layer, QKV], (sizes[Q_HEADS] + 2 * sizes[KV_HEADS]) * dim, dim // 16
    elif kind == PROJECT_OUT:
        x, scales = buffers[Q_BF16] if form == BF16 else buffers[ATT], buffers[ATT_SCALES]
        w, n, k, chunk = weights[layer, OUT], hidden, sizes[Q_HEADS] * dim, HIDDEN_CHUNK
    elif kind == GATE:
        w, n = weights[layer, GATE_UP], 2 * ffn
    elif kind == PROJECT_DOWN:
        w, n, k, x, scales, chunk = weights[layer, DOWN], hidden, ffn, buffers[ACT], buffers[ACT_SCALES], HIDDEN_CHUNK
    else:
        form, w, n, out, rows = sizes[HEAD_FORM], edges[HEAD], sizes[VOCAB], buffers[LOGITS], batch[LOGIT_ROWS]
    _project(task, chunk, form, w, n, k, x, scales, rows, out, scratch)
    if kind == PROJECT_QKV:
        _place_heads(task, layer, sizes, weights, edges, buffers, batch, scratch)
    elif kind == GATE:
        chunks = ffn // 32
        group, row = task % chunks, task // chunks * PART
        for m in range(min(PART, rows - row)):
            at, outputs = (row + m) * ffn + 32 * group, scratch + m * CHUNK * 64
            gate(outputs, buffers[ACT] + 2 * at if form == BF16 else outputs)
            if form != BF16:
                _quantize(form, outputs, 32, at, buffers[ACT], buffers[ACT_SCALES])
    elif kind != PROJECT_HEAD:
        _add(task, chunk, rows, hidden, buffers[X], scratch, kind == PROJECT_DOWN)


@njit(nogil=True)
def take_part(rank, sizes, weights, edges, buffers, batch):
    """Claim and do tasks of the phase posted last until none is left. Returns its word as last seen."""
    control = buffers[CONTROL]
    while True:
        word = sync.load_acquire(control + 8 * sync.PHASE)
        task, count = sync.task_of(word)
        if task >= count:
            return word
        word = sync.fetch_add(control + 8 * sync.PHASE, 1)
        task, count = sync.task_of(word)
        if task < count:
            kind, layer = sync.kind_and_layer(word)
            if kind <= LAST_BY_ROWS:
                _do_rows(rank, kind, layer, task, sizes, weights, edges, buffers, batch)
            elif kind == ATTEND:
                _do_heads(rank, layer, task, sizes, buffers, batch)
            else:
                _do_product(rank, kind, layer, task, sizes, weights, edges, buffers, batch)
            sync.finish(control)


@njit(nogil=True)
def prepare_batch(sizes, batch):
    """Decide how the batch's rows and heads are cut into tasks. Changes no result."""
    rows, tiles, kv_heads = batch[ROWS], batch[N_TILES], sizes[KV_HEADS]
    batch[ROWS_A_TASK] = max(1, min(8, rows // sizes[TEAM]))
    # Few rows: a query head a task keeps the team even. Many: a KV head a task reads its keys once.
    few = tiles * kv_heads < 4 * sizes[TEAM]
    batch[HEAD_SPLIT] = sizes[Q_HEADS] // kv_heads if few else 1


@njit(nogil=True)
def phase(work, position, sizes, batch):
    """(kind, layer, tasks) of the phase at `position` of a piece of work; kind -1 at its end."""
    rows, kv_heads, hidden = batch[ROWS], sizes[KV_HEADS], sizes[HIDDEN]
    if work == HEADS:
        logit_rows = batch[LOGIT_ROWS]
        if position == 0:
            return NORM_HEAD, 0, logit_rows
        return (PROJECT_HEAD, 0, _tasks(sizes[VOCAB], logit_rows, CHUNK)) if position == 1 else (-1, 0, 0)
    row_tasks = (rows + batch[ROWS_A_TASK] - 1) // batch[ROWS_A_TASK]
    layer, at = batch[FIRST_LAYER] + position // 7, position % 7
    if layer == batch[STOP_LAYER]:
        return (END, 0, row_tasks) if at == 0 else (-1, 0, 0)
    if at == 0:
        return (NORM_ATTENTION if position else START), layer, row_tasks
    if at == 1:
        dim = sizes[HEAD_DIM]
        return PROJECT_QKV, layer, _tasks((sizes[Q_HEADS] + 2 * kv_heads) * dim, rows, dim // 16)
    if at == 2:
        return ATTEND, layer, batch[N_TILES] * kv_heads * batch[HEAD_SPLIT]
    if at == 3:
        return PROJECT_OUT, layer, _tasks(hidden, rows, HIDDEN_CHUNK)
    if at == 4:
        return NORM_FFN, layer, row_tasks
    if at == 5:
        return GATE, layer, _tasks(2 * sizes[FFN], rows, CHUNK)
    return PROJECT_DOWN, layer, _tasks(hidden, rows, HIDDEN_CHUNK)
