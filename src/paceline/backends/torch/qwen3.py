"""Qwen3: Llama with a norm on every query and key head, before it turns.

Source: transformers' `models/qwen3/modeling_qwen3.py`. Shapes: T rows, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.backends.torch.blocks import gated, split_heads
from paceline.backends.torch.reader import Reader
from paceline.backends.torch.step import Step


class Qwen3Attention:
    """Norm, attention and its output product: shared by the dense family and the mixture of experts."""

    def __init__(self, reader: Reader, index: int, slot: int) -> None:
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

    def __init__(self, reader: Reader, index: int, slot: int) -> None:
        at = f"model.layers.{index}"
        self._attention = Qwen3Attention(reader, index, slot)
        self._ffn_norm = reader.norm(f"{at}.post_attention_layernorm.weight")
        self._gate_up = reader.linear(f"{at}.mlp", "gate_proj", "up_proj")
        self._down = reader.linear(f"{at}.mlp", "down_proj")

    def __call__(self, x_TD: Tensor, step: Step) -> Tensor:
        x_TD = x_TD + self._attention(x_TD, step)
        return x_TD + self._down(gated(self._gate_up(self._ffn_norm(x_TD), step.path)), step.path)
