"""The model under test as a safetensors folder in bf16, for engines that don't read GGUF: the same weights, dequantised.

The folder is made once beside the caches and named after the weights' digest.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from paceline.backends.quantize import to_bf16_bits
from paceline.core.model import ModelSpec
from paceline.store.catalog import open_model

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def bf16_folder(model: str, cache: Path) -> Path:
    """Write the model's weights as bf16 safetensors with a config.json, unless that was done before.

    Args:
        model: anything `paceline` takes for a model; a dense one.
        cache: a folder of the bench's own.
    """
    opened = open_model(model)
    folder = cache / f"{opened.weights.digest[:16]}-bf16"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: torch.from_numpy(to_bf16_bits(opened.weights.read(name)).view(np.int16)) for name in opened.weights.names()}
    save_file({name: bits.view(torch.bfloat16) for name, bits in tensors.items()}, partial / "model.safetensors", {"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config_of(opened.spec, opened.tokenizer.eos_ids), indent=2))
    partial.rename(folder)
    return folder


def config_of(spec: ModelSpec, eos_ids: frozenset[int]) -> dict[str, Any]:
    """Hugging Face's config.json of a dense model."""
    return {
        "architectures": [ARCHITECTURES[spec.model_type]],
        "model_type": spec.model_type,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied_head,
        "eos_token_id": sorted(eos_ids),
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
