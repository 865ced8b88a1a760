"""Heads of no whole groups of 32, as kernels take them: queries, keys and values get rows of zeros, the attention output columns of zeros.

Each half of a head is padded for itself, so that rope's pairs stay half a head apart. What is added gives zeros, so sums are what they were. Importing this imports no kernel.

Shapes: N outputs, K inputs, H heads, D a head's size, W the padded one's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.model import ModelSpec, RopeSpec, rotary_dims
from paceline.core.weights import GROUP, BlockTensor, DenseTensor, StoredTensor, WeightSource, columns_of, inverse_frequencies

_ROWS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")


def padded(spec: ModelSpec) -> ModelSpec:
    """The spec of the padded model; the same where heads are whole groups, or can't be padded: what norms a head, or turns a part of it, would see what is added."""
    width = -(-spec.head_dim // GROUP) * GROUP
    if width == spec.head_dim or spec.qk_norm or rotary_dims(spec.rope, spec.head_dim) != spec.head_dim:
        return spec
    window = spec.window and replace(spec.window, rope=spec.window.rope and _rope(spec.window.rope, spec.head_dim, width))
    attention = spec.head_dim**-0.5 if spec.scales.attention is None else spec.scales.attention
    scales, rope = replace(spec.scales, attention=attention), _rope(spec.rope, spec.head_dim, width)
    return replace(spec, head_dim=width, rope=rope, window=window, scales=scales, long=None)


def _rope(rope: RopeSpec, head_dim: int, width: int) -> RopeSpec:
    """The same frequencies, said by divisors; those of what is added don't matter."""
    own, plain = inverse_frequencies(rope, head_dim), inverse_frequencies(RopeSpec(rope.theta), width)
    divisors = [*(plain[: len(own)] / own).tolist(), *[1.0] * (len(plain) - len(own))]
    return RopeSpec(rope.theta, divisors=tuple(divisors), gain=rope.gain)


class PaddedHeads:
    """A `WeightSource` of the padded model. The attention output is plain numbers there, whatever the file has: groups of inputs would cross heads."""

    def __init__(self, source: WeightSource) -> None:
        self._source, self.spec = source, padded(source.spec)

    @property
    def digest(self) -> str:
        return self._source.digest

    def names(self) -> Iterable[str]:
        return self._source.names()

    def nbytes(self, name: str) -> int:
        return self._source.nbytes(name)

    def type_of(self, name: str) -> str:
        return "F32" if name.endswith("o_proj.weight") else self._source.type_of(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        if columns is not None and not name.endswith("o_proj.weight") and not name.endswith(_ROWS):
            return self._source.read(name, rows, columns)
        return columns_of(self._padded(name, rows), columns)

    def _padded(self, name: str, rows: slice | None) -> StoredTensor:
        dim, width = self._source.spec.head_dim, self.spec.head_dim
        if name.endswith("o_proj.weight"):
            from paceline.backends.quantize import to_float32

            values_NK = to_float32(self._source.read(name, rows))
            return DenseTensor(_spread(values_NK.reshape(len(values_NK), -1, dim), 2, width).reshape(len(values_NK), -1), "f32")
        if not name.endswith(_ROWS):
            return self._source.read(name, rows)
        heads = self.spec.n_heads if ".q_proj." in name else self.spec.n_kv_heads
        start, stop, _ = (rows or slice(None)).indices(heads * width)
        first, last = start // width, -(-stop // width)
        tensor = self._source.read(name, slice(first * dim, last * dim))
        data = tensor.rows_NB if isinstance(tensor, BlockTensor) else tensor.data
        spread = _spread(data.reshape(last - first, dim, *data.shape[1:]), 1, width)
        part = np.ascontiguousarray(spread.reshape(-1, *data.shape[1:])[start - first * width : stop - first * width])
        if isinstance(tensor, BlockTensor):
            return BlockTensor(tensor.type, (len(part), *tensor.shape[1:]), part)  # a block of zeros is zeros, whatever its type
        return DenseTensor(part, tensor.dtype)


def _spread(heads: npt.NDArray[Any], axis: int, width: int) -> npt.NDArray[Any]:
    """Both halves along an axis, each followed by zeros."""
    halves = np.split(heads, 2, axis)
    zeros = np.zeros_like(halves[0], shape=(*heads.shape[:axis], (width - heads.shape[axis]) // 2, *heads.shape[axis + 1 :]))
    return np.concatenate([halves[0], zeros, halves[1], zeros], axis)
