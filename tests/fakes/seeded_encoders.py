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
