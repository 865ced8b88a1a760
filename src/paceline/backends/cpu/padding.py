"""Pads hidden sizes, heads and feed-forward widths to whole groups of 32, as kernels need them: matrices that write to them get rows of zeros, and
matrices that read them get columns of zeros.

Each half of a head is padded separately, so that rope's pairs stay half a head apart. The padding gives zeros, so sums do not change. A norm over the
hidden size divides by more numbers, so its weights and its epsilon are reduced. Importing this imports no kernel.

Shapes: N outputs, K inputs, H heads, D a head's size, W the padded one's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.model import ModelSpec, RopeSpec, rotary_dims
from paceline.core.weights import GROUP, DenseTensor, StoredTensor, WeightSource, columns_of, inverse_frequencies, tensor_shapes

_OUT = "o_proj.weight"
_HEADS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")


def padded(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the padded model; the spec itself if all sizes are whole groups."""
    width, ffn, moe = _whole(spec.head_dim), _whole(spec.ffn), spec.moe
    if spec.ffn != ffn or (moe is not None and moe.ffn != _whole(moe.ffn)):
        spec = replace(spec, ffn=ffn, moe=moe and replace(moe, ffn=_whole(moe.ffn)))
    if not spec.qk_norm and (hidden := _whole(spec.hidden)) != spec.hidden:  # heads are normed with the same epsilon
        spec = replace(spec, hidden=hidden, rms_eps=spec.rms_eps * spec.hidden / hidden)
    # A norm over a head, or rope over a part of it, would be changed by the padding.
    if width == spec.head_dim or spec.qk_norm or rotary_dims(spec.rope, spec.head_dim) != spec.head_dim:
        return spec
    window = spec.window and replace(spec.window, rope=spec.window.rope and _rope(spec.window.rope, spec.head_dim, width))
    attention = spec.head_dim**-0.5 if spec.scales.attention is None else spec.scales.attention
    scales, rope = replace(spec.scales, attention=attention), _rope(spec.rope, spec.head_dim, width)
    return replace(spec, head_dim=width, rope=rope, window=window, scales=scales, long=None)


def _whole(size: int) -> int:
    return -(-size // GROUP) * GROUP


def _rope(rope: RopeSpec, head_dim: int, width: int) -> RopeSpec:
    """Return rope with the same frequencies, written as divisors for the padded head. Those of the padding don't matter."""
    own, plain = inverse_frequencies(rope, head_dim), inverse_frequencies(RopeSpec(rope.theta), width)
    divisors = [*(plain[: len(own)] / own).tolist(), *[1.0] * (len(plain) - len(own))]
    return RopeSpec(rope.theta, divisors=tuple(divisors), gain=rope.gain)


class Padded:
    """A `WeightSource` of the padded model.

    If heads are padded, attention's output matrix becomes plain numbers, whatever the file has, because groups of inputs would cross heads.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source, self.spec = source, padded(source.spec)
        self._own, self._shapes = tensor_shapes(source.spec), tensor_shapes(self.spec)
        self._by_head = self.spec.head_dim != source.spec.head_dim

    @property
    def digest(self) -> str:
        return self._source.digest

    def names(self) -> Iterable[str]:
        return self._source.names()

    def nbytes(self, name: str) -> int:
        if self._by_head and name.endswith(_OUT):
            return 4 * math.prod(self._shapes[name])
        stored = self._source.nbytes(name)
        return stored * math.prod(self._shapes[name]) // math.prod(self._own[name]) if name in self._own else stored

    def type_of(self, name: str) -> str:
        return "F32" if self._by_head and name.endswith(_OUT) else self._source.type_of(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        if name not in self._own or self._own[name] == self._shapes[name]:
            return self._source.read(name, rows, columns)
        shape, last, read = self._shapes[name], self._own[name][0], self._source.read
        if self._by_head and name.endswith(_OUT):
            read = self._out
        elif self._by_head and name.endswith(_HEADS):
            last, read = shape[0], self._heads
        start, stop, _ = (rows or slice(None)).indices(shape[0])
        first = min(start, last - 1)  # at least one row, which shows the type and width of rows
        tensor = read(name, slice(first, max(min(stop, last), first + 1)))
        if name.endswith("norm.weight"):
            from paceline.backends.quantize import to_float32

            tensor = DenseTensor(to_float32(tensor) * np.float32((self._own[name][0] / shape[0]) ** 0.5), "f32")
        data = _followed(_rows_of(tensor)[start - first :], 0, stop - start)
        if isinstance(tensor, DenseTensor) and data.shape[1:] != shape[1:]:  # rows of no whole groups are not quantised
            data = _followed(data, 1, shape[1])
        return columns_of(_with_rows(tensor, data), columns)

    def _out(self, name: str, rows: slice | None) -> StoredTensor:
        from paceline.backends.quantize import to_float32

        values_NK = to_float32(self._source.read(name, rows))
        spread = _spread(values_NK.reshape(len(values_NK), -1, self._source.spec.head_dim), 2, self.spec.head_dim)
        return DenseTensor(spread.reshape(len(values_NK), -1), "f32")

    def _heads(self, name: str, rows: slice | None) -> StoredTensor:
        dim, width = self._source.spec.head_dim, self.spec.head_dim
        heads = self.spec.n_heads if ".q_proj." in name else self.spec.n_kv_heads
        start, stop, _ = (rows or slice(None)).indices(heads * width)
        first, last = start // width, -(-stop // width)
        tensor = self._source.read(name, slice(first * dim, last * dim))
        data = _rows_of(tensor)
        spread = _spread(data.reshape(last - first, dim, *data.shape[1:]), 1, width)
        return _with_rows(tensor, spread.reshape(-1, *data.shape[1:])[start - first * width : stop - first * width])


def _rows_of(tensor: StoredTensor) -> npt.NDArray[Any]:
    return tensor.data if isinstance(tensor, DenseTensor) else tensor.rows_NB


def _with_rows(tensor: StoredTensor, rows: npt.NDArray[Any]) -> StoredTensor:
    """Return a tensor of the same type with other rows. In every type, a block of zero bytes stands for zeros."""
    rows = np.ascontiguousarray(rows)
    if isinstance(tensor, DenseTensor):
        return replace(tensor, data=rows)
    return replace(tensor, shape=(len(rows), *tensor.shape[1:]), rows_NB=rows)


def _followed(data: npt.NDArray[Any], axis: int, size: int) -> npt.NDArray[Any]:
    """Return an array extended with zeros to `size` along an axis."""
    return np.pad(data, [(0, size - have if each == axis else 0) for each, have in enumerate(data.shape)])


def _spread(heads: npt.NDArray[Any], axis: int, width: int) -> npt.NDArray[Any]:
    """Return heads with zeros after each half along an axis, `width` long in all."""
    halves = np.split(heads, 2, axis)
    zeros = np.zeros_like(halves[0], shape=(*heads.shape[:axis], (width - heads.shape[axis]) // 2, *heads.shape[axis + 1 :]))
    return np.concatenate([halves[0], zeros, halves[1], zeros], axis)
