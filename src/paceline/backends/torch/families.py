"""Llama, SmolLM2 and Mistral: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.

Source: transformers' `models/llama/modeling_llama.py`. Shapes: T rows, D hidden.

Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

Source: transformers' `models/qwen2/modeling_qwen2.py`.

Qwen3: Llama with a norm on every query and key head, before it turns.

Source: transformers' `models/qwen3/modeling_qwen3.py`. Shapes: T rows, D hidden.

Qwen3-MoE: Qwen3's attention, and a few experts a token in place of one feed-forward.

A row's experts are added in the order of their numbers, in float32: which rows share an expert changes nothing.
Source: transformers' `models/qwen3_moe/modeling_qwen3_moe.py`. Shapes: T rows, D hidden, E experts, K of them a row, R rows of one expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.backends.torch.blocks import gated, split_heads
from paceline.backends.torch.reader import TensorReader
from paceline.backends.torch.step import Step
from paceline.core.model import MoeSpec


class LlamaLayer:
    """One layer. `index` counts from the model's first layer, `slot` from the range's."""

    qkv_bias = False

    def __init__(self, reader: TensorReader, index: int, slot: int) -> None:
        at, spec = f"model.layers.{index}", reader.spec
        self._slot, self._n_heads, self._n_kv = slot, spec.n_heads, spec.n_kv_heads
        self._attention_norm = reader.norm(f"{at}.input_layernorm.weight")
        self._qkv = reader.linear(f"{at}.self_attn", "q_proj", "k_proj", "v_proj", bias=self.qkv_bias)
        self._out = reader.linear(f"{at}.self_attn", "o_proj")
        self._ffn_norm = reader.norm(f"{at}.post_attention_layernorm.weight")
        self._gate_up = reader.linear(f"{at}.mlp", "gate_proj", "up_proj")
        self._down = reader.linear(f"{at}.mlp", "down_proj")

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        qk, v = split_heads(self._qkv(self._attention_norm(x_TD), step.path), self._n_heads, self._n_kv)
        qk = step.rotate(qk)
        attended = step.attend(self._slot, qk[:, : self._n_heads], qk[:, self._n_heads :], v)
        x_TD = x_TD + self._out(attended, step.path)
        return x_TD + self._down(gated(self._gate_up(self._ffn_norm(x_TD), step.path)), step.path)


class Qwen2Layer(LlamaLayer):
    """One layer. `index` counts from the model's first layer, `slot` from the range's."""

    qkv_bias = True


class Qwen3Attention:
    """Norm, attention and its output product: shared by the dense family and the mixture of experts."""

    def __init__(self, reader: TensorReader, index: int, slot: int) -> None:
        at, spec = f"model.layers.{index}", reader.spec
        self._slot, self._n_heads, self._n_kv = slot, spec.n_heads, spec.n_kv_heads
        self._norm = reader.norm(f"{at}.input_layernorm.weight")
        self._qkv = reader.linear(f"{at}.self_attn", "q_proj", "k_proj", "v_proj")
        self._q_norm = reader.norm(f"{at}.self_attn.q_norm.weight")
        self._k_norm = reader.norm(f"{at}.self_attn.k_norm.weight")
        self._out = reader.linear(f"{at}.self_attn", "o_proj")

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        qk, v = split_heads(self._qkv(self._norm(x_TD), step.path), self._n_heads, self._n_kv)
        q, k = self._q_norm(qk[:, : self._n_heads]), self._k_norm(qk[:, self._n_heads :])
        qk = step.rotate(torch.cat([q, k], 1))
        attended = step.attend(self._slot, qk[:, : self._n_heads], qk[:, self._n_heads :], v)
        return self._out(attended, step.path)


class Qwen3Layer:
    """One layer. `index` counts from the model's first layer, `slot` from the range's."""

    def __init__(self, reader: TensorReader, index: int, slot: int) -> None:
        at = f"model.layers.{index}"
        self._attention = Qwen3Attention(reader, index, slot)
        self._ffn_norm = reader.norm(f"{at}.post_attention_layernorm.weight")
        self._gate_up = reader.linear(f"{at}.mlp", "gate_proj", "up_proj")
        self._down = reader.linear(f"{at}.mlp", "down_proj")

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        x_TD = x_TD + self._attention(x_TD, step)
        return x_TD + self._down(gated(self._gate_up(self._ffn_norm(x_TD), step.path)), step.path)


class Experts:
    """Router and experts of one layer."""

    def __init__(self, reader: TensorReader, at: str, moe: MoeSpec) -> None:
        self._moe = moe
        self._router = reader.dense_linear(at, "gate")
        self._gate_up = [reader.linear(f"{at}.experts.{e}", "gate_proj", "up_proj") for e in range(moe.n_experts)]
        self._down = [reader.linear(f"{at}.experts.{e}", "down_proj") for e in range(moe.n_experts)]

    def __call__(self, h_TD: Tensor, step: Step) -> Tensor:
        shares_TE = self._router(h_TD, step.path).float().softmax(-1)
        share_TK, expert_TK = shares_TE.topk(self._moe.top_k, -1)
        if self._moe.norm_topk:
            share_TK = share_TK / share_TK.sum(-1, keepdim=True)
        total_TD = torch.zeros(h_TD.shape, dtype=torch.float32, device=h_TD.device)
        for expert in expert_TK.unique().tolist():
            rows_R, place_R = torch.where(expert_TK == expert)
            y_RD = self._down[expert](gated(self._gate_up[expert](h_TD[rows_R], step.path)), step.path)
            total_TD.index_add_(0, rows_R, y_RD.float() * share_TK[rows_R, place_R, None])
        return total_TD.bfloat16()


class Qwen3MoeLayer:
    """One layer. `index` counts from the model's first layer, `slot` from the range's."""

    def __init__(self, reader: TensorReader, index: int, slot: int) -> None:
        at, moe = f"model.layers.{index}", reader.spec.moe
        assert moe is not None
        self._attention = Qwen3Attention(reader, index, slot)
        self._ffn_norm = reader.norm(f"{at}.post_attention_layernorm.weight")
        self._experts = Experts(reader, f"{at}.mlp", moe)

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        x_TD = x_TD + self._attention(x_TD, step)
        return x_TD + self._experts(self._ffn_norm(x_TD), step)
