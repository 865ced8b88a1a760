"""One forward pass as one compiled call: a conductor posts the phases of each layer, the team claims their tasks.

A call a step, not a call an operation: at one row a layer's eight operations take some 70 us, and Python between them would take
as long. What a batch looks like reaches the kernels through arrays of fixed size and address, so that the other threads need no
arguments and no interpreter.

Shapes: T rows, D hidden, HQ query heads, HK key/value heads, HD head dimension, F feed-forward. Strides are bytes.
"""

from __future__ import annotations

from numba import njit

from paceline.backends.cpu import sync
from paceline.backends.cpu.attention import BLOCK, attend, write_kv
from paceline.backends.cpu.gemm import BF16_RECORD, INT4, INT4_RECORD, INT8, INT8_RECORD, gemm
from paceline.backends.cpu.rows import add_into, add_rounded, gate, group_sums, head_norm, rms_norm, rotate, round_bf16, widen_bf16

# Places in `sizes` (int64): what never changes.
(HIDDEN, Q_HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, N_LAYERS, EPS, SCALE, FORM, HEAD_FORM, TEAM, BLOCK_STRIDE, LAYER_STRIDE,
 P_STRIDE, SCRATCH_STRIDE, MAX_ROWS, N_SIZES) = range(18)  # fmt: skip

# Places in `weights` [layer, place] (addresses; 0 where a family has no such tensor).
ATTN_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, FFN_NORM, GATE_UP, DOWN, N_WEIGHTS = range(10)

# Places in `edges` (addresses).
FINAL_NORM, HEAD, COS, SIN, N_EDGES = range(5)

# Places in `buffers` (addresses).
(X, X_BF16, H, H_SUMS, QKV_OUT, Q_BF16, ATT, ATT_SUMS, ACT, ACT_SUMS, KV, TABLES, ROW_POSITION, ROW_TABLE, ROW_LEFT, TILE_ROW, TILE_ROWS,
 HEAD_ROWS, LOGITS, SCRATCH, CONTROL, N_BUFFERS) = range(22)  # fmt: skip

# Places in `batch` (int64): what changes with each batch.
ROWS, N_TILES, TABLE_STRIDE, LOGIT_ROWS, ROWS_A_TASK, HEAD_SPLIT, N_BATCH = range(7)

# Kinds of phases.
(START, NORM_ATTENTION, PROJECT_QKV, PREPARE, PREPARE_AND_ATTEND, ATTEND, PROJECT_OUT, NORM_FFN, GATE, PROJECT_DOWN, END, NORM_HEAD,
 PROJECT_HEAD) = range(13)  # fmt: skip

CHUNK = 4
"""Blocks of 16 outputs a task of a matrix product takes."""

PART = 128
"""Rows a task of a matrix product takes at most: its inputs stay in the second-level cache."""

TILE = 8
"""Rows of one sequence an attention task takes."""

PAD = 64
"""Bytes added to the stride of fp32 rows: strides of whole pages would fight over few cache lines."""

TASK_OUT = PART * CHUNK * 64
"""Bytes a task's outputs take in its thread's scratch."""


@njit(nogil=True)
def _record(form):
    return INT4_RECORD if form == INT4 else INT8_RECORD if form == INT8 else BF16_RECORD


@njit(nogil=True)
def _prepare(row, head, layer, sizes, weights, edges, buffers, batch, scratch):
    """Bias, head norms and rotary embedding of one row's KV head and its query heads; key and value go to their block."""
    dim, kv_heads = sizes[HEAD_DIM], sizes[KV_HEADS]
    group = sizes[Q_HEADS] // kv_heads
    n_qkv = (sizes[Q_HEADS] + 2 * kv_heads) * dim
    qkv = buffers[QKV_OUT] + row * (4 * n_qkv + PAD)
    position = sync.load_int32(buffers[ROW_POSITION] + 4 * row)
    cos, sin = edges[COS] + position * dim * 2, edges[SIN] + position * dim * 2
    bias, q_norm, k_norm = weights[layer, QKV_BIAS], weights[layer, Q_NORM], weights[layer, K_NORM]
    for i in range(group):
        q_head = head * group + i
        q = qkv + 4 * dim * q_head
        if bias:
            add_into(q, bias + 4 * dim * q_head, dim)
        if q_norm:
            head_norm(q, q_norm, dim, sizes[EPS])
        rotate(q, cos, sin, dim // 2, buffers[Q_BF16] + 2 * dim * (row * sizes[Q_HEADS] + q_head))
    k_at, v_at = 4 * dim * (sizes[Q_HEADS] + head), 4 * dim * (sizes[Q_HEADS] + kv_heads + head)
    k, v = qkv + k_at, qkv + v_at
    if bias:
        add_into(k, bias + k_at, dim)
        add_into(v, bias + v_at, dim)
    if k_norm:
        head_norm(k, k_norm, dim, sizes[EPS])
    rotate(k, cos, sin, dim // 2, scratch)
    round_bf16(v, dim, scratch + 2 * dim)
    table = buffers[TABLES] + sync.load_int32(buffers[ROW_TABLE] + 4 * row) * batch[TABLE_STRIDE]
    block = sync.load_int32(table + 4 * (position // BLOCK))
    keys = buffers[KV] + layer * sizes[LAYER_STRIDE] + block * sizes[BLOCK_STRIDE] + head * 4 * BLOCK * dim
    write_kv(keys, 2 * BLOCK * dim, position % BLOCK, sync.load_int32(buffers[ROW_LEFT] + 4 * row), scratch, scratch + 2 * dim, dim)


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
    if rows == 1:
        at = 2 * dim * (row * heads + first_head)
        attend(table, keys, sizes[BLOCK_STRIDE], 2 * BLOCK * dim, buffers[Q_BF16] + at, 2 * dim, dim, sizes[SCALE],
               first, 0, n_heads, weights, sizes[P_STRIDE], norm, buffers[ATT] + at, 2 * dim)  # fmt: skip
    else:
        for q_head in range(first_head, first_head + n_heads):
            at = 2 * dim * (row * heads + q_head)
            attend(table, keys, sizes[BLOCK_STRIDE], 2 * BLOCK * dim, buffers[Q_BF16] + at, 2 * dim * heads, dim, sizes[SCALE],
                   first, 1, rows, weights, sizes[P_STRIDE], norm, buffers[ATT] + at, 2 * dim * heads)  # fmt: skip
    for m in range(rows):
        at = (row + m) * heads + first_head
        group_sums(buffers[ATT] + 2 * dim * at, dim * n_heads, buffers[ATT_SUMS] + at * dim // 8)


@njit(nogil=True)
def _project(task, form, w, n, k, x, sums, rows, out, out_stride, scratch):
    """One task of a matrix product: chunk `task % chunks` of outputs, part `task // chunks` of rows.

    Writes fp32 rows to `out` (whole rows of all outputs), or packed to the scratch where `out` is 0.
    """
    blocks = n // 16
    chunks = (blocks + CHUNK - 1) // CHUNK
    block, row = task % chunks * CHUNK, task // chunks * PART
    count, part = min(CHUNK, blocks - block), min(PART, rows - row)
    groups = k // 32
    target = out + row * out_stride + 64 * block if out else scratch
    stride = out_stride if out else CHUNK * 64
    gemm(form, w + block * groups * _record(form), count, x + row * 2 * k, 2 * k, sums + row * 4 * groups, 4 * groups,
         part, target, stride, groups, scratch + TASK_OUT)  # fmt: skip


@njit(nogil=True)
def _tasks(n, rows):
    return (n // 16 + CHUNK - 1) // CHUNK * ((rows + PART - 1) // PART)


@njit(nogil=True)
def _norm_rows(task, per_task, rows, norm, sizes, buffers):
    hidden = sizes[HIDDEN]
    for row in range(task * per_task, min(rows, (task + 1) * per_task)):
        rms_norm(
            buffers[X] + 4 * hidden * row, norm, hidden, sizes[EPS], buffers[H] + 2 * hidden * row, buffers[H_SUMS] + row * hidden // 8
        )


@njit(nogil=True)
def _add(task, rows, hidden, x, scratch, rounded):
    """Add a task's outputs to the residual, rounding it to bf16 at a layer's end."""
    blocks = hidden // 16
    chunks = (blocks + CHUNK - 1) // CHUNK
    block, row = task % chunks * CHUNK, task // chunks * PART
    width = 16 * min(CHUNK, blocks - block)
    for m in range(min(PART, rows - row)):
        target = x + 4 * ((row + m) * hidden + 16 * block)
        if rounded:
            add_rounded(target, scratch + m * CHUNK * 64, width)
        else:
            add_into(target, scratch + m * CHUNK * 64, width)


@njit(nogil=True)
def _do(rank, kind, layer, task, sizes, weights, edges, buffers, batch):
    """One task of a phase."""
    hidden, dim, ffn, form = sizes[HIDDEN], sizes[HEAD_DIM], sizes[FFN], sizes[FORM]
    heads, kv_heads, rows, per_task = sizes[Q_HEADS], sizes[KV_HEADS], batch[ROWS], batch[ROWS_A_TASK]
    scratch = buffers[SCRATCH] + rank * sizes[SCRATCH_STRIDE]
    if kind == START:
        for row in range(task * per_task, min(rows, (task + 1) * per_task)):
            widen_bf16(buffers[X_BF16] + 2 * hidden * row, hidden, buffers[X] + 4 * hidden * row)
        _norm_rows(task, per_task, rows, weights[0, ATTN_NORM], sizes, buffers)
    elif kind == NORM_ATTENTION:
        _norm_rows(task, per_task, rows, weights[layer, ATTN_NORM], sizes, buffers)
    elif kind == PROJECT_QKV:
        n_qkv = (heads + 2 * kv_heads) * dim
        _project(
            task, form, weights[layer, QKV], n_qkv, hidden, buffers[H], buffers[H_SUMS], rows, buffers[QKV_OUT], 4 * n_qkv + PAD, scratch
        )
    elif kind == PREPARE:
        _prepare(task // kv_heads, task % kv_heads, layer, sizes, weights, edges, buffers, batch, scratch)
    elif kind == PREPARE_AND_ATTEND:
        row, head, group = task // kv_heads, task % kv_heads, heads // kv_heads
        _prepare(row, head, layer, sizes, weights, edges, buffers, batch, scratch)
        _attend(row, head, head * group, group, layer, sizes, buffers, batch, scratch)
    elif kind == ATTEND:
        parts = kv_heads * batch[HEAD_SPLIT]
        part, n_heads = task % parts, heads // parts
        # The last tile attends to the most keys: begin with it.
        _attend(
            batch[N_TILES] - 1 - task // parts, part // batch[HEAD_SPLIT], part * n_heads, n_heads, layer, sizes, buffers, batch, scratch
        )
    elif kind == PROJECT_OUT:
        _project(task, form, weights[layer, OUT], hidden, heads * dim, buffers[ATT], buffers[ATT_SUMS], rows, 0, 0, scratch)
        _add(task, rows, hidden, buffers[X], scratch, False)
    elif kind == NORM_FFN:
        _norm_rows(task, per_task, rows, weights[layer, FFN_NORM], sizes, buffers)
    elif kind == GATE:
        _project(task, form, weights[layer, GATE_UP], 2 * ffn, hidden, buffers[H], buffers[H_SUMS], rows, 0, 0, scratch)
        chunks = ffn // 32
        group, row = task % chunks, task // chunks * PART
        for m in range(min(PART, rows - row)):
            at = (row + m) * ffn + 32 * group
            gate(scratch + m * CHUNK * 64, buffers[ACT] + 2 * at, buffers[ACT_SUMS] + at // 8)
    elif kind == PROJECT_DOWN:
        _project(task, form, weights[layer, DOWN], hidden, ffn, buffers[ACT], buffers[ACT_SUMS], rows, 0, 0, scratch)
        _add(task, rows, hidden, buffers[X], scratch, True)
    elif kind == END:
        for row in range(task * per_task, min(rows, (task + 1) * per_task)):
            round_bf16(buffers[X] + 4 * hidden * row, hidden, buffers[X_BF16] + 2 * hidden * row)
    elif kind == NORM_HEAD:
        row = sync.load_int32(buffers[HEAD_ROWS] + 4 * task)
        widen_bf16(buffers[X_BF16] + 2 * hidden * row, hidden, buffers[X] + 4 * hidden * task)
        _norm_rows(task, 1, task + 1, edges[FINAL_NORM], sizes, buffers)
    elif kind == PROJECT_HEAD:
        vocab = sizes[VOCAB]
        _project(
            task,
            sizes[HEAD_FORM],
            edges[HEAD],
            vocab,
            hidden,
            buffers[H],
            buffers[H_SUMS],
            batch[LOGIT_ROWS],
            buffers[LOGITS],
            4 * vocab,
            scratch,
        )


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
            _do(rank, kind, layer, task, sizes, weights, edges, buffers, batch)
            sync.finish(control)


@njit(nogil=True)
def _phase(done, kind, layer, count, sizes, weights, edges, buffers, batch):
    """Post a phase, take part, wait for its tasks. Returns the tasks done in all."""
    if sizes[TEAM] == 1:
        for task in range(count):
            _do(0, kind, layer, task, sizes, weights, edges, buffers, batch)
        return done
    sync.post(buffers[CONTROL], kind, layer, count)
    take_part(0, sizes, weights, edges, buffers, batch)
    sync.wait_for(buffers[CONTROL], done + count)
    return done + count


@njit(nogil=True, cache=True)
def run_layers(done, sizes, weights, edges, buffers, batch):
    """Run all layers on the batch: X_BF16 in, X_BF16 out. Returns `done` for the next call."""
    rows, tiles, hidden, kv_heads = batch[ROWS], batch[N_TILES], sizes[HIDDEN], sizes[KV_HEADS]
    group = sizes[Q_HEADS] // kv_heads
    per_task = max(1, min(8, rows // sizes[TEAM]))
    row_tasks = (rows + per_task - 1) // per_task
    batch[ROWS_A_TASK] = per_task
    # Few rows: a query head a task keeps the team even. Many: a KV head a task reads its keys once.
    few = tiles * kv_heads < 4 * sizes[TEAM]
    batch[HEAD_SPLIT] = group if few else 1
    fused = tiles == rows and not few
    n_qkv = (sizes[Q_HEADS] + 2 * kv_heads) * sizes[HEAD_DIM]
    done = _phase(done, START, 0, row_tasks, sizes, weights, edges, buffers, batch)
    for layer in range(sizes[N_LAYERS]):
        if layer:
            done = _phase(done, NORM_ATTENTION, layer, row_tasks, sizes, weights, edges, buffers, batch)
        done = _phase(done, PROJECT_QKV, layer, _tasks(n_qkv, rows), sizes, weights, edges, buffers, batch)
        if fused:
            done = _phase(done, PREPARE_AND_ATTEND, layer, rows * kv_heads, sizes, weights, edges, buffers, batch)
        else:
            done = _phase(done, PREPARE, layer, rows * kv_heads, sizes, weights, edges, buffers, batch)
            done = _phase(done, ATTEND, layer, tiles * kv_heads * batch[HEAD_SPLIT], sizes, weights, edges, buffers, batch)
        done = _phase(done, PROJECT_OUT, layer, _tasks(hidden, rows), sizes, weights, edges, buffers, batch)
        done = _phase(done, NORM_FFN, layer, row_tasks, sizes, weights, edges, buffers, batch)
        done = _phase(done, GATE, layer, _tasks(2 * sizes[FFN], rows), sizes, weights, edges, buffers, batch)
        done = _phase(done, PROJECT_DOWN, layer, _tasks(hidden, rows), sizes, weights, edges, buffers, batch)
    return _phase(done, END, 0, row_tasks, sizes, weights, edges, buffers, batch)


@njit(nogil=True, cache=True)
def run_head(done, sizes, weights, edges, buffers, batch):
    """Final norm and head of the rows listed in HEAD_ROWS (of X_BF16) into LOGITS, fp32 [rows, vocab]."""
    rows = batch[LOGIT_ROWS]
    done = _phase(done, NORM_HEAD, 0, rows, sizes, weights, edges, buffers, batch)
    return _phase(done, PROJECT_HEAD, 0, _tasks(sizes[VOCAB], rows), sizes, weights, edges, buffers, batch)
