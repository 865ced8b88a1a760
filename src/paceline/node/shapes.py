"""What a model takes in memory, by its sizes and its weights format: arithmetic, before anything is loaded."""

from __future__ import annotations

import math

from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import EMBEDDING, HEAD, WeightSource, tensor_shapes
from paceline.fleet.card import ModelShape

_BITS = {WeightsFormat.INT4: 5.0, WeightsFormat.INT8: 8.5, WeightsFormat.BF16: 16.0}
"""Bits a weight takes in memory, its group's scale and offset included."""


def model_shape(spec: ModelSpec, weights: WeightsFormat) -> ModelShape:
    """By layer, as a card says it. All layers count as the average one; the embedding and the head are held at 8 bits or more."""
    bits = _bits(spec, weights)
    in_layers = sum(n for name, n in bits.items() if name.startswith("model.layers."))
    return ModelShape(
        n_layers=spec.n_layers,
        hidden=spec.hidden,
        layer_bytes=math.ceil(in_layers / 8 / spec.n_layers),
        edge_bytes=math.ceil((sum(bits.values()) - in_layers) / 8),
        kv_bytes_per_token_per_layer=spec.kv_bytes_per_token(LayerRange(0, 1)),
        max_context=spec.max_context,
    )


def stored_format(source: WeightSource) -> WeightsFormat:
    """The format nearest to what a file holds: fewer bits would lose, more would only take memory."""
    spec = source.spec
    name = "model.layers.0.self_attn.o_proj.weight"
    bits = 8 * source.nbytes(name) / (spec.hidden * spec.n_heads * spec.head_dim)
    return WeightsFormat.INT4 if bits < 7 else WeightsFormat.INT8 if bits < 12 else WeightsFormat.BF16


def _bits(spec: ModelSpec, weights: WeightsFormat) -> dict[str, float]:
    edge_bits = max(_BITS[weights], _BITS[WeightsFormat.INT8])
    return {
        name: math.prod(shape) * (edge_bits if name in {EMBEDDING, HEAD} else _BITS[weights]) for name, shape in tensor_shapes(spec).items()
    }
