"""What a model takes in memory, tensor by tensor, by the forms it is held in: arithmetic, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paceline.backends.choice import forms_by, held_bytes, part_bytes, torch_bytes, torch_formats
from paceline.backends.table import Kernels
from paceline.backends.working import working_bytes
from paceline.core.model import BLOCK_TOKENS, LayerRange, ModelSpec, WeightsFormat
from paceline.fleet.card import ModelShape
from paceline.fleet.plan import LEAST_ROWS

GPU_SHARE = 0.9
"""Of a GPU's free memory, how much weights may take. Raising it leaves less to KV and to what kernels need while they run."""

CARD_THREADS = 8
CARD_TOKENS = 8192
"""Of KV. What a card says of working memory is for these: every node writes the same card."""

TypeOf = Callable[[str], str]
"""GGML's name of the type a tensor is stored in."""


def weights_bytes(spec: ModelSpec, weights: WeightsFormat, type_of: TypeOf, kernels: Kernels) -> Mapping[str, int]:
    """Bytes of each tensor in memory."""
    if kernels is Kernels.AVX512_BF16:
        return held_bytes(spec, forms_by(weights, type_of))
    return torch_bytes(spec, torch_formats(spec, weights, type_of))


def model_shape(spec: ModelSpec, weights: WeightsFormat, type_of: TypeOf, kernels: Kernels) -> ModelShape:
    """As a card says it. Every layer counts as the largest one: who holds any of them has room."""
    held = weights_bytes(spec, weights, type_of, kernels)
    return ModelShape(
        n_layers=spec.n_layers,
        hidden=spec.hidden,
        layer_bytes=max(part_bytes(held, LayerRange(layer, layer + 1), edges=False) for layer in range(spec.n_layers)),
        edge_bytes=part_bytes(held, LayerRange(0, 0), edges=True),
        kv_bytes_per_token_per_layer=spec.kv_bytes_per_token(LayerRange(0, 1)),
        max_context=spec.max_context,
        row_bytes=max(_row_bytes(spec, each) for each in Kernels),
    )


def _row_bytes(spec: ModelSpec, kernels: Kernels) -> int:
    """Of a stage's working memory, what a row has of a batch of `LEAST_ROWS`. The machine that runs it tells exactly."""
    whole = working_bytes(kernels, spec, max_rows=LEAST_ROWS, threads=CARD_THREADS, n_blocks=CARD_TOKENS // BLOCK_TOKENS)
    return -(-whole // LEAST_ROWS)


def fits_gpu(spec: ModelSpec, type_of: TypeOf, gpu_bytes: int) -> bool:
    """Whether a GPU with so much memory has room for all of a model in bf16."""
    held = weights_bytes(spec, WeightsFormat.BF16, type_of, Kernels.CUDA)
    return part_bytes(held, spec.all_layers, edges=True) <= GPU_SHARE * gpu_bytes
