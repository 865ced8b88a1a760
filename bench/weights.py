"""The model under test as a safetensors folder in bf16, for engines that don't read GGUF: the same weights, dequantised.

The folder is made once beside the caches and named after the weights' digest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.model import ModelSpec
from paceline.core.weights import GROUP, DenseTensor, StoredTensor
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
    write_safetensors(
        partial / "model.safetensors",
        {name: to_bf16(to_float32(opened.weights.read(name))) for name in opened.weights.names()},
    )
    (partial / "config.json").write_text(json.dumps(config_of(opened.spec, opened.tokenizer.eos_ids), indent=2))
    partial.rename(folder)
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[np.uint16]]) -> None:
    """Write bf16 tensors: the header's length in 8 bytes, the header as JSON, the tensors end to end."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def to_float32(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """The numbers a stored tensor stands for."""
    if isinstance(tensor, DenseTensor):
        if tensor.dtype == "bf16":
            return (tensor.data.astype(np.uint32) << 16).view(np.float32)
        return tensor.data.astype(np.float32)
    codes_NGK = tensor.codes_NK.reshape(tensor.codes_NK.shape[0], -1, GROUP).astype(np.float32)
    values_NGK = codes_NGK * tensor.scale_NG.astype(np.float32)[:, :, None]
    if tensor.offset_NG is not None:
        values_NGK += tensor.offset_NG.astype(np.float32)[:, :, None]
    return values_NGK.reshape(tensor.codes_NK.shape)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bf16, ties to even. For finite numbers."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


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
