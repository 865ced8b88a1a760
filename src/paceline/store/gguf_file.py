"""A GGUF model as a source of tensors under Hugging Face's names.

Quantised blocks are read unchanged; F32, F16 and BF16 become dense tensors. llama.cpp permutes the q and k rows of some architectures for
interleaved rope. `TensorFiles` restores their order when it reads them. It moves whole quantised rows and changes no value.

The `ModelSpec` comes from the header, and from the tensors in which llama.cpp stores rope factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from paceline.core.errors import ModelFileError, UnsupportedModel
from paceline.core.model import LongContext, LowRank, ModelSpec, MoeSpec, Multipliers, RopeSpec, WindowSpec, YarnSpec, yarn_gain
from paceline.core.weights import NORM_NAMES, SINKS, inverse_frequencies
from paceline.store.digests import DigestCache
from paceline.store.families import BY_NAME, Family, Windows, apart, family_of, nearest, scaled_by_depth
from paceline.store.faults import damaged, encoder_alone, unsupported
from paceline.store.gguf_header import ArrayRef, GgufHeader, HeadIncomplete, read_header
from paceline.store.hf_folder import ENCODERS
from paceline.store.tensor_files import MAX_LAYERS, StoredAt, TensorFiles, check_sizes, check_tensors
from paceline.store.tokenizer_files import build_encoder

_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


_UNUSED_BY_DEFAULT: Final = (
    "attn_logit_softcapping", "attention.logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "attention.clamp_kqv",
    "attention.max_alibi_bias", "attention.temperature_scale", "leading_dense_block_count", "expert_group_count",
)  # fmt: skip
"""Metadata keys that must be absent or hold zero: any other number needs a feature that Paceline does not have."""


def spec_from_gguf(header: GgufHeader, rope_factors: Mapping[str, Sequence[float]]) -> ModelSpec:
    """Return the spec of the model in a GGUF file.

    Args:
        header: header of the file (of a split model, the first file), with the tensors of all files.
        rope_factors: values of the tensors that scale rope, by tensor name. A tensor that was not read is missing, and its values are not checked.

    Raises:
        ModelFileError: metadata is missing or absurd.
        UnsupportedModel: the model has a family or feature that Paceline does not run.
    """
    path = header.path
    arch = header.text("general.architecture")
    if arch is None:
        raise damaged(path, "it does not say which architecture it is (general.architecture)")
    if arch in ENCODERS:
        raise encoder_alone(path)
    if header.text("general.type") == "adapter":
        raise UnsupportedModel(f"{path} is an adapter (LoRA), not a model", "Merge it into its base model, and name the result")
    n_experts = header.integer(f"{arch}.expert_count") or 0
    family = family_of(arch, n_experts)
    if family is not None and family.name == "olmo2" and header.integer(f"{arch}.attention.sliding_window"):
        family = BY_NAME["olmo3"]  # under the same name
    if family is None:
        raise unsupported(path, f"its architecture is {arch!r}", nearest(arch))
    for key in _UNUSED_BY_DEFAULT:
        if header.number(f"{arch}.{key}"):
            raise unsupported(path, f"{arch}.{key} is set")

    def needed(key: str) -> int:
        return header.needed(f"{arch}.{key}")

    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise damaged(path, "tensor token_embd.weight is missing or not a matrix")
    hidden, n_heads = needed("embedding_length"), needed("attention.head_count")
    if n_heads <= 0:
        raise damaged(path, f"it has {n_heads} heads")
    n_kv_heads = header.same_integer(f"{arch}.attention.head_count_kv")
    head_dim = header.integer(f"{arch}.attention.key_length") or hidden // n_heads
    value_dim, low = header.integer(f"{arch}.attention.value_length"), None
    if family.low_rank:
        low = LowRank(needed("attention.q_lora_rank"), needed("attention.kv_lora_rank"), value_dim or hidden // n_heads)
    elif value_dim not in {None, head_dim}:
        raise unsupported(path, f"its attention.value_length differs from its head size {head_dim}")
    eps = header.number(f"{arch}.attention.layer_norm_rms_epsilon")
    if eps is None:
        raise damaged(path, f"metadata {arch}.attention.layer_norm_rms_epsilon is missing")
    n_layers = needed("block_count")
    rope, context, long = _rope(header, family, head_dim, rope_factors, needed("context_length"))
    spec = ModelSpec(
        model_type=family.name,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        head_dim=head_dim,
        ffn=needed("feed_forward_length"),
        vocab=embedding.shape[0],
        max_context=context,
        rms_eps=eps,
        rope=rope,
        tied_head="output.weight" not in header.tensors,
        qkv_bias=family.qkv_bias and (not family.defaults.get("attention_bias") or "blk.0.attn_q.bias" in header.tensors),
        out_bias=family.biases,
        sinks=family.sinks,
        qk_norm=family.qk_norm,
        qk_norm_whole=family.qk_norm_whole,
        moe=_moe(header, family, n_experts),
        unturned=_unturned(family, n_layers),
        window=_window(header, family, n_layers, long.tokens if long else context),
        norms=family.norms,
        activation=family.activation,
        scales=_scales(header, family, n_layers, hidden, n_heads),
        long=long,
        low=low,
    )
    check_sizes(path, spec)
    return spec


def _unturned(family: Family, n_layers: int) -> tuple[bool, ...]:
    if not family.unturned_every or n_layers > MAX_LAYERS:
        return ()
    return tuple((layer + 1) % family.unturned_every == 0 for layer in range(n_layers))


def _window(header: GgufHeader, family: Family, n_layers: int, context: int) -> WindowSpec | None:
    tokens = header.integer(f"{family.arch}.attention.sliding_window")
    theta = header.number(f"{family.arch}.rope.freq_base_swa") or family.local_theta
    theta = (header.number(f"{family.arch}.rope.freq_base") or 10000.0) if theta is None and family.plain_windows else theta
    local = None if theta is None else RopeSpec(theta)
    if not tokens or (tokens >= context and local is None) or n_layers > MAX_LAYERS:
        return None
    key = f"{family.arch}.attention.sliding_window_pattern"
    windowed = [True] * n_layers
    if family.windows is Windows.PATTERN:
        if isinstance(header.fields.get(key), ArrayRef):
            windowed = [value != 0 for value in header.numbers(key) or ()]
        else:
            every = header.integer(key) or int(family.defaults["sliding_window_pattern"])
            windowed = [(layer + 1) % every > 0 for layer in range(n_layers)]
    if len(windowed) != n_layers:
        raise damaged(header.path, f"it has {n_layers} layers, and {key} tells of {len(windowed)}")
    return WindowSpec(tokens, tuple(windowed), local)


_GEMMA3_27B = 62
"""Number of layers of Gemma 3 27B. llama.cpp recognizes that model by it, because no field of the file names the model."""


def _scales(header: GgufHeader, family: Family, n_layers: int, hidden: int, n_heads: int) -> Multipliers:
    if family.scaled_by_depth:
        return scaled_by_depth(family.defaults, hidden, n_layers)
    by_hidden = family.name == "gemma3_text" and n_layers == _GEMMA3_27B
    keys = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
    named = [header.number(f"{family.arch}.{key}") for key in keys]
    if not all(value is None or 0 <= value < math.inf for value in named):
        raise damaged(header.path, f"its {', '.join(keys)} are {named}")
    for key, value in zip(keys, named, strict=True):
        if value not in {None, 0, 1} and not family.scaled:
            raise unsupported(header.path, f"{family.arch}.{key} is {value}")
    embedding, attention, residual, logits = named
    attention = (hidden / n_heads) ** -0.5 if by_hidden and hidden > 0 else attention or None
    embedding = max(0, hidden) ** 0.5 if family.root_embedding else embedding
    return Multipliers(embedding or 1.0, attention, residual or 1.0, 1 / (logits or 1.0))


_SOFTMAX: Final = 1
"""llama.cpp's number for a router with a softmax over all experts, the default for files that name no router."""
_SOFTMAX_OF_CHOSEN: Final = 3
"""llama.cpp's number for a softmax over the chosen experts, which equals the other one with normalised weights."""


def _moe(header: GgufHeader, family: Family, n_experts: int) -> MoeSpec | None:
    arch = family.arch
    if not family.expert_width:
        if n_experts:
            raise unsupported(header.path, f"a mixture of {n_experts} experts in the {arch} architecture")
        return None
    of_layer = family.expert_width == "intermediate_size"
    width = f"{arch}.{'' if of_layer else 'expert_'}feed_forward_length"
    top_k, ffn = header.integer(f"{arch}.expert_used_count"), header.integer(width)
    if top_k is None or ffn is None:
        raise damaged(header.path, f"metadata {arch}.expert_used_count or {width} is missing")
    if header.integer(f"{arch}.expert_shared_count"):
        raise unsupported(header.path, "shared experts")
    if (header.integer(f"{arch}.expert_gating_func") or _SOFTMAX) not in {_SOFTMAX, _SOFTMAX_OF_CHOSEN}:
        raise unsupported(header.path, "its router is no softmax")
    # llama.cpp always normalises the chosen experts' weights for these architectures.
    return MoeSpec(n_experts, top_k, ffn, norm_topk=True, biased=family.biases)


def _rope(
    header: GgufHeader, family: Family, head_dim: int, tensors: Mapping[str, Sequence[float]], context: int
) -> tuple[RopeSpec, int, LongContext | None]:
    """Return the rope, the context in tokens that it serves, and the setting for a longer context if there is one."""
    arch = family.arch
    dims, factors = header.integer(f"{arch}.rope.dimension_count"), tensors.get(_ROPE_FREQS)
    if dims == 0:
        raise damaged(header.path, f"{arch}.rope.dimension_count is 0: nothing of a head turns")
    dims = None if dims == head_dim else dims
    theta = header.number(f"{arch}.rope.freq_base")
    theta = 10000.0 if theta is None else theta
    scaling = header.text(f"{arch}.rope.scaling.type") or "none"
    factor = header.number(f"{arch}.rope.scaling.factor") or header.number(f"{arch}.rope.scale_linear") or 1.0
    if scaling == "none" and header.number(f"{arch}.rope.scale_linear"):
        scaling = "linear"
    original = header.integer(f"{arch}.rope.scaling.original_context_length") or context
    said = header.number(f"{arch}.rope.scaling.attn_factor")
    gain = said or 1.0
    if _ROPE_FREQS in header.tensors and (_ROPE_SHORT in header.tensors or scaling == "yarn"):
        raise unsupported(header.path, f"rope factors ({_ROPE_FREQS}) beside rope scaling {scaling!r}")
    if _ROPE_SHORT in header.tensors:
        # A longer context needs other divisors for all positions, so KV that was computed with the first ones could not be used.
        short, further = (
            RopeSpec(theta, dims=dims, divisors=tuple(tensors.get(name, ())), gain=gain) for name in (_ROPE_SHORT, _ROPE_LONG)
        )
        return short, min(context, original), LongContext(context, further) if context > original and _ROPE_LONG in header.tensors else None
    if scaling == "yarn":
        fast, slow = (header.number(f"{arch}.rope.scaling.yarn_beta_{end}") for end in ("fast", "slow"))
        return (
            RopeSpec(
                theta,
                dims=dims,
                yarn=YarnSpec(factor, original, fast or 32.0, slow or 1.0, not family.ramp_between),
                gain=gain if said and family.whole_gain else gain * yarn_gain(factor),
            ),
            context,
            None,
        )
    if scaling not in {"none", "linear"}:
        raise unsupported(header.path, f"rope scaling {scaling!r}")
    linear = factor if scaling == "linear" else 1.0
    if factors is None:
        return RopeSpec(theta, linear_factor=linear, dims=dims), context, None
    turning = head_dim if dims is None else dims
    if not theta > 0 or turning <= 0:
        raise damaged(header.path, f"its rope base is {theta}, and turns {turning} of {head_dim}")
    if 2 * len(factors) != turning:
        raise damaged(header.path, f"it has {len(factors)} rope factors (rope_freqs.weight) for {turning} dimensions that turn")
    rope = RopeSpec(theta, llama3=(max(factors), _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT), dims=dims)
    with np.errstate(all="ignore"):  # a damaged factor may be any number
        expected = inverse_frequencies(RopeSpec(theta, dims=dims), head_dim) / inverse_frequencies(rope, head_dim)
    if not np.allclose(expected, factors, rtol=1e-4, atol=0) or linear != 1.0:
        raise unsupported(header.path, "its rope factors (rope_freqs.weight) are not those of Llama 3.1")
    return rope, context, None


_GLOBAL: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_qkv": "self_attn.qkv_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj", "ffn_gate_up_exps": "gate_up_proj"}
_ROPE_FREQS: Final = "rope_freqs.weight"
_ROPE_SHORT, _ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"


class GgufWeights(TensorFiles):
    """The tensors of one GGUF file, or of all files of a split one."""

    format = "GGUF"

    def __init__(self, headers: Sequence[GgufHeader], digests: DigestCache) -> None:
        """Check the model's tensors against its metadata.

        Raises:
            ModelFileError: tensors are missing or of the wrong shape, or the metadata is absurd.
            UnsupportedModel: the model has a family, feature or tensors that Paceline does not run.
        """
        self.header: Final = headers[0]
        stored = {name: at for header in headers for name, at in header.tensors.items()}
        self._of_rope: Final = {name: stored[name] for name in (_ROPE_FREQS, _ROPE_SHORT, _ROPE_LONG) if name in stored}
        spec = spec_from_gguf(replace(self.header, tensors=stored), {name: _rope_factors(at) for name, at in self._of_rope.items()})
        family, tensors = BY_NAME[spec.model_type], dict(_renamed(stored.values(), spec))
        super().__init__(spec, tensors, [header.path for header in headers], digests, neighbours=family.permuted or family.neighbours)

    @property
    def places(self) -> Mapping[str, StoredAt]:
        return {**super().places, **self._of_rope}


def open_gguf(path: Path, digests: DigestCache) -> GgufWeights:
    """Open a GGUF file. For a split model, `path` is the first file, and the others are opened with it.

    Raises:
        ModelFileError: a file is missing, truncated, damaged or not a GGUF file.
        UnsupportedModel: the model has a family, feature or tensor type that Paceline does not run.
    """
    return GgufWeights(read_parts(path), digests)


def read_parts(path: Path) -> list[GgufHeader]:
    """Read the heads of all files of a model, of which `path` is the first. Nothing is asked of the model's family.

    Raises:
        ModelFileError: a file is missing, truncated, damaged or not a GGUF file.
        UnsupportedModel: Paceline does not read its GGUF version or a tensor type.
    """
    first = read_header(path)
    n_files = first.integer("split.count") or 1
    if n_files == 1:
        return [first]
    tail = f"-00001-of-{n_files:05d}.gguf"
    if first.integer("split.no") != 0 or not path.name.endswith(tail) or n_files > 9999:
        raise _not_first(path, (first.integer("split.no") or 0) + 1, n_files)
    stem = path.name.removesuffix(tail)
    rest = [path.with_name(f"{stem}-{part:05d}-of-{n_files:05d}.gguf") for part in range(2, n_files + 1)]
    missing = [part.name for part in rest if not part.exists()]
    if missing:
        raise ModelFileError(
            f"{path} is the first of {n_files} files of a split model, and not next to it: {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}",
            "Put all files of the model into one folder, under the names they came with",
        )
    return [first, *(read_header(part) for part in rest)]


def _not_first(path: Path, part: int, n_files: int) -> ModelFileError:
    """Return the error for a file of a split model that is not the first, or does not have the name of a first file."""
    first = f"-00001-of-{n_files:05d}.gguf"
    if part == 1:
        hint = f"Give each file the name it came with: it ends in {first} for this one, and all but the numbers are the same"
    else:
        hint = f"Name the first file, which ends in {first}; the others lie next to it"
    return ModelFileError(f"{path} is part {part} of {n_files} of a split model, and its name is not that of a first part", hint)


def check_beginning(path: Path, size: int) -> bool:
    """Check that Paceline can run a model, from the beginning of its file (of a split model, the first file).

    Args:
        path: a file that holds the beginning.
        size: bytes of the whole file.

    Returns:
        True if the beginning was long enough to check.

    Raises:
        ModelFileError: it is not a GGUF file, or its head is damaged.
        UnsupportedModel: the model has a family, feature, tensors or a tokenizer that Paceline does not run, or is an adapter.
    """
    try:
        header = read_header(path, size)
    except HeadIncomplete:
        return False
    if header.text("general.architecture") in ENCODERS:
        return True  # encoders are checked when the file is complete
    if (header.integer("split.count") or 1) == 1:
        # The values of its rope factors are checked when they have been fetched.
        spec = spec_from_gguf(header, {})
        check_tensors(path, spec, {name: at.shape for name, at in _renamed(header.tensors.values(), spec)})
    elif "token_embd.weight" in header.tensors:
        spec_from_gguf(header, {})
    build_encoder(header)
    return True


def _renamed(stored: Iterable[StoredAt], spec: ModelSpec) -> Iterator[tuple[str, StoredAt]]:
    """Yield the tensors under Hugging Face's names. A tensor that has none there keeps its own; rope factors are left out.

    A stack of experts is split only if its height is the spec's number of experts, because a file may claim a stack of any height.
    """
    n_experts = 0 if spec.moe is None else spec.moe.n_experts
    layers = set(map(str, range(spec.n_layers)))
    names = {**_IN_LAYER, "ffn_norm": NORM_NAMES[spec.norms][2]}
    if BY_NAME[spec.model_type].fused:
        names["ffn_up"] = "mlp.gate_up_proj"
    for at in stored:
        stem, _, kind = at.name.rpartition(".")
        layer, _, part = stem.removeprefix("blk.").partition(".") if stem.startswith("blk.") else ("", "", "")
        if stem in _GLOBAL:
            yield f"{_GLOBAL[stem]}.{kind}", at
        elif part == "attn_sinks":
            yield f"model.layers.{layer}.{SINKS}", at
        elif part in _EXPERTS and len(at.shape) == (2 if kind == "bias" else 3) and at.shape[0] == n_experts and layer in layers:
            nbytes = at.nbytes // at.shape[0]
            for expert in range(at.shape[0]):
                slice_ = replace(at, shape=at.shape[1:], offset=at.offset + expert * nbytes, nbytes=nbytes)
                yield from apart(f"model.layers.{layer}.mlp.experts.{expert}.{_EXPERTS[part]}.{kind}", slice_, spec)
        elif (alone := part.rpartition("."))[1] and f"{alone[0]}_exps" in _EXPERTS:  # older files have a tensor for each expert
            yield f"model.layers.{layer}.mlp.experts.{alone[2]}.{_EXPERTS[f'{alone[0]}_exps']}.{kind}", at
        elif part in names:
            yield from apart(f"model.layers.{layer}.{names[part]}.{kind}", at, spec)
        elif at.name not in {_ROPE_FREQS, _ROPE_SHORT, _ROPE_LONG}:
            yield at.name, at


def _rope_factors(at: StoredAt) -> list[float]:
    if at.type.name != "F32" or at.nbytes > 1 << 16:
        raise damaged(at.path, f"tensor {at.name} is of type {at.type.name} and {at.nbytes} bytes")
    return at.read().view(np.float32).tolist()
