"""The products of queries, keys and values, and the steps after them: bias, norm, rotary embedding, and storing each head. Strides are bytes."""

from __future__ import annotations

from paceline.backends.compiling import inner
from paceline.backends.cpu import sync
from paceline.backends.cpu.pages import write_key, write_value
from paceline.backends.cpu.panels import hold, multiply
from paceline.backends.cpu.places import (
    AT,
    BLOCK_STRIDE,
    COS,
    EPS,
    EXPANDED,
    HEAD_DIM,
    HEAD_STRIDE,
    HIDDEN,
    INPUTS,
    K_NORM,
    KV,
    KV_BOUNDS,
    KV_HEADS,
    KV_HELD,
    KV_INPUTS,
    KV_LOW,
    KV_LOW_NORM,
    KV_STEP,
    KV_X,
    LAYER_STRIDE,
    LOW,
    LOW_EPS,
    OWN_DIMS,
    Q_BF16,
    Q_BOUNDS,
    Q_HEADS,
    Q_HELD,
    Q_INPUTS,
    Q_LOW,
    Q_LOW_NORM,
    Q_NORM,
    Q_X,
    QKV_BIAS,
    ROTARY,
    ROW_LEFT,
    ROW_POSITION,
    ROW_TABLE,
    ROWS,
    SIN,
    TABLE_STRIDE,
    TABLES,
    TO_NORM,
    VALUE_DIM,
    WHOLE_BOUNDS,
    WHOLE_NORM,
    ZEROS,
    H,
    K,
    Q,
    V,
)
from paceline.backends.cpu.rows import add_into, head_norm, rms_norm, rotate, round_bf16
from paceline.backends.cpu.sizes import BLOCK, PART


@inner
def project_low(block, blocks, row, rows, layer, sizes, weights, buffers, scratch):
    """Compute outputs of the first low-rank products: those for queries, then those for keys and values, then the part that all heads' keys share."""
    place, first, stride = Q_LOW, 0, 4 * sizes[LOW]
    if 16 * block >= sizes[Q_INPUTS]:
        place, first = KV_LOW, sizes[Q_INPUTS] // 16
    multiply(weights, layer, place, block - first, blocks, H, sizes[HIDDEN], row, rows, buffers[TO_NORM] + stride * row + 64 * block, stride,
              buffers[WHOLE_BOUNDS], 1, buffers, scratch + sizes[EXPANDED])  # fmt: skip


@inner
def norm_low(row, layer, sizes, weights, buffers, rows, scratch):
    """Norm a row's outputs of the first products, and store them as inputs of the second ones."""
    x, n_q, n_kv, eps = buffers[TO_NORM] + 4 * sizes[LOW] * row, sizes[Q_INPUTS], sizes[KV_INPUTS], sizes[LOW_EPS]
    rms_norm(x, weights[layer, Q_LOW_NORM, AT], n_q, eps, scratch)
    hold(1 << weights[layer, Q, INPUTS], scratch, n_q, row, 0, n_q, rows, 0, Q_HELD, buffers)
    rms_norm(x + 4 * n_q, weights[layer, KV_LOW_NORM, AT], n_kv, eps, scratch)
    hold(1 << weights[layer, K, INPUTS], scratch, n_kv, row, 0, n_kv, rows, 0, KV_HELD, buffers)


@inner
def project_head(task, layer, sizes, weights, buffers, batch, scratch):
    """Compute one head of the queries, keys or values for a part of the rows."""
    dim, q_heads, kv_heads = sizes[HEAD_DIM], sizes[Q_HEADS], sizes[KV_HEADS]
    n_heads = q_heads + 2 * kv_heads
    head, row = task % n_heads, task // n_heads * PART
    normed = sizes[WHOLE_NORM] and head < q_heads + kv_heads
    out, stride = scratch, 4 * dim
    if normed:  # a later phase norms it, when all heads are there
        stride = 4 * dim * (q_heads + kv_heads)
        out = buffers[TO_NORM] + stride * row + 4 * dim * head
    if head < q_heads:
        place, x, k, bounds, step, n = Q, sizes[Q_X], sizes[Q_INPUTS], buffers[Q_BOUNDS], dim, dim
    else:
        place, x, k, bounds, step, n = K, sizes[KV_X], sizes[KV_INPUTS], buffers[KV_BOUNDS], sizes[KV_STEP], sizes[OWN_DIMS]
        if head >= q_heads + kv_heads:
            place, n = V, sizes[VALUE_DIM]
        head = (head - q_heads) % kv_heads
    multiply(weights, layer, place, head * step // 16, n // 16, x, k, row, min(PART, batch[ROWS] - row), out, stride, bounds, 1, buffers,
              scratch + sizes[EXPANDED])  # fmt: skip
    if not normed:
        _place_heads(task, layer, sizes, weights, buffers, batch, scratch)


@inner
def _turn(x, shared, position, layer, sizes, weights, out):
    """Write a head (fp32) to `out` as bf16, with some dimensions rotated: the first ones, or with low-rank products the last ones.

    The latter are read from `shared`: for a key, all heads share them.
    """
    dim, rotary = sizes[HEAD_DIM], sizes[ROTARY]
    at, rest = position * rotary * 2, dim - rotary
    cos, sin = weights[layer, COS, AT] + at, weights[layer, SIN, AT] + at
    if sizes[LOW]:
        rotate(shared, cos, sin, rotary // 2, out + 2 * rest)
        round_bf16(x, rest, out)
    else:
        rotate(x, cos, sin, rotary // 2, out)
        if rest > 0:
            round_bf16(x + 4 * rotary, rest, out + 2 * rotary)


@inner
def _block_of(row, position, buffers, batch):
    """Return the number of the KV block that holds a row."""
    table = buffers[TABLES] + sync.load_int32(buffers[ROW_TABLE] + 4 * row) * batch[TABLE_STRIDE]
    return sync.load_int32(table + 4 * (position // BLOCK))


@inner
def norm_heads(row, layer, sizes, weights, buffers, batch, scratch):
    """Finish the queries and keys of a row, for models with norms over all heads: bias, norm, rotary embedding; then store each head."""
    dim, q_heads, kv_heads = sizes[HEAD_DIM], sizes[Q_HEADS], sizes[KV_HEADS]
    position = sync.load_int32(buffers[ROW_POSITION] + 4 * row)
    q = buffers[TO_NORM] + 4 * dim * (q_heads + kv_heads) * row
    k = q + 4 * dim * q_heads
    if weights[layer, QKV_BIAS, AT]:
        add_into(q, weights[layer, QKV_BIAS, AT], dim * (q_heads + kv_heads))
    head_norm(q, weights[layer, Q_NORM, AT], dim * q_heads, sizes[EPS])
    head_norm(k, weights[layer, K_NORM, AT], dim * kv_heads, sizes[EPS])
    for head in range(q_heads):
        _turn(q + 4 * dim * head, 0, position, layer, sizes, weights, buffers[Q_BF16] + 2 * dim * (row * q_heads + head))
    block = buffers[KV] + layer * sizes[LAYER_STRIDE] + _block_of(row, position, buffers, batch) * sizes[BLOCK_STRIDE]
    for head in range(kv_heads):
        _turn(k + 4 * dim * head, 0, position, layer, sizes, weights, scratch)
        write_key(block + head * sizes[HEAD_STRIDE], position % BLOCK, scratch, dim)


@inner
def _place_heads(task, layer, sizes, weights, buffers, batch, scratch):
    """Finish a task of the q, k, v products. Its outputs, one head of a part of the rows, are in the scratch in fp32.

    Applies bias, head norm and rotary embedding. Then a query is stored in its row, a key or a value in its block.
    """
    dim, q_heads, kv_heads = sizes[HEAD_DIM], sizes[Q_HEADS], sizes[KV_HEADS]
    n_heads = q_heads + 2 * kv_heads
    head, first = task % n_heads, task // n_heads * PART
    bias = weights[layer, QKV_BIAS, AT]
    is_query, is_value = head < q_heads, head >= q_heads + kv_heads
    norm = 0 if is_value else weights[layer, Q_NORM if is_query else K_NORM, AT]
    place = scratch + PART * 4 * dim
    pool = buffers[KV] + layer * sizes[LAYER_STRIDE] + (head - q_heads) % kv_heads * sizes[HEAD_STRIDE]
    for m in range(min(PART, batch[ROWS] - first)):
        row, x = first + m, scratch + m * 4 * dim
        position = sync.load_int32(buffers[ROW_POSITION] + 4 * row)
        if bias:
            add_into(x, bias + 4 * dim * head, dim)
        if norm:
            head_norm(x, norm, dim, sizes[EPS])
        out = buffers[Q_BF16] + 2 * dim * (row * q_heads + head) if is_query else place
        if is_value:
            round_bf16(x, sizes[VALUE_DIM], out)
        else:
            shared = x + 4 * (dim - sizes[ROTARY]) if is_query else buffers[TO_NORM] + 4 * (sizes[LOW] * (row + 1) - sizes[ROTARY])
            _turn(x, shared, position, layer, sizes, weights, out)
        if not is_query:
            block = pool + _block_of(row, position, buffers, batch) * sizes[BLOCK_STRIDE]
            if is_value:
                left = sync.load_int32(buffers[ROW_LEFT] + 4 * row)
                write_value(block + 2 * BLOCK * dim, position % BLOCK, left, out, sizes[VALUE_DIM], buffers[ZEROS])
            else:
                write_key(block, position % BLOCK, out, dim)
