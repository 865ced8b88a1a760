"""The families that run here: where each differs from Llama, and the names that its files use.

A family is a row of `FAMILIES`. Sizes, windows and scales come from a model's own files; a row adds what these leave out. Tensors get the names of
`core.weights`, fused matrices are split, and rows are put in the order of half-split rope. So behind a source, families differ only by their spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from paceline.core.model import Activation, ModelSpec, Multipliers, Norms

if TYPE_CHECKING:
    from paceline.store.tensor_files import StoredAt


class Windows(Enum):
    """The layers that have a sliding window, for configurations that do not list them (`layer_types`)."""

    ALL = auto()
    LATER = auto()
    """All layers from `max_window_layers` on, if `use_sliding_window` is set."""
    PATTERN = auto()
    """All layers but every n-th, where n is `sliding_window_pattern`."""


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of a model that follow from the name of its family."""

    name: str
    """Hugging Face's `model_type`."""
    arch: str
    """llama.cpp's name, in `general.architecture` of GGUF files."""
    shown: str
    """Names of its models, for people."""
    norms: Norms = Norms.BEFORE
    activation: Activation = Activation.SILU
    windows: Windows = Windows.ALL
    qkv_bias: bool = False
    biases: bool = False
    """The attention output, the router and the experts have biases too."""
    sinks: bool = False
    unturned_every: int = 0
    """Every n-th layer has no rope; 0: all layers have it."""
    plain_windows: bool = False
    """Layers with a window use the same rope, but without its scaling."""
    ramp_between: bool = False
    """The ends of YaRN's ramp are not rounded to whole frequencies. GGUF files have no field for this."""
    whole_gain: bool = False
    """The YaRN factor in a GGUF file is the whole factor of sines and cosines. In other families it multiplies the gain that YaRN computes.
    llama.cpp's converter writes transformers' attention_factor there; llama.cpp multiplies by both, and so differs from the model."""
    qk_norm: bool = False
    qk_norm_whole: bool = False
    root_embedding: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    scaled: bool = False
    """The files give the factors of the embedding, the scores, the residual and the logits."""
    scaled_by_depth: bool = False
    """The residual's factor is a number over the square root of the number of layers, and the logits' factor a number over the hidden size. GGUF files
    leave both out."""
    low_rank: bool = False
    """Queries, keys and values are each computed by two matrices of low rank (see `LowRank`)."""
    permuted: bool = False
    """llama.cpp's converter reorders rows so that the two rows of a rope pair are neighbours."""
    neighbours: bool = False
    """The two rows of a rope pair are neighbours in every file, safetensors too."""
    fused: bool = False
    """llama.cpp's ffn_up holds both gate and up."""
    expert_width: str = ""
    """Field of config.json that holds the width of an expert. Empty: the layers are not mixtures of experts."""
    norms_less_one: bool = False
    """Safetensors hold the norms' weights minus one."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of the fields that a config.json may leave out."""
    local_theta: float | None = None
    """Rope base of layers with a window, for GGUF files that do not have it."""
    example: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of a config.json, with values, that this family needs and others lack: for the list of supported families."""
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Our words in the names of a layer's tensors, by the words of safetensors, where they differ."""


_GEMMA3: Final = {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 262_208, "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
"""Defaults of transformers' Gemma3TextConfig: files leave out fields that have these values."""

_GPT_OSS: Final = {
    "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "sliding_window_pattern": 2, "norm_topk_prob": True,
    "attention_bias": True,
}  # fmt: skip
_MINICPM3: Final = {
    "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
_MIXTRAL: Final = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_GLM4: Final = {
    "post_self_attn_layernorm": "post_attention_layernorm", "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}  # fmt: skip

FAMILIES: Final = (
    Family("llama", "llama", "Llama 1 to 3.3, SmolLM2, TinyLlama", permuted=True),
    Family("mistral", "llama", "Mistral 7B, Mistral Nemo and Small", permuted=True, defaults={"sliding_window": 4096}),
    Family("ministral", "llama", "Ministral 8B", permuted=True, defaults={"sliding_window": 4096}),
    Family("mixtral", "llama", "Mixtral 8x7B, 8x22B, and mixtures of Llamas", permuted=True, expert_width="intermediate_size",
           defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": True}, tensors=_MIXTRAL),
    Family("qwen2", "qwen2", "Qwen2, Qwen2.5", windows=Windows.LATER, qkv_bias=True),
    Family("qwen3", "qwen3", "Qwen3", windows=Windows.LATER, qk_norm=True),
    Family("qwen3_moe", "qwen3moe", "Qwen3-MoE: 30B-A3B, 235B-A22B", windows=Windows.LATER, qk_norm=True,
           expert_width="moe_intermediate_size"),
    Family("gemma3_text", "gemma3", "Gemma 3: 270M to 27B, texts alone", Norms.AROUND, Activation.GELU_TANH, Windows.PATTERN, qk_norm=True,
           root_embedding=True, norms_less_one=True, defaults=_GEMMA3, local_theta=1e4),
    Family("olmo2", "olmo2", "OLMo 2", Norms.AFTER, qk_norm=True, qk_norm_whole=True, defaults={"rms_norm_eps": 1e-5}),
    Family("olmo3", "olmo2", "OLMo 3", Norms.AFTER, windows=Windows.PATTERN, qk_norm=True, qk_norm_whole=True, plain_windows=True,
           whole_gain=True, defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4}),
    Family("phi3", "phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini", fused=True, defaults={"rms_norm_eps": 1e-5}),
    Family("granite", "granite", "Granite 3, dense", permuted=True, scaled=True, example={"embedding_multiplier": 12.0}),
    Family("glm4", "glm4", "GLM-4-0414: 9B, 32B", Norms.AROUND, qkv_bias=True, neighbours=True, fused=True,
           defaults={"partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-7}, tensors=_GLM4),
    Family("smollm3", "smollm3", "SmolLM3", permuted=True, unturned_every=4,
           defaults={"rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True}),
    Family("seed_oss", "seed_oss", "Seed-OSS", qkv_bias=True, defaults={"attention_bias": True, "head_dim": 128}),
    Family("minicpm3", "minicpm3", "MiniCPM 3", scaled_by_depth=True, low_rank=True, defaults=_MINICPM3, example={"num_key_value_heads": 8}),
    Family("qwen3_vl_text", "qwen3vl", "Qwen3-VL, texts alone", windows=Windows.LATER, qk_norm=True),
    Family("gpt_oss", "gpt-oss", "gpt-oss: 20B, 120B", activation=Activation.CLAMPED, windows=Windows.PATTERN, qkv_bias=True, biases=True,
           sinks=True, ramp_between=True, expert_width="intermediate_size", defaults=_GPT_OSS, tensors={"router": "gate"}),
)  # fmt: skip

BY_NAME: Final = {family.name: family for family in FAMILIES}
BY_ARCH: Final = {family.arch: family for family in reversed(FAMILIES)}
"""Families by architecture: the first one, where several share it."""


BY_DEPTH: Final = ("scale_emb", "scale_depth", "dim_model_base")


def scaled_by_depth(named: Mapping[str, float | None], hidden: int, n_layers: int) -> Multipliers:
    """Return the multipliers that the fields `BY_DEPTH` stand for. A field that is None does not scale."""
    embedding, depth, base = (named[key] for key in BY_DEPTH)
    residual = 1.0 if depth is None or n_layers <= 0 else depth / math.sqrt(n_layers)
    return Multipliers(embedding or 1.0, None, residual, 1.0 if base is None or hidden <= 0 else base / hidden)


def family_of(arch: str, n_experts: int) -> Family | None:
    """Return the family of a GGUF file: the first of its architecture that has experts if the file has some, and none if it has none.

    If no family fits in this, it is the first of the architecture; None for an unknown architecture.
    """
    of_arch = (family for family in FAMILIES if family.arch == arch and bool(family.expert_width) == (n_experts > 0))
    return next(of_arch, BY_ARCH.get(arch))


def nearest(name: str) -> str:
    """Return the family with the name most like an unknown one, as people call it; empty if no name is close (llama and mamba, at 0.6, are not)."""
    names = [*BY_NAME, *BY_ARCH]
    found = get_close_matches(name.lower(), names, 1, cutoff=0.65)
    return (BY_NAME.get(found[0]) or BY_ARCH[found[0]]).shown if found else ""


def apart(name: str, at: StoredAt, spec: ModelSpec) -> Iterator[tuple[str, StoredAt]]:
    """Yield a tensor under our names: a fused matrix (or bias) of the right height as its parts, any other tensor unchanged."""
    stem, _, kind = name.rpartition(".")
    before, _, part = stem.rpartition(".")
    heads, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    width = spec.ffn_width
    parts = {
        "qkv_proj": (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)),
        "gate_up_proj": (("gate_proj", width), ("up_proj", width)),
    }.get(part, ())
    if not parts or not at.shape or at.shape[0] != sum(rows for _, rows in parts):
        yield name, at
        return
    start = 0
    for own, rows in parts:
        yield f"{before}.{own}.{kind}", at.rows(start, start + rows)
        start += rows
