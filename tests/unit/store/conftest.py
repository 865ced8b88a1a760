"""Small real model files: GGUF written by gguf's own writer, safetensors by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

from paceline.store.digests import DigestCache
from paceline.store.home import Home
from paceline.store.tokenizer import byte_alphabet

HIDDEN, HEADS, KV_HEADS, HEAD, FFN, LAYERS = 64, 4, 2, 16, 96, 2
TOKENS = [*byte_alphabet(), "Ġt", "he", "<|im_start|>", "<|im_end|>"]
VOCAB = len(TOKENS)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"

NORMS = {
    "": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
}  # fmt: skip
NORMS |= {
    "glm4": NORMS["gemma3"],
    "gpt-oss": {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
}
"""By architecture: llama.cpp's names of a layer's norms, and ours."""
TURNING = {"llama": HEAD, "granite": HEAD, "smollm3": HEAD, "glm4": HEAD // 2}
"""Rows of each head whose halves are neighbours in the file."""

Array = npt.NDArray[Any]


class GgufModel:
    """A tiny model written as GGUF. `tensors` holds what a reader must give back, under Hugging Face's names, as float32."""

    def __init__(
        self,
        arch: str = "llama",
        quant: str = "F32",
        *,
        seed: int = 0,
        head: bool = False,
        mixture: bool = False,
        stacked: bool = True,
        fused: bool = False,
    ) -> None:
        self.arch, self.mixture, self.stacked, self.fused = arch, mixture or arch in {"qwen3moe", "gpt-oss"}, stacked, fused
        self.quant = gguf.GGMLQuantizationType[quant]
        self.random = np.random.default_rng(seed)
        self.tensors: dict[str, Array] = {}
        self.stored: dict[str, tuple[Array, gguf.GGMLQuantizationType]] = {}
        self.metadata: dict[str, Any] = {
            "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": FFN,
            "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.freq_base": 10000.0,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }  # fmt: skip
        if arch == "glm4":
            self.metadata["rope.dimension_count"] = TURNING[arch]
        self.general: dict[str, Any] = {}
        self.vocabulary = True
        self._fill(head)

    def _fill(self, head: bool) -> None:
        self.matrix("token_embd", "model.embed_tokens", VOCAB, HIDDEN)
        if head:
            self.matrix("output", "lm_head", VOCAB, HIDDEN)
        self.vector("output_norm", "model.norm", HIDDEN)
        for i in range(LAYERS):
            ours, theirs = f"blk.{i}", f"model.layers.{i}"
            for name, hf_name in NORMS.get(self.arch, NORMS[""]).items():
                self.vector(f"{ours}.{name}", f"{theirs}.{hf_name}", HIDDEN)
            if self.arch == "minicpm3":
                self.low_rank(ours, theirs)
            else:
                self.matrix(f"{ours}.attn_q", f"{theirs}.self_attn.q_proj", HEADS * HEAD, HIDDEN, heads=HEADS)
                self.matrix(f"{ours}.attn_k", f"{theirs}.self_attn.k_proj", KV_HEADS * HEAD, HIDDEN, heads=KV_HEADS)
                self.matrix(f"{ours}.attn_v", f"{theirs}.self_attn.v_proj", KV_HEADS * HEAD, HIDDEN)
            if self.arch == "phi3":
                self.fuse(f"{ours}.attn_qkv", *(f"{ours}.attn_{part}" for part in "qkv"))
            self.matrix(f"{ours}.attn_output", f"{theirs}.self_attn.o_proj", HIDDEN, HEADS * HEAD)
            if self.arch == "gpt-oss":
                self.vector(f"{ours}.attn_output", f"{theirs}.self_attn.o_proj", HIDDEN, kind="bias")
                self.vector(f"{ours}.attn_sinks", f"{theirs}.self_attn.sinks", HEADS)
                self.tensors[f"{theirs}.self_attn.sinks"] = self.tensors.pop(f"{theirs}.self_attn.sinks.weight")
            if self.arch in {"qwen2", "glm4", "gpt-oss"}:
                for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                    self.vector(f"{ours}.attn_{name}", f"{theirs}.self_attn.{name}_proj", heads * HEAD, kind="bias")
                    if name != "v":
                        values, kind = self.stored[f"{ours}.attn_{name}.bias"]
                        self.stored[f"{ours}.attn_{name}.bias"] = (self.permuted(values[:, None], heads).ravel(), kind)
            if self.arch.startswith("qwen3") or self.arch in {"gemma3", "olmo2"}:
                whole = self.arch == "olmo2"
                self.vector(f"{ours}.attn_q_norm", f"{theirs}.self_attn.q_norm", HEADS * HEAD if whole else HEAD)
                self.vector(f"{ours}.attn_k_norm", f"{theirs}.self_attn.k_norm", KV_HEADS * HEAD if whole else HEAD)
            if self.mixture:
                self.experts(i)
            else:
                self.matrix(f"{ours}.ffn_gate", f"{theirs}.mlp.gate_proj", FFN, HIDDEN)
                self.matrix(f"{ours}.ffn_up", f"{theirs}.mlp.up_proj", FFN, HIDDEN)
                self.matrix(f"{ours}.ffn_down", f"{theirs}.mlp.down_proj", HIDDEN, FFN)
                if self.arch in {"phi3", "glm4"}:
                    self.fuse(f"{ours}.ffn_up", f"{ours}.ffn_gate", f"{ours}.ffn_up")

    def low_rank(self, ours: str, theirs: str, queries: int = 96, keys: int = 32, turned: int = 8) -> None:
        """Queries, keys and values as products of products; `turned` of a head's dimensions turn, beside as many as its values have."""
        self.metadata |= {
            "attention.head_count_kv": HEADS, "attention.q_lora_rank": queries, "attention.kv_lora_rank": keys,
            "attention.key_length": HEAD + turned, "rope.dimension_count": turned,
        }  # fmt: skip
        self.matrix(f"{ours}.attn_q_a", f"{theirs}.self_attn.q_a_proj", queries, HIDDEN)
        self.vector(f"{ours}.attn_q_a_norm", f"{theirs}.self_attn.q_a_layernorm", queries)
        self.matrix(f"{ours}.attn_q_b", f"{theirs}.self_attn.q_b_proj", HEADS * (HEAD + turned), queries)
        self.matrix(f"{ours}.attn_kv_a_mqa", f"{theirs}.self_attn.kv_a_proj_with_mqa", keys + turned, HIDDEN)
        self.vector(f"{ours}.attn_kv_a_norm", f"{theirs}.self_attn.kv_a_layernorm", keys)
        self.matrix(f"{ours}.attn_kv_b", f"{theirs}.self_attn.kv_b_proj", HEADS * 2 * HEAD, keys)

    def fuse(self, name: str, *parts: str) -> None:
        """Put matrices one below the other, as one."""
        rows = [self.stored.pop(f"{part}.weight")[0] for part in parts]
        self.stored[f"{name}.weight"] = (np.concatenate(rows), self.quant)

    def permuted(self, rows_NB: Array, heads: int) -> Array:
        """Rows of heads as this architecture's files have them: of what turns, halves become neighbours."""
        turning, by_head = TURNING.get(self.arch, 0), rows_NB.reshape(heads, HEAD, -1).copy()
        if not turning:
            return rows_NB
        halves = by_head[:, :turning].reshape(heads, 2, turning // 2, -1)
        by_head[:, :turning] = halves.swapaxes(1, 2).reshape(heads, turning, -1).copy()
        return by_head.reshape(rows_NB.shape)

    def experts(self, layer: int, n: int = 3) -> None:
        self.metadata |= {"expert_count": n, "expert_used_count": 2}
        if self.arch == "qwen3moe":
            self.metadata["expert_feed_forward_length"] = FFN
        self.matrix(f"blk.{layer}.ffn_gate_inp", f"model.layers.{layer}.mlp.gate", n, HIDDEN)
        for name, rows, columns in (("gate", FFN, HIDDEN), ("up", FFN, HIDDEN), ("down", HIDDEN, FFN)):
            raw = [self.encoded(rows, columns) for _ in range(n)]
            if self.stacked:
                self.stored[f"blk.{layer}.ffn_{name}_exps.weight"] = (np.stack([item[0] for item in raw]), self.quant)
            else:
                self.stored |= {f"blk.{layer}.ffn_{name}.{e}.weight": (item[0], self.quant) for e, item in enumerate(raw)}
            for e, (_, values) in enumerate(raw):
                self.tensors[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"] = values
            if self.arch == "gpt-oss":
                biases = self.random.standard_normal((n, rows), np.float32)
                self.stored[f"blk.{layer}.ffn_{name}_exps.bias"] = (biases, gguf.GGMLQuantizationType.F32)
                for e, bias in enumerate(biases):
                    self.tensors[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.bias"] = bias
        if self.arch == "gpt-oss":
            self.vector(f"blk.{layer}.ffn_gate_inp", f"model.layers.{layer}.mlp.gate", n, kind="bias")
        for kind in ("weight", "bias") if self.fused else ():
            parts = [self.stored.pop(f"blk.{layer}.ffn_{name}_exps.{kind}", None) for name in ("gate", "up")]
            if parts[0] is not None:
                self.stored[f"blk.{layer}.ffn_gate_up_exps.{kind}"] = (np.concatenate([part[0] for part in parts], axis=1), parts[0][1])

    def encoded(self, rows: int, columns: int) -> tuple[Array, Array]:
        """A random matrix as the file holds it, and the values that stand for it."""
        values = self.random.standard_normal((rows, columns), np.float32)
        raw = quantize(values, self.quant)
        return raw, dequantize(raw, self.quant).reshape(rows, columns)

    def matrix(self, name: str, hf_name: str, rows: int, columns: int, heads: int | None = None) -> None:
        raw, values = self.encoded(rows, columns)
        self.tensors[f"{hf_name}.weight"] = values
        if heads is not None:
            raw = self.permuted(raw, heads)
        self.stored[f"{name}.weight"] = (raw, self.quant)

    def vector(self, name: str, hf_name: str, n: int, kind: str = "weight") -> None:
        values = self.random.standard_normal(n, np.float32)
        self.tensors[f"{hf_name}.{kind}"] = values
        self.stored[f"{name}.{kind}"] = (values, gguf.GGMLQuantizationType.F32)

    def write(self, path: Path, names: set[str] | None = None) -> Path:
        writer = gguf.GGUFWriter(path, self.arch)
        for key, value in [(f"{self.arch}.{key}", value) for key, value in self.metadata.items()] + list(self.general.items()):
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            else:
                writer.add_string(key, value)
        if self.vocabulary:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_list(TOKENS)
            writer.add_token_types([3 if token.startswith("<|") else 1 for token in TOKENS])
            writer.add_token_merges(["Ġ t", "h e"])
            writer.add_eos_token_id(VOCAB - 1)
            writer.add_chat_template(TEMPLATE)
        for name, (raw, kind) in self.stored.items():
            if names is None or name in names:
                dtype = kind if kind not in {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16} else None
                writer.add_tensor(name, raw, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture(scope="session")
def gguf_model() -> type[GgufModel]:
    return GgufModel


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def digests(home: Home) -> DigestCache:
    return DigestCache(home)


def llama_config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "intermediate_size": FFN, "vocab_size": VOCAB, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": VOCAB - 1,
    }  # fmt: skip
    return config | changes


def write_folder(folder: Path, tensors: Mapping[str, Array] | None = None, **changes: Any) -> Path:
    """A model folder: config.json, model.safetensors, tokenizer.json, tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_config(**changes)))
    save_file(dict(GgufModel().tensors if tensors is None else tensors), folder / "model.safetensors", metadata={"format": "pt"})
    vocab = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS if token.startswith("<|")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    return folder


@pytest.fixture(scope="session")
def make_folder() -> Callable[..., Path]:
    return write_folder
