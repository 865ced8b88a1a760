"""Models of transformers, and what they answer, to hold ours against.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from tests.conformance.suites.layer_runner import Rows, run
from tests.fakes.blocks import to_blocks
from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from paceline.backends.options import LoadOptions
from paceline.backends.quantize import to_float32
from paceline.core.model import ModelSpec, WeightsFormat
from paceline.core.weights import DenseTensor, StoredTensor
from paceline.engine.local import LayerRunner

Logits = npt.NDArray[np.float32]

_SIZES: Mapping[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.08, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

_YARN: Mapping[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
}  # fmt: skip

FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama3 rope": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_LLAMA3_ROPE)),
    "mistral": lambda: MistralConfig(**_SIZES, head_dim=64, sliding_window=None),
    "mistral window": lambda: MistralConfig(**_SIZES, head_dim=64, sliding_window=24),
    "qwen2 window": lambda: Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "mixtral": lambda: MixtralConfig(**_SIZES, num_local_experts=8, num_experts_per_tok=2),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES,
        head_dim=64,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=40,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    ),
    "olmo2": lambda: Olmo2Config(**_SIZES, pad_token_id=1),
    "yarn": lambda: Qwen3Config(**_SIZES, head_dim=64, rope_parameters=dict(_YARN)),
    "phi3": lambda: Phi3Config(**_SIZES, pad_token_id=1),
    "phi3 long": lambda: Phi3Config(
        **_SIZES | {"hidden_size": 256},
        pad_token_id=1,
        original_max_position_embeddings=640,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "long_factor": [4.0] * 16,
            "short_factor": [1.0 + 0.1 * i for i in range(16)],
            "original_max_position_embeddings": 640,
        },
    ),
    "granite": lambda: GraniteConfig(
        **_SIZES,
        embedding_multiplier=12.0,
        attention_multiplier=0.12,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        tie_word_embeddings=True,
    ),
    "minicpm3": lambda: MiniCPM3Config(
        **_SIZES | {"num_key_value_heads": 4},
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        dim_model_base=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "long_factor": [4.0] * 16,
            "short_factor": [1.0 + 0.1 * i for i in range(16)],
            "original_max_position_embeddings": 1024,
        },
    ),
    "glm4": lambda: Glm4Config(**_SIZES, head_dim=64, pad_token_id=1),
    "gpt_oss": lambda: GptOssConfig(
        **_SIZES,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    ),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=64, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True, mlp_only_layers=[]
    ),
    "qwen3_moe unnormed": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=96, norm_topk_prob=False, mlp_only_layers=[]
    ),
}


MORE: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "smollm3": lambda: SmolLM3Config(**_SIZES, pad_token_id=1, no_rope_layer_interval=2),
    "seed_oss": lambda: SeedOssConfig(**_SIZES, head_dim=64),
    "olmo3": lambda: Olmo3Config(
        **_SIZES,
        pad_token_id=1,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": dict(_YARN)},
    ),
    "heads of 80": lambda: MistralConfig(**_SIZES, head_dim=80, sliding_window=24),
    "heads of 100": lambda: LlamaConfig(**_SIZES, head_dim=100),
    "a hidden size of 112": lambda: Qwen2Config(**_SIZES | {"hidden_size": 112}),
    "a hidden size of 16": lambda: Glm4Config(**_SIZES | {"hidden_size": 16, "intermediate_size": 40}, head_dim=64, pad_token_id=1),
    "heads of 4": lambda: LlamaConfig(
        **_SIZES | {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    ),
    "experts and biases of a hidden size of 48": lambda: GptOssConfig(
        **_SIZES | {"hidden_size": 48}, head_dim=64, num_local_experts=8, num_experts_per_tok=3
    ),
    "a feed-forward of 200": lambda: LlamaConfig(**{**_SIZES, "intermediate_size": 200}),
    "experts of 72": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=72, norm_topk_prob=True, mlp_only_layers=[]
    ),
}
"""Families, and sizes of no whole groups of 32, that differ from those above in little."""


def save_tiny(family: str, folder: Path) -> Path:
    """A random bf16 model of a family, as transformers saves it. Biases and norms are random too, so that none goes untested."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config({**FAMILIES, **MORE}[family]())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate_up_proj_bias"):
                weight.normal_(0, 4)  # so that some are clamped
            elif name.endswith(("bias", "sinks")):
                weight.normal_(0, 0.5)
            elif "norm" in name:
                weight.normal_(1, 0.2)
            elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                # A router that is sure of itself: else a rounding in one row's choice of experts drowns every other error.
                weight.normal_(0, 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def reference(weights: WeightsFormat, saved: Path, folder: Path) -> Any:
    """transformers' model of saved weights as a format rounds them, computing in float32: what is left to compare is the kernels.

    Args:
        saved: folder with the model, as `save_tiny` leaves it.
        folder: where to write the rounded model.
    """
    stored = load_file(saved / "model.safetensors")
    bits = {name: DenseTensor(tensor.view(torch.int16).numpy().view(np.uint16), "bf16") for name, tensor in stored.items()}
    state = {name: torch.from_numpy(_rounded(name, tensor, weights)) for name, tensor in bits.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _rounded(name: str, tensor: StoredTensor, weights: WeightsFormat) -> Logits:
    # What is not quantised in its file is held as bf16.
    if weights in {WeightsFormat.INT4, WeightsFormat.INT8}:
        if name.endswith(("proj.weight", "_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")):
            return to_float32(to_blocks(tensor, "Q4_1" if weights is WeightsFormat.INT4 else "Q8_0"))
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # inputs are rows
            values = to_float32(tensor).swapaxes(1, 2)
            rows = DenseTensor(np.ascontiguousarray(values).reshape(-1, values.shape[2]), "f32")
            blocks = to_blocks(rows, "Q4_1" if weights is WeightsFormat.INT4 else "Q8_0")
            return np.ascontiguousarray(to_float32(blocks).reshape(values.shape).swapaxes(1, 2))
        if name in {"model.embed_tokens.weight", "lm_head.weight"}:
            return to_float32(to_blocks(tensor, "Q8_0"))
    return to_float32(tensor)


def logits_of(model: Any, ids: list[int]) -> Logits:
    """transformers' logits of every token, float32 [T, V]."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def in_bf16(model: Any) -> Any:
    """A copy of a model that computes in bf16 throughout."""
    return deepcopy(model).to(torch.bfloat16)


def greedy_of(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """transformers' greedy continuation, and the lead of each chosen token over the second best."""
    ids, leads = list(prompt), list[float]()
    for _ in range(count):
        last = logits_of(model, ids)[-1]
        second, first = np.partition(last, -2)[-2:]
        leads.append(float(first - second))
        ids.append(int(last.argmax()))
    return ids[len(prompt) :], leads


def ours(runner: LayerRunner[Any], ids: list[int]) -> Logits:
    """Our logits of every token, float32 [T, V]."""
    table = list(range(-(-len(ids) // runner.block_size)))
    return run(runner, Rows(ids, 0, table))[0].logits_TV


def our_greedy(runner: LayerRunner[Any], prompt: list[int], count: int) -> list[int]:
    """Our greedy continuation: the prompt, then token by token."""
    table = list(range(-(-(len(prompt) + count) // runner.block_size)))
    answer = [int(run(runner, Rows(prompt, 0, table))[0].logits_TV[-1].argmax())]
    while len(answer) < count:
        rows = Rows(answer[-1:], len(prompt) + len(answer) - 1, table)
        answer.append(int(run(runner, rows)[0].logits_TV[0].argmax()))
    return answer


def options(spec: ModelSpec, weights: WeightsFormat, kernel_cache: Path) -> LoadOptions:
    return LoadOptions(spec.all_layers, weights, 64, kernel_cache=kernel_cache)
