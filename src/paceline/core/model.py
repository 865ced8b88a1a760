"""Sizes and shape of a model, without its weights. What engine, fleet and backends agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from paceline.core.ids import NodeId

ARITHMETIC: Final = 2
"""Of `docs/internals/arithmetic.md`. To be raised with every change that changes a byte: a probe sees some shapes, not all."""
BLOCK_TOKENS = 16
"""Tokens of KV that a name stands for, and that a block counts where KV is counted between machines. What a machine keeps together may be more."""
WIDEST_BLOCK = 256
"""Tokens that any machine keeps together, at most. Leases are asked for in whole multiples, so that they are whole blocks for all others too."""


class ActivationDtype(StrEnum):
    """What activations are between stages. All but bf16 are outside the identity promise."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class WeightsFormat(StrEnum):
    """How linear weights are held in memory. Part of what decides a model's bytes."""

    STORED = "stored"
    """Each matrix in the form that keeps what its file holds. Kernels of one form for all hold the uniform format nearest to it."""
    INT4 = "int4"
    """Groups of 32 along the input: 4-bit codes, one scale and one offset a group (GGUF's Q4_1). The head is at least int8."""
    INT8 = "int8"
    """Groups of 32 along the input: 8-bit codes and one scale a group (GGUF's Q8_0)."""
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Weights, and the format that they are held in. Equal ones compute the same with the same kernels, whatever they are called."""

    digest: str
    """SHA-256 of the weights, hex. Empty: not known."""
    weights: str
    """Weights format."""
    name: str = field(default="", compare=False)
    """For people."""

    def __str__(self) -> str:
        return f"{self.digest[:12] or 'no digest'}, {self.weights}"

    def is_same(self, other: ModelRef) -> bool:
        """Whether it is known that both are the same."""
        return self.digest != "" and self == other


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers [start, stop) of a model."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def __str__(self) -> str:
        """First and last, as in a shard's id."""
        return f"{self.start}-{self.stop - 1}"

    @property
    def words(self) -> str:
        """The same for a sentence."""
        return f"{self.start} to {self.stop - 1}" if self.stop - self.start != 1 else str(self.start)

    def within(self, whole: LayerRange) -> slice:
        """Their places in what lies by layer, of a range that has them all."""
        return slice(self.start - whole.start, self.stop - whole.start)


def shard_id(model_id: str, layers: LayerRange) -> str:
    """What layers of a model are called in metrics and messages: `model:first-last`."""
    return f"{model_id}:{layers}"


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """Layers of a model, and the node that runs them, has them or is to have them."""

    node_id: NodeId
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """YaRN's scaling of rope: frequencies of many rotations within the original context stay, those of few are slowed down."""

    factor: float
    original: int
    """Tokens of context that the model was first trained with."""
    fast: float = 32.0
    """Rotations from which on a frequency stays."""
    slow: float = 1.0
    """Rotations up to which it is divided by the factor."""
    whole: bool = True
    """Between the two, the ramp begins and ends at whole frequencies."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, half-split ("NeoX") pairing.

    `llama3` scaling as in Llama 3.1's config: (factor, low_freq_factor, high_freq_factor, original_context).
    """

    theta: float
    llama3: tuple[float, float, float, int] | None = None
    linear_factor: float = 1.0
    dims: int | None = None
    """Of a head that turn, the first ones; None: all."""
    yarn: YarnSpec | None = None
    divisors: tuple[float, ...] = ()
    """Of each frequency, where a model has such."""
    gain: float = 1.0
    """Of what turns: sines and cosines are multiplied by it."""


@dataclass(frozen=True, slots=True)
class LongContext:
    """What a model has for contexts beyond its first (LongRoPE): all positions turn by other divisors then."""

    tokens: int
    rope: RopeSpec


def yarn_gain(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies sines and cosines by, unless a model says it."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_dims(rope: RopeSpec, head_dim: int) -> int:
    """Dimensions of a head that turn, the first ones."""
    return rope.dims or head_dim


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """Layers where a row sees its last keys alone."""

    tokens: int
    """Keys that a row sees there, its own included."""
    layers: tuple[bool, ...]
    """Of the whole model: whether each is one."""
    rope: RopeSpec | None = None
    """Of these layers; None: the model's."""


class Norms(StrEnum):
    """Where a layer's norms stand, of attention and feed-forward."""

    BEFORE = "before"
    AFTER = "after"
    """What is added to the residual is normed, and its inputs are not."""
    AROUND = "around"


class Activation(StrEnum):
    """What becomes of the gate's products."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU, approximated by tanh."""
    CLAMPED = "clamped_silu"
    """gpt-oss's: the gate, 7 at most, times the sigmoid of 1.702 times it, times one more than the up products, which are held within 7 of zero."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Numbers that a family multiplies by."""

    embedding: float = 1.0
    attention: float | None = None
    """The scores; None: one over the root of the head's size."""
    residual: float = 1.0
    """What attention and feed-forward add."""
    logits: float = 1.0


PLAIN = Multipliers()


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts in place of the dense feed-forward: `n_experts` of width `ffn`, `top_k` used a token."""

    n_experts: int
    top_k: int
    ffn: int
    norm_topk: bool
    biased: bool = False
    """The router's products, and each expert's, have biases."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Queries, keys and values that are products of products, with norms between. Of a head the last dimensions turn; those of keys are one part for all
    heads, which comes of the first product.
    """

    queries: int
    """What the first product for queries gives."""
    keys: int
    """What the one for keys and values gives, beside the part that all heads share."""
    value_dim: int
    """Of a head's values."""
    eps: float = 1e-6
    """Of the norms between."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only transformer."""

    model_type: str
    """Hugging Face's name of the family (`store.families`)."""
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_context: int
    rms_eps: float
    rope: RopeSpec
    tied_head: bool
    qkv_bias: bool = False
    out_bias: bool = False
    """The attention output has one."""
    sinks: bool = False
    """Each query head has a score of its own that takes a part of the weights and gives nothing."""
    qk_norm: bool = False
    qk_norm_whole: bool = False
    """Such a norm is over all heads together."""
    moe: MoeSpec | None = None
    window: WindowSpec | None = None
    unturned: tuple[bool, ...] = ()
    """Of the whole model: layers without rope; empty: none is one."""
    norms: Norms = Norms.BEFORE
    activation: Activation = Activation.SILU
    scales: Multipliers = PLAIN
    long: LongContext | None = None
    """Where it has another rope for more than `max_context` tokens."""
    low: LowRank | None = None

    def of_context(self, tokens: int | None) -> ModelSpec:
        """The model as it serves contexts of so many tokens; None: its first."""
        if tokens is None or self.long is None or tokens <= self.max_context:
            return self
        return replace(self, rope=self.long.rope, max_context=self.long.tokens, long=None)

    @property
    def ffn_width(self) -> int:
        """Of a layer's feed-forward; of one expert's, where there are several."""
        return self.ffn if self.moe is None else self.moe.ffn

    @property
    def value_dim(self) -> int:
        """Of a head's values; `head_dim` is that of its queries and keys."""
        return self.head_dim if self.low is None else self.low.value_dim

    @property
    def own_dims(self) -> int:
        """Of a head's key, those that it doesn't share with all others."""
        return self.head_dim if self.low is None else self.head_dim - rotary_dims(self.rope, self.head_dim)

    @property
    def all_layers(self) -> LayerRange:
        return LayerRange(0, self.n_layers)

    def window_of(self, layer: int) -> int:
        """Keys that a row of a layer sees, its own included; 0: all before it."""
        return self.window.tokens if self.window is not None and self.window.layers[layer] else 0

    def rope_of(self, layer: int) -> RopeSpec:
        if self.unturned and self.unturned[layer]:  # frequencies of zero
            return RopeSpec(self.rope.theta, dims=self.rope.dims, divisors=(math.inf,) * (rotary_dims(self.rope, self.head_dim) // 2))
        return (self.window.rope if self.window is not None and self.window.layers[layer] else None) or self.rope

    def kv_bytes_per_token(self, layers: LayerRange) -> int:
        """Bytes of K and V one token takes in `layers`, at bf16."""
        return 2 * self.n_kv_heads * (self.head_dim + self.value_dim) * len(layers)
