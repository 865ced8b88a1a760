"""How much memory a model's kernels take beside weights and KV (activations of a batch's rows, scratch, tables, logits): told before anything is loaded, by
numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from paceline.backends.cpu.forms import GROUP_BYTES, Inputs
from paceline.backends.cpu.pieces import Cutter
from paceline.backends.cpu.sizes import (
    BLOCK,
    CACHE_LINE,
    CHUNK,
    N_PIECE,
    NEIGHBOURS,
    PART,
    SEGMENT,
    expanded_bytes,
    record_bytes,
    scratch_bytes,
)
from paceline.backends.table import Kernels
from paceline.core.model import BLOCK_TOKENS, WIDEST_BLOCK, ModelSpec
from paceline.core.weights import GROUP


def working_bytes(kernels: Kernels, spec: ModelSpec, *, max_rows: int, threads: int, n_blocks: int, logits_rows: int = 0) -> int:
    """Bytes of a runner's working memory, at most.

    Args:
        kernels: that run the model.
        spec: the model's sizes.
        max_rows: of a batch.
        threads: that share a step.
        n_blocks: KV blocks.
        logits_rows: rows of a batch whose logits are wanted, at most: each takes the vocabulary in fp32.
    """
    if kernels.compiled:
        return cpu_working_bytes(spec, max_rows=max_rows, threads=threads, n_blocks=n_blocks, logits_rows=logits_rows)
    return torch_working_bytes(spec, max_rows=max_rows, n_blocks=n_blocks, logits_rows=logits_rows)


def kv_group(kernels: Kernels) -> int:
    """KV blocks whose memory comes together: a pool takes that of whole groups."""
    if kernels.compiled:
        return NEIGHBOURS
    return WIDEST_BLOCK // BLOCK_TOKENS if kernels is Kernels.CUDA else 1


def cutter_of(spec: ModelSpec, threads: int, n_blocks: int) -> Cutter:
    """What cuts attention for a model on a number of threads."""
    context = min(spec.max_context, n_blocks * BLOCK)
    return Cutter(spec.n_kv_heads, spec.n_heads // spec.n_kv_heads, threads, math.ceil(context / SEGMENT))


def product_bytes(spec: ModelSpec) -> int:
    """Of a task's outputs in its thread's scratch; unpacked weights come after them."""
    return -(-(4 * PART * max(2 * 16 * CHUNK, spec.head_dim) + 2 * spec.head_dim) // CACHE_LINE) * CACHE_LINE


def thread_bytes(spec: ModelSpec, cutter: Cutter) -> int:
    """Scratch of one thread. Of an odd number of lines beyond whole pages, so that threads' scratches differ in their sets of a cache."""
    attention = scratch_bytes(cutter.most_queries, spec.head_dim)
    product = product_bytes(spec) + expanded_bytes(max(spec.hidden, spec.n_heads * spec.head_dim, spec.ffn))
    return -(-max(attention, product, 2 * spec.hidden) // 4096) * 4096 + 128


def cpu_working_bytes(
    spec: ModelSpec, *, max_rows: int, threads: int, n_blocks: int, logits_rows: int, inputs: Collection[Inputs] = tuple(Inputs)
) -> int:
    """Bytes of a runner's working memory, at most.

    Args:
        threads: that share a step.
        logits_rows: rows of a batch whose logits are wanted, at most: each takes the vocabulary in fp32.
        inputs: as what some matrix takes its inputs.
    """
    cutter = cutter_of(spec, threads, n_blocks)
    attended = spec.n_heads * spec.head_dim
    context = min(spec.max_context, n_blocks * BLOCK)
    # As if all layers had matrices that take their inputs in each of the ways.
    held = sum(GROUP_BYTES[kind] for kind in inputs) / GROUP
    row = 6 * spec.hidden + 2 * attended + held * (spec.hidden + attended + spec.ffn) + 4 * math.ceil(context / BLOCK) + 4 * (4 + N_PIECE)
    split = cutter.split_records
    pieces = split * (spec.n_heads * (record_bytes(spec.head_dim) + 8) + 4 * N_PIECE)
    rope = 4 * context * spec.head_dim
    logits = 4 * logits_rows * (-(-spec.vocab // 16) * 16)
    return int(max_rows * row) + threads * (thread_bytes(spec, cutter) + 4096) + pieces + rope + logits + (1 << 16)


def torch_working_bytes(spec: ModelSpec, *, max_rows: int, n_blocks: int, logits_rows: int) -> int:
    """As `backends.working.working_bytes`."""
    width = 4 * spec.hidden + 2 * spec.n_heads * spec.head_dim + 2 * spec.ffn
    context = min(spec.max_context, n_blocks * BLOCK_TOKENS)
    return 4 * (max_rows * width + logits_rows * spec.vocab + 2 * context * spec.head_dim)
