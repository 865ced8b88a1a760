"""From a GGUF header to a `ModelSpec`: sizes, and the rope scaling that llama.cpp bakes into a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.core.model import ModelSpec, MoeSpec, RopeSpec
from paceline.core.rope import inverse_frequencies
from paceline.store.faults import damaged, unsupported
from paceline.store.gguf_header import GgufHeader
from paceline.store.layout import check_sizes

FAMILIES: Final = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""llama.cpp's architecture to Hugging Face's family. Mistral's are `llama` there."""
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def spec_from_gguf(header: GgufHeader, rope_factors: Sequence[float] | None) -> ModelSpec:
    """Sizes of the model in a GGUF file.

    Args:
        header: of the file (the first, of a split model).
        rope_factors: the values of `rope_freqs.weight`, if the file has it.

    Raises:
        ModelFileError: metadata is missing or absurd.
        UnsupportedModel: a family or feature Paceline does not run.
    """
    path = header.path
    arch = header.text("general.architecture")
    if arch is None:
        raise damaged(path, "it does not say which architecture it is (general.architecture)")
    if arch not in FAMILIES:
        raise unsupported(path, f"its architecture is {arch!r}")
    family = FAMILIES[arch]

    def needed(key: str) -> int:
        value = header.integer(f"{arch}.{key}")
        if value is None:
            raise damaged(path, f"metadata {arch}.{key} is missing")
        return value

    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise damaged(path, "tensor token_embd.weight is missing or not a matrix")
    hidden, n_heads = needed("embedding_length"), needed("attention.head_count")
    if n_heads <= 0:
        raise damaged(path, f"it has {n_heads} heads")
    n_kv_heads = header.integer(f"{arch}.attention.head_count_kv")
    head_dim = header.integer(f"{arch}.attention.key_length") or hidden // n_heads
    for key in ("rope.dimension_count", "attention.value_length"):
        if header.integer(f"{arch}.{key}") not in {None, head_dim}:
            raise unsupported(path, f"its {key} differs from its head size {head_dim}")
    eps = header.number(f"{arch}.attention.layer_norm_rms_epsilon")
    if eps is None:
        raise damaged(path, f"metadata {arch}.attention.layer_norm_rms_epsilon is missing")
    context, window = needed("context_length"), header.integer(f"{arch}.attention.sliding_window")
    spec = ModelSpec(
        model_type=family,
        n_layers=needed("block_count"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        head_dim=head_dim,
        ffn=needed("feed_forward_length"),
        vocab=embedding.shape[0],
        # Within one window, sliding attention is plain attention.
        max_context=min(context, window) if window else context,
        rms_eps=eps,
        rope=_rope(header, arch, head_dim, rope_factors),
        tied_head="output.weight" not in header.tensors,
        qkv_bias=family == "qwen2",
        qk_norm=family in {"qwen3", "qwen3_moe"},
        moe=_moe(header, arch),
    )
    check_sizes(path, spec)
    return spec


def _moe(header: GgufHeader, arch: str) -> MoeSpec | None:
    n_experts = header.integer(f"{arch}.expert_count") or 0
    if arch != "qwen3moe":
        if n_experts:
            raise unsupported(header.path, f"a mixture of {n_experts} experts in the {arch} architecture")
        return None
    top_k, ffn = header.integer(f"{arch}.expert_used_count"), header.integer(f"{arch}.expert_feed_forward_length")
    if top_k is None or ffn is None:
        raise damaged(header.path, f"metadata {arch}.expert_used_count or {arch}.expert_feed_forward_length is missing")
    if header.integer(f"{arch}.expert_shared_count"):
        raise unsupported(header.path, "shared experts")
    # llama.cpp always normalises the chosen experts' weights for this architecture.
    return MoeSpec(n_experts, top_k, ffn, norm_topk=True)


def _rope(header: GgufHeader, arch: str, head_dim: int, factors: Sequence[float] | None) -> RopeSpec:
    theta = header.number(f"{arch}.rope.freq_base")
    theta = 10000.0 if theta is None else theta
    scaling = header.text(f"{arch}.rope.scaling.type") or "none"
    factor = header.number(f"{arch}.rope.scaling.factor") or header.number(f"{arch}.rope.scale_linear") or 1.0
    if scaling == "none" and header.number(f"{arch}.rope.scale_linear"):
        scaling = "linear"
    if scaling not in {"none", "linear"}:
        raise unsupported(header.path, f"rope scaling {scaling!r}")
    linear = factor if scaling == "linear" else 1.0
    if factors is None:
        return RopeSpec(theta, linear_factor=linear)
    if not theta > 0 or head_dim <= 0:
        raise damaged(header.path, f"its rope base is {theta}, its head size {head_dim}")
    if len(factors) != head_dim // 2:
        raise damaged(header.path, f"it has {len(factors)} rope factors (rope_freqs.weight) for heads of {head_dim}")
    rope = RopeSpec(theta, llama3=(max(factors), _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT))
    with np.errstate(all="ignore"):  # a damaged factor makes any number
        expected = inverse_frequencies(RopeSpec(theta), head_dim) / inverse_frequencies(rope, head_dim)
    if not np.allclose(expected, factors, rtol=1e-4, atol=0) or linear != 1.0:
        raise unsupported(header.path, "its rope factors (rope_freqs.weight) are not those of Llama 3.1")
    return rope
