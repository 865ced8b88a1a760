"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

Source: transformers' `models/qwen2/modeling_qwen2.py`.
"""

from __future__ import annotations

from paceline.backends.torch.llama import LlamaLayer


class Qwen2Layer(LlamaLayer):
    """One layer. `index` counts from the model's first layer, `slot` from the range's."""

    qkv_bias = True
