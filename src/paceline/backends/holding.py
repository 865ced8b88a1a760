"""The form that each matrix is held in, and the memory that a model takes: its weights, and the kernels' working memory (activations of a batch's
rows, scratch, tables, logits). All of it is computed from sizes, before anything is loaded.

Under `stored`, matrices keep the file's precision. Types that have a form here stay unchanged, plain numbers become bf16, and every other type gets
the smallest form that makes the file's own error against the original weights at most 1.05 times as large (measured: `bench/RESULTS.md`).
The uniform formats hold all matrices alike, but the embedding and the head in at least eight bits. MLX has only the uniform formats; under `stored` it
holds each matrix in the one that keeps the file's precision. Torch holds bf16.
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
"""Form for each of GGML's types under `stored`."""
_AS_INT4: Final = {name for name, form in NEAREST.items() if form in {Form.Q4_0, Form.Q4_1, Form.Q4_K}} | {"Q3_K", "IQ3_XXS", "IQ3_S"}
"""Types that MLX holds in four bits."""
_MLX_GROUP_BYTES: Final = {WeightsFormat.INT4: 20, WeightsFormat.INT8: 36, WeightsFormat.BF16: 64}
"""Bytes of a group of 32 inputs: its codes, and a bf16 scale and offset (bf16 has neither)."""
_UNIFORM: Final = {WeightsFormat.INT4: Form.Q4_1, WeightsFormat.INT8: Form.Q8_0, WeightsFormat.BF16: Form.BF16}

FormOf = Callable[[str], Form]
"""The form of a matrix, by its tensor's name."""


def forms_by(weights: WeightsFormat, type_of: Callable[[str], str]) -> FormOf:
    """Return a function that gives the form of each matrix under a weights format. A router is always in bf16.

    Args:
        type_of: returns GGML's name of the type that a tensor is stored in.
    """
    if weights is WeightsFormat.STORED:
        return lambda name: Form.BF16 if name.endswith(ROUTER) else NEAREST[type_of(name)]
    form = _UNIFORM[weights]
    head_form = Form.Q8_0 if form is Form.Q4_1 else form
    return lambda name: Form.BF16 if name.endswith(ROUTER) else head_form if name in {EMBEDDING, HEAD} else form


def matrices(spec: ModelSpec) -> list[str]:
    """Return the names of a model's matrices."""
    return [name for name, shape in tensor_shapes(spec).items() if len(shape) == 2]


def mlx_formats(spec: ModelSpec, weights: WeightsFormat, type_of: Callable[[str], str]) -> dict[str, WeightsFormat]:
    """Return the format that MLX holds each matrix in, by name: under `stored` int4, or int8 if four bits would lose precision of the file.

    Types of fewer than four bits get four, because eight would take more than twice the file's size. Either all layers are in bf16 or none, because
    the two paths of a bf16 model are the same. The embedding and the head have at least eight bits; a router is always in bf16.
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
    """Return the bytes that each tensor of a model takes in the memory of the compiled kernels, by name."""
    spec = padded(spec)

    def of(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) != 2:
            return 4 * math.prod(shape)
        # Rows that do not consist of whole groups are in bf16, on kernels that accept them.
        return LAYOUT[form_of(name)].packed_bytes(*shape) if shape[1] % 32 == 0 else 2 * math.prod(shape)

    return {name: of(name, shape) for name, shape in tensor_shapes(spec).items()}


def formats_of_products(formats: Mapping[str, WeightsFormat]) -> list[WeightsFormat]:
    """Return the formats that `mlx_formats` gave the matrices of a model's layers, without the routers."""
    if formats[EMBEDDING] is WeightsFormat.BF16:
        return [WeightsFormat.BF16]
    return sorted({held for name, held in formats.items() if name not in {EMBEDDING, HEAD}} - {WeightsFormat.BF16})


def mlx_bytes(spec: ModelSpec, formats: Mapping[str, WeightsFormat]) -> dict[str, int]:
    """Return the bytes that each tensor of a model takes on MLX, by name."""

    def of(name: str, shape: tuple[int, ...]) -> int:
        return 4 * math.prod(shape) if len(shape) != 2 else math.prod(shape) * _MLX_GROUP_BYTES[formats[name]] // GROUP

    return {name: of(name, shape) for name, shape in tensor_shapes(spec).items()}


def torch_bytes(spec: ModelSpec) -> dict[str, int]:
    """Return the bytes that each tensor of a model takes on torch, by name."""
    return {name: (2 if len(shape) == 2 else 4) * math.prod(shape) for name, shape in tensor_shapes(spec).items()}


def part_bytes(held: Mapping[str, int], layers: LayerRange, *, edges: bool) -> int:
    """Return the bytes of some layers, and with `edges` also of the tensors outside of all layers.

    Args:
        held: bytes of each tensor by name, as from `held_bytes`.
    """
    prefixes = tuple(f"model.layers.{layer}." for layer in range(layers.start, layers.stop))
    return sum(n for name, n in held.items() if name.startswith(prefixes) or (edges and not name.startswith("model.layers.")))


def working_bytes(kernels: Kernels, spec: ModelSpec, *, max_rows: int, threads: int, n_blocks: int, logits_rows: int = 0) -> int:
    """Return the most bytes of a runner's working memory.

    Args:
        max_rows: most rows of a batch.
        threads: number of threads that share a step.
        n_blocks: number of KV blocks.
        logits_rows: most rows of a batch with logits; each takes the size of the vocabulary in fp32.
    """
    if kernels.compiled:
        return cpu_working_bytes(spec, max_rows=max_rows, threads=threads, n_blocks=n_blocks, logits_rows=logits_rows)
    working = torch_working_bytes(spec, max_rows=max_rows, n_blocks=n_blocks, logits_rows=logits_rows)
    return working + (segments_bytes(spec, max_rows=max_rows, n_blocks=n_blocks) if kernels is Kernels.CUDA else 0)


def kv_group(kernels: Kernels) -> int:
    """Return the number of KV blocks in a group. A pool allocates memory for whole groups."""
    if kernels.compiled:
        return NEIGHBOURS
    return WIDEST_BLOCK // BLOCK_TOKENS if kernels is Kernels.CUDA else 1


def cutter_of(spec: ModelSpec, threads: int, n_blocks: int) -> Cutter:
    """Return the cutter that splits a model's attention among a number of threads."""
    context = min(spec.max_context, n_blocks * BLOCK)
    return Cutter(spec.n_kv_heads, max(1, spec.n_heads // max(1, spec.n_kv_heads)), threads, math.ceil(context / SEGMENT))


def product_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a task's outputs in its thread's scratch. Unpacked weights follow them."""
    return -(-(4 * PART * max(2 * 16 * CHUNK, spec.head_dim) + 2 * spec.head_dim) // CACHE_LINE) * CACHE_LINE


def thread_bytes(spec: ModelSpec, cutter: Cutter) -> int:
    """Return the bytes of one thread's scratch. It is 128 bytes longer than whole pages, so that threads' scratches use different sets of a cache."""
    attention = scratch_bytes(cutter.most_queries, spec.value_dim)
    low = 0 if spec.low is None else max(spec.low.queries, spec.low.keys)
    product = product_bytes(spec) + expanded_bytes(max(spec.hidden, spec.n_heads * spec.value_dim, spec.ffn_width, low))
    return -(-max(attention, product, 4 * spec.hidden) // 4096) * 4096 + 128


def cpu_working_bytes(
    spec: ModelSpec, *, max_rows: int, threads: int, n_blocks: int, logits_rows: int, inputs: Collection[Inputs] = tuple(Inputs)
) -> int:
    """Return the most bytes of a runner's working memory on compiled kernels.

    Args:
        max_rows: most rows of a batch.
        threads: number of threads that share a step.
        n_blocks: number of KV blocks.
        logits_rows: most rows of a batch with logits; each takes the size of the vocabulary in fp32.
        inputs: the kinds of inputs that the model's matrices take.
    """
    spec = padded(spec)
    cutter = cutter_of(spec, threads, n_blocks)
    queries, low = spec.n_heads * spec.head_dim, spec.low
    context = min(spec.max_context, n_blocks * BLOCK)
    # An upper bound: as if every layer had matrices for each kind of inputs.
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
"""Keys of a segment on a GPU. Lowering it: more of the GPU works for one row, and more means are merged. Any change alters the order of sums."""


def segments_bytes(spec: ModelSpec, *, max_rows: int, n_blocks: int) -> int:
    """Return the bytes that rows and a graph need for the segments of keys on a GPU: queries and means in bf16, and the logarithms of sums in fp32."""
    n_earlier = math.ceil(min(spec.max_context, n_blocks * BLOCK_TOKENS) / KEYS_ON_GPU) - 1
    return (max_rows + 64) * max(0, n_earlier) * spec.n_heads * (4 * spec.head_dim + 4)


def torch_working_bytes(spec: ModelSpec, *, max_rows: int, n_blocks: int, logits_rows: int) -> int:
    """Return the most bytes of a runner's working memory on torch or MLX. The arguments are those of `working_bytes`."""
    width = 4 * spec.hidden + 2 * spec.n_heads * spec.head_dim + 2 * spec.ffn
    context = min(spec.max_context, n_blocks * BLOCK_TOKENS)
    return 4 * (max_rows * width + logits_rows * spec.vocab + 2 * context * spec.head_dim)
