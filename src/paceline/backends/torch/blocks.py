"""Pieces that every family is built of.

Shapes: T rows, D hidden (or a head's width), F feed-forward.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class RmsNorm:
    """Root mean square norm over the last dimension, computed in float32, rounded to bf16 once."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self._weight_D, self._eps = weight_D, eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return wide.mul_(inverse).mul_(self._weight_D).bfloat16()


def gated(gate_up: Tensor) -> Tensor:
    """SwiGLU of a fused product, bf16 [T, F] of [T, 2 F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def split_heads(qkv: Tensor, n_heads: int, n_kv: int) -> tuple[Tensor, Tensor]:
    """(queries and keys [T, n_heads + n_kv, D], values [T, n_kv, D]) of a fused product; queries and keys turn together."""
    qk, v = qkv.unflatten(-1, (n_heads + 2 * n_kv, -1)).split((n_heads + n_kv, n_kv), 1)
    return qk, v
