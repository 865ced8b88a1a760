"""A small BERT of random weights, as a folder that transformers and sentence-transformers read too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.weights import EncoderSpec, Pooling, encoder_shapes

WORDS = ("hello", "world", "a", "cat", "sat", "on", "the", "mat", ".", ",", "##s", "##ing")
TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
SPEC = EncoderSpec(2, hidden=32, n_heads=4, ffn=64, vocab=len(TOKENS), max_tokens=64, n_types=2, norm_eps=1e-12)


def write_encoder(folder: Path, *, pooling: Pooling = Pooling.MEAN, normalise: bool = True, modules: bool = True) -> Path:
    """Write it.

    Args:
        modules: with the files that say how it pools.
    """
    from safetensors.numpy import save_file

    from paceline.store.tokenizer_files import wordpiece

    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "hidden_size": SPEC.hidden,
        "num_hidden_layers": SPEC.n_layers, "num_attention_heads": SPEC.n_heads, "intermediate_size": SPEC.ffn,
        "vocab_size": SPEC.vocab, "max_position_embeddings": SPEC.max_tokens, "type_vocab_size": SPEC.n_types, "layer_norm_eps": SPEC.norm_eps,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    wordpiece(folder, TOKENS, lowercase=True).save(str(folder / "tokenizer.json"))
    random = np.random.default_rng(3)
    save_file(
        {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in encoder_shapes(SPEC)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    if modules:
        kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
        listed = [
            {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        modes = {"pooling_mode_cls_token": pooling is Pooling.CLS, "pooling_mode_mean_tokens": pooling is Pooling.MEAN}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": SPEC.hidden, **modes}))
    return folder


def write_encoder_gguf(path: Path, folder: Path, *, pooling: int = 1, quantised: bool = False) -> Path:
    """Write the encoder of a folder as llama.cpp's converter does.

    Args:
        pooling: number of llama.cpp's pooling type; 4 adds the head of a reranker, with random weights.
        quantised: as Q8_0.
    """
    import gguf
    from safetensors.numpy import load_file

    names = {"embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
             "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm"}  # fmt: skip
    parts = {"attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
             "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
             "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm"}  # fmt: skip
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(SPEC.n_layers)
    writer.add_context_length(SPEC.max_tokens)
    writer.add_embedding_length(SPEC.hidden)
    writer.add_feed_forward_length(SPEC.ffn)
    writer.add_head_count(SPEC.n_heads)
    writer.add_layer_norm_eps(SPEC.norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_tokenizer_model("bert")
    writer.add_token_list([t if t[0] == "[" else t[2:] if t.startswith("##") else "\u2581" + t for t in TOKENS])
    writer.add_token_type_count(SPEC.n_types)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    for full, values in load_file(folder / "model.safetensors").items():
        stem, _, suffix = full.rpartition(".")
        layer, _, part = stem.removeprefix("encoder.layer.").partition(".")
        name = f"{names[stem] if stem in names else f'blk.{layer}.{parts[part]}'}.{suffix}"
        if quantised and values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    if pooling == gguf.PoolingType.RANK:
        random = np.random.default_rng(4)
        for name, shape in (("cls", (SPEC.hidden, SPEC.hidden)), ("cls.output", (1, SPEC.hidden))):
            writer.add_tensor(f"{name}.weight", random.normal(0, 0.3, shape).astype(np.float32))
            writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
