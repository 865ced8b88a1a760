"""Which form each matrix is held in, and how much memory a model takes: its weights, and what kernels take beside weights and KV (activations of a batch's
rows, scratch, tables, logits), told before anything is loaded, by numbers alone.

Under `stored`, what the file holds is kept: the types that have a form of their own as they lie, plain numbers as bf16, and every other type in
the smallest form whose rounding makes the file's own error against the original weights at most 1.05 times as large (measured:
`bench/RESULTS.md`). The uniform formats hold all matrices alike, the embedding and the head in at least eight bits. MLX has those formats alone, and under `stored` holds
each matrix in the one that keeps what the file has of it; torch holds bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Final

from paceline.backends.cpu.forms import GROUP_BYTES, LAYOUT, Form, Inputs
from paceline.backends.cpu.padding import padded
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
from paceline.core.model import BLOCK_TOKENS, WIDEST_BLOCK, LayerRange, ModelSpec, Norms, WeightsFormat
from paceline.core.weights import EMBEDDING, GROUP, HEAD, ROUTER, tensor_shapes

NEAREST: Final[Mapping[str, Form]] = {
    **{form.name: form for form in Form},
    **dict.fromkeys(("F32", "F16"), Form.BF16),
    **dict.fromkeys(("Q2_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "TQ1_0", "TQ2_0"), Form.Q4_1),
    **dict.fromkeys(("Q3_K", "IQ3_XXS", "IQ3_S"), Form.Q5_1),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "NVFP4"), Form.Q8_0),
}
"""The form for each of GGML's types under `stored`."""
_AS_INT4: Final = {name for name, form in NEAREST.items() if form in {Form.Q4_0, Form.Q4_1, Form.Q4_K}} | {"Q3_K", "IQ3_XXS", "IQ3_S"}
"""Types that MLX holds in four bits."""
_MLX_GROUP_BYTES: Final = {WeightsFormat.INT4: 20, WeightsFormat.INT8: 36, WeightsFormat.BF16: 64}
"""Of 32 inputs: codes, and a bf16 scale and offset."""
_UNIFORM: Final = {WeightsFormat.INT4: Form.Q4_1, WeightsFormat.INT8: Form.Q8_0, WeightsFormat.BF16: Form.BF16}

FormOf = Callable[[str], Form]
"""The form of a matrix, by its tensor's name."""


def forms_by(weights: WeightsFormat, type_of: Callable[[str], str]) -> FormOf:
    """The form of each matrix under a weights format; a router is always in bf16.

    Args:
        type_of: GGML's name of the type a tensor is stored in.
    """
    if weights is WeightsFormat.STORED:
        return lambda name: Form.BF16 if name.endswith(ROUTER) else NEAREST[type_of(name)]
    form = _UNIFORM[weights]
    head_form = Form.Q8_0 if form is Form.Q4_1 else form
    return lambda name: Form.BF16 if name.endswith(ROUTER) else head_form if name in {EMBEDDING, HEAD} else form


def matrices(spec: ModelSpec) -> list[str]:
    """Names of a model's matrices."""
    return [name for name, shape in tensor_shapes(spec).items() if len(shape) == 2]


def mlx_formats(spec: ModelSpec, weights: WeightsFormat, type_of: Callable[[str], str]) -> dict[str, WeightsFormat]:
    """The format that MLX holds each matrix in: under `stored` int4, or int8 where four bits would lose what the file has.

    Types of fewer than four bits become four: eight would take more than twice the file. A model is in bf16 as a whole or not at all, since its
    two paths are then one; the embedding and the head have eight bits at least; a router is always in bf16.
    """
    routers = {name for name in matrices(spec) if name.endswith(ROUTER)}
    layered = [name for name in matrices(spec) if name not in {EMBEDDING, HEAD} | routers]
    if weights is not WeightsFormat.STORED:
        formats = dict.fromkeys(layered, weights)
    elif all(NEAREST[type_of(name)] is Form.BF16 for name in layered):
        formats = dict.fromkeys(layered, WeightsFormat.BF16)
    else:
        formats = {name: WeightsFormat.INT4 if type_of(name) in _AS_INT4 else WeightsFormat.INT8 for name in layered}
    table = WeightsFormat.BF16 if WeightsFormat.BF16 in formats.values() else WeightsFormat.INT8
    return formats | dict.fromkeys(routers, WeightsFormat.BF16) | {name: table for name in matrices(spec) if name in {EMBEDDING, HEAD}}


def held_bytes(spec: ModelSpec, form_of: FormOf) -> dict[str, int]:
    """Bytes that each tensor of a model takes in memory."""
    spec = padded(spec)

    def of(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) != 2:
            return 4 * math.prod(shape)
        # Rows of no whole groups are bf16, on kernels that take them.
        return LAYOUT[form_of(name)].packed_bytes(*shape) if shape[1] % 32 == 0 else 2 * math.prod(shape)

    return {name: of(name, shape) for name, shape in tensor_shapes(spec).items()}


def formats_of_products(formats: Mapping[str, WeightsFormat]) -> list[WeightsFormat]:
    """Those that `mlx_formats` gave a model's layers, routers aside."""
    if formats[EMBEDDING] is WeightsFormat.BF16:
        return [WeightsFormat.BF16]
    return sorted({held for name, held in formats.items() if name not in {EMBEDDING, HEAD}} - {WeightsFormat.BF16})


def mlx_bytes(spec: ModelSpec, formats: Mapping[str, WeightsFormat]) -> dict[str, int]:
    """`held_bytes`, on MLX."""

    def of(name: str, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape) if len(shape) != 2 else math.prod(shape) * _MLX_GROUP_BYTES[formats[name]] // GROUP

    return {name: of(name, shape) for name, shape in tensor_shapes(spec).items()}


def torch_bytes(spec: ModelSpec) -> dict[str, int]:
    """`held_bytes`, on torch."""
    return {name: (2 if len(shape) == 2 else 4) * math.prod(shape) for name, shape in tensor_shapes(spec).items()}


def part_bytes(held: Mapping[str, int], layers: LayerRange, *, edges: bool) -> int:
    """What some layers take, and with `edges` the tensors outside the layers."""
    prefixes = tuple(f"model.layers.{layer}." for layer in range(layers.start, layers.stop))
    return sum(n for name, n in held.items() if name.startswith(prefixes) or (edges and not name.startswith("model.layers.")))


def working_bytes(kernels: Kernels, spec: ModelSpec, *, max_rows: int, threads: int, n_blocks: int, logits_rows: int = 0) -> int:
    """Bytes of a runner's working memory, at most.

    Args:
        threads: that share a step.
        n_blocks: KV blocks.
        logits_rows: rows of a batch whose logits are wanted, at most: each takes the vocabulary in fp32.
    """
    if kernels.compiled:
        return cpu_working_bytes(spec, max_rows=max_rows, threads=threads, n_blocks=n_blocks, logits_rows=logits_rows)
    working = torch_working_bytes(spec, max_rows=max_rows, n_blocks=n_blocks, logits_rows=logits_rows)
    return working + (segments_bytes(spec, max_rows=max_rows, n_blocks=n_blocks) if kernels is Kernels.CUDA else 0)


def kv_group(kernels: Kernels) -> int:
    """KV blocks whose memory comes together: a pool takes that of whole groups."""
    if kernels.compiled:
        return NEIGHBOURS
    return WIDEST_BLOCK // BLOCK_TOKENS if kernels is Kernels.CUDA else 1


def cutter_of(spec: ModelSpec, threads: int, n_blocks: int) -> Cutter:
    """What cuts attention for a model on a number of threads."""
    context = min(spec.max_context, n_blocks * BLOCK)
    return Cutter(spec.n_kv_heads, max(1, spec.n_heads // max(1, spec.n_kv_heads)), threads, math.ceil(context / SEGMENT))


def product_bytes(spec: ModelSpec) -> int:
    """Of a task's outputs in its thread's scratch; unpacked weights come after them."""
    return -(-(4 * PART * max(2 * 16 * CHUNK, spec.head_dim) + 2 * spec.head_dim) // CACHE_LINE) * CACHE_LINE


def thread_bytes(spec: ModelSpec, cutter: Cutter) -> int:
    """Scratch of one thread. Of an odd number of lines beyond whole pages, so that threads' scratches differ in their sets of a cache."""
    attention = scratch_bytes(cutter.most_queries, spec.value_dim)
    low = 0 if spec.low is None else max(spec.low.queries, spec.low.keys)
    product = product_bytes(spec) + expanded_bytes(max(spec.hidden, spec.n_heads * spec.value_dim, spec.ffn_width, low))
    return -(-max(attention, product, 4 * spec.hidden) // 4096) * 4096 + 128


def cpu_working_bytes(
    spec: ModelSpec, *, max_rows: int, threads: int, n_blocks: int, logits_rows: int, inputs: Collection[Inputs] = tuple(Inputs)
) -> int:
    """Bytes of a runner's working memory, at most.

    Args:
        threads: that share a step.
        logits_rows: rows of a batch whose logits are wanted, at most: each takes the vocabulary in fp32.
        inputs: as what some matrix takes its inputs.
    """
    spec = padded(spec)
    cutter = cutter_of(spec, threads, n_blocks)
    queries, low = spec.n_heads * spec.head_dim, spec.low
    context = min(spec.max_context, n_blocks * BLOCK)
    # As if all layers had matrices that take their inputs in each of the ways.
    held = sum(GROUP_BYTES[kind] for kind in inputs) / GROUP
    to_norm = 4 * (queries + spec.n_kv_heads * spec.head_dim) if spec.qk_norm_whole else 0
    if low is not None:
        to_norm = 4 * (low.queries + low.keys + spec.head_dim - spec.own_dims) + held * (low.queries + low.keys)
    inner = held * spec.ffn if spec.moe is None else spec.moe.top_k * (held * (spec.hidden + spec.moe.ffn) + 4 * spec.hidden + 16)
    row = (
        (6 if spec.norms is Norms.BEFORE else 10) * spec.hidden
        + 2 * queries
        + to_norm
        + held * (spec.hidden + spec.n_heads * spec.value_dim)
        + inner
        + 4 * math.ceil(context / BLOCK)
        + 4 * (4 + N_PIECE)
    )
    split = cutter.split_records
    pieces = split * (spec.n_heads * (record_bytes(spec.value_dim) + 8) + 4 * N_PIECE)
    rope = 4 * context * spec.head_dim * len({spec.rope_of(layer) for layer in range(spec.n_layers)})
    logits = 4 * logits_rows * (-(-spec.vocab // 16) * 16)
    return int(max_rows * row) + threads * (thread_bytes(spec, cutter) + 4096) + pieces + rope + logits + (1 << 16)


KEYS_ON_GPU = 1024
"""Of a segment. Lowering it: more of the GPU works for one row, and more means are merged. Another number is another order of sums."""


def segments_bytes(spec: ModelSpec, *, max_rows: int, n_blocks: int) -> int:
    """What rows and a graph have of each segment of keys on a GPU: queries, means in bf16, and the logarithms of their sums in fp32."""
    n_earlier = math.ceil(min(spec.max_context, n_blocks * BLOCK_TOKENS) / KEYS_ON_GPU) - 1
    return (max_rows + 64) * max(0, n_earlier) * spec.n_heads * (4 * spec.head_dim + 4)


def torch_working_bytes(spec: ModelSpec, *, max_rows: int, n_blocks: int, logits_rows: int) -> int:
    """As `working_bytes`."""
    width = 4 * spec.hidden + 2 * spec.n_heads * spec.head_dim + 2 * spec.ffn
    context = min(spec.max_context, n_blocks * BLOCK_TOKENS)
    return 4 * (max_rows * width + logits_rows * spec.vocab + 2 * context * spec.head_dim)
