"""What follows the products of queries, keys and values: bias, norm, rotary embedding, and each head's place. Strides are bytes."""

from __future__ import annotations

from paceline.backends.compiling import inner
from paceline.backends.cpu import sync
from paceline.backends.cpu.pages import write_key, write_value
from paceline.backends.cpu.places import (
    AT,
    BLOCK_STRIDE,
    COS,
    EPS,
    HEAD_DIM,
    HEAD_STRIDE,
    K_NORM,
    KV,
    KV_HEADS,
    LAYER_STRIDE,
    Q_BF16,
    Q_HEADS,
    Q_NORM,
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
    ZEROS,
)
from paceline.backends.cpu.rows import add_into, head_norm, rotate, round_bf16
from paceline.backends.cpu.sizes import BLOCK, PART


@inner
def _turn(x, position, layer, dim, rotary, weights, out):
    """out = bf16 of a head (fp32), whose first `rotary` dimensions turn."""
    at = position * rotary * 2
    rotate(x, weights[layer, COS, AT] + at, weights[layer, SIN, AT] + at, rotary // 2, out)
    if rotary < dim:
        round_bf16(x + 4 * rotary, dim - rotary, out + 2 * rotary)


@inner
def _block_of(row, position, buffers, batch):
    """The block that holds a row."""
    table = buffers[TABLES] + sync.load_int32(buffers[ROW_TABLE] + 4 * row) * batch[TABLE_STRIDE]
    return sync.load_int32(table + 4 * (position // BLOCK))


@inner
def norm_heads(row, layer, sizes, weights, buffers, batch, scratch):
    """What follows the q and k products of a row whose norms are over all heads: bias, norm, rotary embedding; each head goes to its place."""
    dim, q_heads, kv_heads = sizes[HEAD_DIM], sizes[Q_HEADS], sizes[KV_HEADS]
    position = sync.load_int32(buffers[ROW_POSITION] + 4 * row)
    q = buffers[TO_NORM] + 4 * dim * (q_heads + kv_heads) * row
    k = q + 4 * dim * q_heads
    if weights[layer, QKV_BIAS, AT]:
        add_into(q, weights[layer, QKV_BIAS, AT], dim * (q_heads + kv_heads))
    head_norm(q, weights[layer, Q_NORM, AT], dim * q_heads, sizes[EPS])
    head_norm(k, weights[layer, K_NORM, AT], dim * kv_heads, sizes[EPS])
    for head in range(q_heads):
        _turn(q + 4 * dim * head, position, layer, dim, sizes[ROTARY], weights, buffers[Q_BF16] + 2 * dim * (row * q_heads + head))
    block = buffers[KV] + layer * sizes[LAYER_STRIDE] + _block_of(row, position, buffers, batch) * sizes[BLOCK_STRIDE]
    for head in range(kv_heads):
        _turn(k + 4 * dim * head, position, layer, dim, sizes[ROTARY], weights, scratch)
        write_key(block + head * sizes[HEAD_STRIDE], position % BLOCK, scratch, dim)


@inner
def place_heads(task, layer, sizes, weights, buffers, batch, scratch):
    """What follows a task of the q, k, v products, whose outputs are one head of a part of the rows (fp32, in the scratch).

    Bias, head norm, rotary embedding; a query goes to its row, a key or a value to its block.
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
            round_bf16(x, dim, out)
        else:
            _turn(x, position, layer, dim, sizes[ROTARY], weights, out)
        if not is_query:
            block = pool + _block_of(row, position, buffers, batch) * sizes[BLOCK_STRIDE]
            if is_value:
                left = sync.load_int32(buffers[ROW_LEFT] + 4 * row)
                write_value(block + 2 * BLOCK * dim, position % BLOCK, left, out, dim, buffers[ZEROS])
            else:
                write_key(block, position % BLOCK, out, dim)
