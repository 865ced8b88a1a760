"""Models of any size with seeded random weights, whose outputs stay in range: what tests and benchmarks use where no real model of that size is.

Law: a file's bytes follow from shape, types and seed; a tensor's from its name, shape, type and seed, so that a model of fewer layers has
the first layers of the whole one. The residual grows by a bounded factor over any number of layers, attention prefers some keys, and
logits have a deviation of 3, so that greedy answers go on and sampling has something to choose. Control tokens are
hardly ever drawn: answers end where they are told to.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
from tests.fakes.seeded_blocks import DENSE, Bytes, random_tensor
from tests.fakes.seeded_vocabulary import SeededVocabulary, vocabulary

from paceline.core.model import Activation, LowRank, ModelSpec, MoeSpec, RopeSpec, WindowSpec, YarnSpec, rotary_dims, yarn_gain
from paceline.core.weights import TENSOR_TYPES, inverse_frequencies
from paceline.store.families import BY_NAME, scaled_by_depth

_LLAMA3: Final = RopeSpec(500_000.0, llama3=(8.0, 1.0, 4.0, 8192))
_QWEN3: Final = RopeSpec(1_000_000.0)
_GPT_OSS: Final = RopeSpec(150_000.0, yarn=YarnSpec(32.0, 4096, whole=False), gain=yarn_gain(32.0))
TINY: Final = ModelSpec("llama", 2, 256, 4, 2, 64, 512, 1024, 4096, 1e-5, RopeSpec(10_000.0), tied_head=False)
PRESETS: Final = {
    "tiny": TINY,
    "llama-1b": ModelSpec("llama", 16, 2048, 32, 8, 64, 8192, 128_256, 131_072, 1e-5, _LLAMA3, tied_head=True),
    "llama-8b": ModelSpec("llama", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072, 1e-5, _LLAMA3, tied_head=False),
    "qwen3-8b": ModelSpec("qwen3", 36, 4096, 32, 8, 128, 12_288, 151_936, 40_960, 1e-6, _QWEN3, tied_head=False, qk_norm=True),
    "qwen3-30b-a3b": ModelSpec(
        "qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151_936, 40_960, 1e-6, _QWEN3, tied_head=False, qk_norm=True, moe=MoeSpec(128, 8, 768, norm_topk=True),
    ),
    "minicpm3-4b": ModelSpec(
        "minicpm3", 62, 2560, 40, 40, 96, 6400, 73_448, 32_768, 1e-5, RopeSpec(10_000.0, dims=32), tied_head=True, low=LowRank(768, 256, 64),
        scales=scaled_by_depth(BY_NAME["minicpm3"].defaults, 2560, 62),
    ),
    "gpt-oss-20b": ModelSpec(
        "gpt_oss", 24, 2880, 64, 8, 64, 2880, 201_088, 131_072, 1e-5, _GPT_OSS, tied_head=False, qkv_bias=True, out_bias=True, sinks=True,
        moe=MoeSpec(32, 4, 2880, norm_topk=True, biased=True), window=WindowSpec(128, (True, False) * 12), activation=Activation.CLAMPED,
    ),
}  # fmt: skip
"""The shapes of models people run, by their sizes in their own configurations."""
MIXES: Final = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K"), "MXFP4_MOE": ("MXFP4", "Q8_0")}
"""Type of most tensors, and of those that llama.cpp's quantiser gives more bits; of gpt-oss, of experts and of the rest."""
_NARROW: Final = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp's quantiser takes where a row is no multiple of 256."""
_LOGIT_SPREAD: Final = 3.0
_SCORE_GAINS: Final = (2.0, 1.5)
"""Of queries and keys: their products, over the root of the head's size, have the product of these as their deviation."""
_EMBEDDING_SPREAD: Final = 0.5
_ALIGNMENT: Final = 32


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written, under llama.cpp's name."""

    name: str
    shape: tuple[int, ...]
    spread: float
    """Standard deviation of its weights; 0 for a norm, which is `level` within a tenth."""
    level: float = 0.0
    signs: bool = False
    """A norm with entries of both signs."""
    quiet_rows: int = 0
    """The first so many rows are an eighth as large: the head's for control tokens."""


def tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """All weights of a model, in the order llama.cpp writes them."""
    hidden, heads, kv, dim = spec.hidden, spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim, spec.head_dim
    root = 1 / math.sqrt(hidden)
    branch = 1.5 / math.sqrt(2 * spec.n_layers) / spec.scales.residual
    """Each of attention and feed-forward adds so much of the normed residual's size."""
    q_gain, k_gain = (1.0, 1.0) if spec.qk_norm else _SCORE_GAINS
    spread = _EMBEDDING_SPREAD / spec.scales.embedding
    yield Tensor("token_embd.weight", (spec.vocab, hidden), spread)
    for layer in range(spec.n_layers):
        at = f"blk.{layer}"
        yield Tensor(f"{at}.attn_norm.weight", (hidden,), 0, level=1.0)
        if (low := spec.low) is None:
            yield Tensor(f"{at}.attn_q.weight", (heads, hidden), q_gain * root)
            yield Tensor(f"{at}.attn_k.weight", (kv, hidden), k_gain * root)
            yield Tensor(f"{at}.attn_v.weight", (kv, hidden), root)
        else:
            outputs = spec.own_dims + spec.value_dim
            yield Tensor(f"{at}.attn_q_a.weight", (low.queries, hidden), root)
            yield Tensor(f"{at}.attn_q_a_norm.weight", (low.queries,), 0, level=1.0)
            yield Tensor(f"{at}.attn_q_b.weight", (heads, low.queries), q_gain * k_gain / math.sqrt(low.queries))
            yield Tensor(f"{at}.attn_kv_a_mqa.weight", (low.keys + dim - spec.own_dims, hidden), root)
            yield Tensor(f"{at}.attn_kv_a_norm.weight", (low.keys,), 0, level=1.0)
            yield Tensor(f"{at}.attn_kv_b.weight", (spec.n_kv_heads * outputs, low.keys), 1 / math.sqrt(low.keys))
        if spec.qkv_bias:
            for part, rows in (("q", heads), ("k", kv), ("v", kv)):
                yield Tensor(f"{at}.attn_{part}.bias", (rows,), 0.1)
        if spec.qk_norm:
            yield Tensor(f"{at}.attn_q_norm.weight", (dim,), 0, level=_SCORE_GAINS[0])
            yield Tensor(f"{at}.attn_k_norm.weight", (dim,), 0, level=_SCORE_GAINS[1])
        attended = spec.n_heads * spec.value_dim
        yield Tensor(f"{at}.attn_output.weight", (hidden, attended), branch / math.sqrt(attended))
        if spec.out_bias:
            yield Tensor(f"{at}.attn_output.bias", (hidden,), branch / 10)
        if spec.sinks:
            yield Tensor(f"{at}.attn_sinks.weight", (spec.n_heads,), 1.0)
        yield Tensor(f"{at}.{'post_attention' if spec.model_type == 'gpt_oss' else 'ffn'}_norm.weight", (hidden,), 0, level=1.0)
        ffn, stack, ending = (spec.ffn, (), "") if spec.moe is None else (spec.moe.ffn, (spec.moe.n_experts,), "_exps")
        if spec.moe is not None:
            yield Tensor(f"{at}.ffn_gate_inp.weight", (spec.moe.n_experts, hidden), 2 * root)
        yield Tensor(f"{at}.ffn_gate{ending}.weight", (*stack, ffn, hidden), root)
        yield Tensor(f"{at}.ffn_up{ending}.weight", (*stack, ffn, hidden), root)
        # silu(gate) * up of two normal numbers has a deviation of 0.6.
        yield Tensor(f"{at}.ffn_down{ending}.weight", (*stack, hidden, ffn), branch / 0.6 / math.sqrt(ffn))
        if spec.moe is not None and spec.moe.biased:
            yield Tensor(f"{at}.ffn_gate_inp.bias", (spec.moe.n_experts,), 0.1)
            for part, size in (("gate", ffn), ("up", ffn), ("down", hidden)):
                yield Tensor(f"{at}.ffn_{part}_exps.bias", (*stack, size), branch / 10 if part == "down" else 0.1)
    if spec.tied_head:
        # With signs, a token's own logit is no larger than others': it would be drawn again and again.
        yield Tensor("output_norm.weight", (hidden,), 0, level=_LOGIT_SPREAD * root / spread / spec.scales.logits, signs=True)
    else:
        yield Tensor("output_norm.weight", (hidden,), 0, level=1.0)
        yield Tensor("output.weight", (spec.vocab, hidden), _LOGIT_SPREAD * root)


def stored_type(tensor: Tensor, spec: ModelSpec, types: str) -> str:
    """A tensor's GGML type in a file of `types`: a mix, chosen as llama.cpp's quantiser does, or one type for all matrices."""
    if len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name or tensor.name.endswith("bias"):
        return "F32"
    chosen = types
    if types in MIXES:
        most, more = MIXES[types]
        last = "token_embd.weight" if spec.tied_head else "output.weight"
        generous = tensor.name == last or (
            ("attn_v" in tensor.name or "ffn_down" in tensor.name) and _more_bits(tensor.name, spec.n_layers)
        )
        if types == "MXFP4_MOE":
            generous = "_exps" not in tensor.name
        chosen = more if generous else most
    if tensor.shape[-1] % TENSOR_TYPES[chosen].block == 0:
        return chosen
    narrow = _NARROW.get(chosen, "F16")
    return narrow if tensor.shape[-1] % TENSOR_TYPES[narrow].block == 0 else "F16"


def _more_bits(name: str, n_layers: int) -> bool:
    """Source: `use_more_bits` in llama.cpp's quantiser: the first and last eighth of the layers, and every third between."""
    layer, eighth = int(name.split(".")[1]), n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def write_gguf(path: Path, spec: ModelSpec, types: str = "Q4_K_M", seed: int = 0) -> Path:
    """Write a GGUF file that Paceline and llama.cpp load, with the bundled model's tokenizer; under another name until it is whole.

    Args:
        types: a mix of `MIXES`, or a GGML type for all matrices.
        seed: what weights follow from.
    """
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    arch = BY_NAME[spec.model_type].arch
    writer = gguf.GGUFWriter(partial, arch)
    words = vocabulary(spec.vocab)
    _add_metadata(writer, spec, words, path.stem)
    plan = [(tensor, stored_type(tensor, spec, types)) for tensor in tensors(spec)]
    if spec.rope.llama3 is not None:
        plan.insert(1, (Tensor("rope_freqs.weight", (spec.head_dim // 2,), 0), "F32"))
    for tensor, kind in plan:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), _n_bytes(tensor, kind), raw_dtype=gguf.GGMLQuantizationType[kind]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with partial.open("ab") as file:
        for tensor, kind in plan:
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            for piece in _bytes_of(tensor, kind, spec, seed, words.n_control):
                file.write(piece.data)
        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    return partial.replace(path)


def write_folder(path: Path, spec: ModelSpec, kind: str = "BF16", seed: int = 0) -> Path:
    """Write the same as a folder: config.json, model.safetensors of one dense type, and the tokenizer. Families without experts alone."""
    path.mkdir(parents=True, exist_ok=True)
    words = vocabulary(spec.vocab)
    words.save(path)
    config: dict[str, object] = {
        "model_type": spec.model_type, "hidden_size": spec.hidden, "num_hidden_layers": spec.n_layers, "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads, "head_dim": spec.head_dim, "intermediate_size": spec.ffn, "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_context, "rms_norm_eps": spec.rms_eps, "rope_theta": spec.rope.theta, "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_head, "eos_token_id": words.eos, "bos_token_id": words.bos,
    }  # fmt: skip
    if spec.rope.llama3 is not None:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        config["rope_scaling"] = {"rope_type": "llama3", **dict(zip(names, spec.rope.llama3, strict=True))}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors(spec):
        size = _n_bytes(tensor, kind)
        head[_hugging_face_name(tensor.name)] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [at, at + size]}
        at += size
    packed = json.dumps(head).encode()
    packed += b" " * (-len(packed) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        for tensor in tensors(spec):
            for piece in _bytes_of(tensor, kind, spec, seed, words.n_control):
                file.write(piece.data)
    return path


def _add_metadata(writer: Any, spec: ModelSpec, words: SeededVocabulary, name: str) -> None:
    """What describes the model, for a gguf.GGUFWriter."""
    writer.add_name(name)
    writer.add_block_count(spec.n_layers)
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.value_dim)
    writer.add_rope_dimension_count(rotary_dims(spec.rope, spec.head_dim))
    if spec.low is not None:
        writer.add_q_lora_rank(spec.low.queries)
        writer.add_kv_lora_rank(spec.low.keys)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_layer_norm_rms_eps(spec.rms_eps)
    writer.add_vocab_size(spec.vocab)
    if spec.moe is not None:
        writer.add_expert_count(spec.moe.n_experts)
        writer.add_expert_used_count(spec.moe.top_k)
        writer.add_expert_feed_forward_length(spec.moe.ffn)
    if spec.window is not None:
        writer.add_sliding_window(spec.window.tokens)
    if spec.rope.yarn is not None:
        writer.add_string(f"{BY_NAME[spec.model_type].arch}.rope.scaling.type", "yarn")
        writer.add_rope_scaling_factor(spec.rope.yarn.factor)
        writer.add_rope_scaling_orig_ctx_len(spec.rope.yarn.original)
    add_words(writer, words)


def add_words(writer: Any, words: SeededVocabulary) -> None:
    """Add a tokenizer and its chat template to a gguf.GGUFWriter."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.cut)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.kinds)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.bos)
    writer.add_eos_token_id(words.eos)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(words.template)


def _hugging_face_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[stem] + f".{kind}"
    _, layer, part = stem.split(".")
    if part in {"attn_norm", "ffn_norm"}:
        return f"model.layers.{layer}.{'input_layernorm' if part == 'attn_norm' else 'post_attention_layernorm'}.{kind}"
    room, _, rest = part.partition("_")
    if room == "ffn":
        return f"model.layers.{layer}.mlp.{rest}_proj.{kind}"
    return f"model.layers.{layer}.self_attn.{rest if rest.endswith('_norm') else f'{rest[0]}_proj'}.{kind}"


def shape(preset: str, **changes: int) -> ModelSpec:
    """A preset's sizes, some of them changed: `shape("llama-8b", n_layers=4)`."""
    return replace(PRESETS[preset], **changes)


def _n_bytes(tensor: Tensor, kind: str) -> int:
    return TENSOR_TYPES[kind].row_bytes(math.prod(tensor.shape))


def _bytes_of(tensor: Tensor, kind: str, spec: ModelSpec, seed: int, n_control: int) -> Iterator[Bytes]:
    if tensor.name == "rope_freqs.weight":
        factors = inverse_frequencies(RopeSpec(spec.rope.theta), spec.head_dim) / inverse_frequencies(spec.rope, spec.head_dim)
        yield factors.astype(np.float32).view(np.uint8)
        return
    seeds = (seed, crc32(tensor.name.encode()))
    if tensor.spread:
        head = tensor.name == ("token_embd.weight" if spec.tied_head else "output.weight")
        yield from random_tensor(kind, tensor.shape, tensor.spread, seeds, quiet_rows=n_control if head else 0)
        return
    drawn = np.concatenate(list(random_tensor("F32", tensor.shape, 1.0, seeds))).view(np.float32)
    values = tensor.level * (1 + np.clip(drawn, -1, 1) / 10)
    if tensor.signs:
        values = np.where(drawn < 0, -values, values)
    if kind == "F32":
        yield values.astype(np.float32).view(np.uint8)
    else:
        assert kind in DENSE, kind
        yield values.astype(np.float16).view(np.uint8) if kind == "F16" else _bfloat16(values)


def _bfloat16(values: np.ndarray) -> Bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
