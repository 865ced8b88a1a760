"""Sizes and shape of a model, without its weights. Engine, fleet and backends share them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from paceline.core.ids import NodeId

ARITHMETIC: Final = 2
"""Version of `docs/internals/arithmetic.md`. Raise it with every change that changes a byte of an answer: the numerics probe covers some shapes only."""
BLOCK_TOKENS = 16
"""Tokens in a block of KV, as prefix keys name it and as machines count KV between them. A machine's own blocks may hold more."""
WIDEST_BLOCK = 256
"""Largest number of tokens in any machine's own block. Leases are requested in whole multiples, so that they are whole blocks for every machine."""


class ActivationDtype(StrEnum):
    """Number format of activations between stages. Only bf16 is covered by the identity promise."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class WeightsFormat(StrEnum):
    """Format of linear weights in memory. It is one of the things that decide a model's bytes."""

    STORED = "stored"
    """Each matrix in the form that keeps the values of its file. Kernels with one form for all matrices hold the uniform format nearest to the file's."""
    INT4 = "int4"
    """Groups of 32 along the input: 4-bit codes, one scale and one offset a group (GGUF's Q4_1). The head is at least int8."""
    INT8 = "int8"
    """Groups of 32 along the input: 8-bit codes and one scale a group (GGUF's Q8_0)."""
    BF16 = "bf16"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Weights and their format in memory. Equal references compute the same bytes with the same kernels, under whatever name."""

    digest: str
    """SHA-256 of the weights, hex. Empty: not known."""
    weights: str
    """The `WeightsFormat` in memory."""
    name: str = field(default="", compare=False)
    """The model's name, for display only."""

    def __str__(self) -> str:
        return f"{self.digest[:12] or 'no digest'}, {self.weights}"

    def is_same(self, other: ModelRef) -> bool:
        """Return whether both are known to be the same. An unknown digest is never the same."""
        return self.digest != "" and self == other

    @property
    def has_digest(self) -> bool:
        """Return whether the digest is one of the weights. One that is unknown, or was made from the name, is not."""
        return self.digest not in {"", digest_of_name(self.name, self.weights)}


def digest_of_name(name: str, weights: str) -> str:
    """Return the digest, hex, that stands for a model of which only its name and quantisation are known, as of an engine of another maker."""
    return hashlib.sha256(f"name\0{name}\0{weights}".encode()).hexdigest()


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
        """Return the first and the last layer, as in a shard's id."""
        return f"{self.start}-{self.stop - 1}"

    @property
    def words(self) -> str:
        """The layers for use in a sentence, such as "3 to 5" or "4"."""
        return f"{self.start} to {self.stop - 1}" if self.stop - self.start != 1 else str(self.start)

    def within(self, whole: LayerRange) -> slice:
        """Return the slice of these layers in a list that holds the layers of `whole`, which must include them."""
        return slice(self.start - whole.start, self.stop - whole.start)


def shard_id(model_id: str, layers: LayerRange) -> str:
    """Return the name of a shard in metrics and messages: `model:first-last`."""
    return f"{model_id}:{layers}"


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """A range of layers, and the node that runs or stores them, or will."""

    node_id: NodeId
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class YarnSpec:
    """YaRN's scaling of rope. Frequencies with many rotations in the original context are kept; those with few are slowed down."""

    factor: float
    original: int
    """Tokens of context that the model was first trained with."""
    fast: float = 32.0
    """Number of rotations from which a frequency is kept."""
    slow: float = 1.0
    """Number of rotations up to which a frequency is divided by the factor."""
    whole: bool = True
    """The ramp between the two begins and ends at whole frequencies."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding, half-split ("NeoX") pairing.

    `llama3` scaling as in Llama 3.1's config: (factor, low_freq_factor, high_freq_factor, original_context).
    """

    theta: float
    llama3: tuple[float, float, float, int] | None = None
    linear_factor: float = 1.0
    dims: int | None = None
    """Number of leading dimensions of a head that are rotated; None: all."""
    yarn: YarnSpec | None = None
    divisors: tuple[float, ...] = ()
    """Divisor of each frequency; empty: none."""
    gain: float = 1.0
    """Factor on the sines and cosines."""


@dataclass(frozen=True, slots=True)
class LongContext:
    """The rope of a model for contexts longer than its first (LongRoPE). All positions then use these divisors."""

    tokens: int
    rope: RopeSpec


def yarn_gain(factor: float, weight: float = 1.0) -> float:
    """Return the factor that YaRN applies to sines and cosines, for models that do not name their own."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_dims(rope: RopeSpec, head_dim: int) -> int:
    """Return the number of leading dimensions of a head that are rotated."""
    return rope.dims or head_dim


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """Sliding-window layers: a row attends only to the last keys."""

    tokens: int
    """Keys that a row attends to there, its own included."""
    layers: tuple[bool, ...]
    """One flag for each layer of the whole model: True for a sliding-window layer."""
    rope: RopeSpec | None = None
    """Rope of the sliding-window layers; None: the model's rope."""


class Norms(StrEnum):
    """Positions of a layer's norms, for attention and feed-forward."""

    BEFORE = "before"
    AFTER = "after"
    """The output is normed before it is added to the residual; the input is not."""
    AROUND = "around"


class Activation(StrEnum):
    """The activation function of the feed-forward's gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    """GELU, approximated by tanh."""
    CLAMPED = "clamped_silu"
    """The activation of gpt-oss. The gate g is clamped to at most 7 and the up product u to [-7, 7]; the result is g * sigmoid(1.702 * g) * (u + 1)."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constant factors of a model family."""

    embedding: float = 1.0
    attention: float | None = None
    """Factor on the attention scores; None: one over the square root of the head's size."""
    residual: float = 1.0
    """Factor on the outputs of attention and feed-forward, before they are added to the residual."""
    logits: float = 1.0


PLAIN = Multipliers()


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Mixture of experts in place of the dense feed-forward: `n_experts` of width `ffn`, `top_k` used for each token."""

    n_experts: int
    top_k: int
    ffn: int
    norm_topk: bool
    biased: bool = False
    """The router and each expert have biases."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank attention projections (multi-head latent attention): queries, and keys with values, are each the product of two matrices with a norm between.
    Rope rotates the last dimensions of a head. For keys these dimensions are one part shared by all heads, which comes from the first product.
    """

    queries: int
    """Output size of the first product for queries."""
    keys: int
    """Output size of the first product for keys and values, without the part that all heads share."""
    value_dim: int
    """Dimensions of a head's values."""
    eps: float = 1e-6
    """Epsilon of the norms between the two products."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of a decoder-only transformer."""

    model_type: str
    """Hugging Face's name of the model family (see `store.families`)."""
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
    """The attention output projection has a bias."""
    sinks: bool = False
    """Each query head has an attention sink: a learned score that takes a share of the softmax and adds no value."""
    qk_norm: bool = False
    qk_norm_whole: bool = False
    """The query and key norms span all heads together; otherwise each head."""
    moe: MoeSpec | None = None
    window: WindowSpec | None = None
    unturned: tuple[bool, ...] = ()
    """One flag for each layer of the whole model: True for a layer without rope. Empty: all layers have rope."""
    norms: Norms = Norms.BEFORE
    activation: Activation = Activation.SILU
    scales: Multipliers = PLAIN
    long: LongContext | None = None
    """The model's other rope for contexts beyond `max_context` tokens; None: it has none."""
    low: LowRank | None = None

    def of_context(self, tokens: int | None) -> ModelSpec:
        """Return the model as it serves contexts of `tokens` tokens; None: its first context length."""
        if tokens is None or self.long is None or tokens <= self.max_context:
            return self
        return replace(self, rope=self.long.rope, max_context=self.long.tokens, long=None)

    @property
    def ffn_width(self) -> int:
        """Width of a layer's feed-forward, or of one expert in a mixture."""
        return self.ffn if self.moe is None else self.moe.ffn

    @property
    def value_dim(self) -> int:
        """Dimensions of a head's values; `head_dim` is the size of its queries and keys."""
        return self.head_dim if self.low is None else self.low.value_dim

    @property
    def own_dims(self) -> int:
        """Dimensions of a head's key that are its own, not shared with all other heads."""
        return self.head_dim if self.low is None else self.head_dim - rotary_dims(self.rope, self.head_dim)

    @property
    def all_layers(self) -> LayerRange:
        return LayerRange(0, self.n_layers)

    def window_of(self, layer: int) -> int:
        """Return how many keys a row of the layer attends to, its own included; 0: all before it."""
        return self.window.tokens if self.window is not None and self.window.layers[layer] else 0

    def rope_of(self, layer: int) -> RopeSpec:
        if self.unturned and self.unturned[layer]:  # frequencies of zero
            return RopeSpec(self.rope.theta, dims=self.rope.dims, divisors=(math.inf,) * (rotary_dims(self.rope, self.head_dim) // 2))
        return (self.window.rope if self.window is not None and self.window.layers[layer] else None) or self.rope

    def kv_bytes_per_token(self, layers: LayerRange) -> int:
        """Return the bytes that K and V of one token take in `layers`, at bf16."""
        return 2 * self.n_kv_heads * (self.head_dim + self.value_dim) * len(layers)
