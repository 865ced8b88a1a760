"""Llama, SmolLM2 and Mistral: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.

Source: transformers' `models/llama/modeling_llama.py`. Shapes: T rows, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from paceline.backends.torch.blocks import gated, split_heads
from paceline.backends.torch.reader import Reader
from paceline.backends.torch.step import Step


class LlamaLayer:
    """One layer. `index` counts from the model's first layer, `slot` from the range's."""

    qkv_bias = False

    def __init__(self, reader: Reader, index: int, slot: int) -> None:
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
