"""Whether torch gives a row the same bytes however many run beside it, asked of products as long as the model's and of attention over its heads.

The sums of a product are as long as the model's, its outputs are few: they don't add to each other, and a start has no time for all of them.

Shapes: T rows, H query heads, D head dimension, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from paceline.backends.torch.attention import KEYS, CpuStep, KvPool
from paceline.backends.torch.linear import Linear, make_linear
from paceline.backends.torch.step import Rope
from paceline.core.model import ModelSpec, WeightsFormat
from paceline.core.weights import DenseTensor
from paceline.engine.executor import Path
from paceline.engine.local import RowPlan

FEW = range(1, 66)
MANY = (127, 128, 129, 255, 256, 257, 511, 512, 513)
LENGTH = 2 * KEYS + MANY[-1] + 37
"""Of the sequence whose last rows attend."""
TOGETHER = (2, 3, 5, 16)
"""Sequences of one row."""
OUTPUTS = {WeightsFormat.INT4: 128, WeightsFormat.INT8: 128, WeightsFormat.BF16: 1024}
"""Of a matrix. Products of any number of rows choose kernels by outputs too: with few, what differs is not seen."""


def holds(spec: ModelSpec, formats: Iterable[WeightsFormat]) -> bool:
    """Whether every product, of weights in these formats, and attention do."""
    widths = {spec.hidden, spec.n_heads * spec.head_dim, spec.ffn if spec.moe is None else spec.moe.ffn}
    return all(products_hold(width, weights) for weights in formats for width in sorted(widths)) and attention_holds(
        replace(spec, n_heads=2 * (spec.n_heads // spec.n_kv_heads), n_kv_heads=2)
    )


@cache
def products_hold(width: int, weights: WeightsFormat) -> bool:
    """Whether the first and the last so many rows of a seeded matrix's product give what they give among all, on each path."""
    weight_NK = np.random.default_rng(width).standard_normal((OUTPUTS[weights], width), np.float32) * np.float32(width**-0.5)
    linear = make_linear([(DenseTensor(weight_NK, "f32"), weights)], None, None, torch.device("cpu"))
    x_TK = torch.randn(MANY[-1], width, generator=torch.Generator().manual_seed(width)).bfloat16()
    if weights is WeightsFormat.BF16:
        return _holds(linear, x_TK[: FEW[-1]], Path.PROMPT, FEW)
    return _holds(linear, x_TK[: FEW[-1]], Path.GENERATED, FEW) and _holds(linear, x_TK, Path.PROMPT, (*FEW, *MANY))


def _holds(linear: Linear, x_TK: Tensor, path: Path, counts: Iterable[int]) -> bool:
    whole = linear(x_TK, path)
    return all(
        torch.equal(linear(x_TK[:count], path), whole[:count]) and torch.equal(linear(x_TK[-count:], path), whole[-count:])
        for count in counts
    )


@cache
def attention_holds(spec: ModelSpec) -> bool:
    """Whether the last so many rows of a sequence give what they give among all, and single rows what they give together."""
    generator = torch.Generator().manual_seed(spec.head_dim)
    q_THD, k_THD, v_THD = (torch.randn(LENGTH, heads, spec.head_dim, generator=generator).bfloat16() for heads in (spec.n_heads, 2, 2))
    n_blocks = -(-LENGTH // KEYS)
    pool, rope = KvPool(1, n_blocks, KEYS, 2, spec.head_dim), Rope(spec.rope, spec.head_dim, LENGTH, torch.device("cpu"))

    def attend(firsts: list[int], count: int) -> Tensor:
        """So many rows from each of some positions on."""
        places = np.array(firsts, np.int32)
        starts, counts = np.arange(len(firsts), dtype=np.int32) * count, np.full(len(firsts), count, np.int32)
        tables = np.broadcast_to(np.arange(n_blocks, dtype=np.int32), (len(firsts), n_blocks))
        step = CpuStep(RowPlan(starts, counts, places, np.zeros_like(places), tables), Path.PROMPT, spec, pool, rope)
        rows = torch.cat([torch.arange(first, first + count) for first in firsts])
        return step.attend(0, q_THD[rows], k_THD[rows], v_THD[rows])

    whole = attend([0], LENGTH)
    if not all(torch.equal(attend([LENGTH - count], count), whole[-count:]) for count in (*FEW, *MANY)):
        return False
    apart = [list(range(LENGTH - 61, 0, -61))[:count] for count in TOGETHER]
    return all(torch.equal(attend(places, 1), whole[places]) for places in apart)
