"""Experts in the layout of gpt-oss's safetensors: one tensor holds all experts of a layer, with rows of gate and up in turn.

Such a tensor is MXFP4 in two parts, codes (`*_blocks`, each byte has two neighbouring inputs) and exponents (`*_scales`). Or it holds plain numbers,
transposed: its rows are the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from paceline.core.weights import GROUP, TENSOR_TYPES
from paceline.store.tensor_files import Bytes, StoredAt

_CODES: Final = GROUP // 2
"""Bytes of the codes of one group."""
_PARTS: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class PickedAt(StoredAt):
    """A matrix, or a vector, made of every `apart`-th row of another tensor. Shape and bytes are its own; `offset` is that of the source."""

    source: StoredAt
    first: int
    """Row of the source that is this tensor's row 0."""
    apart: int
    scales: StoredAt | None = None
    """Exponents of an MXFP4 tensor; the source then holds its codes."""
    turned: bool = False
    """The source is transposed: this tensor's rows are its columns."""

    @property
    def ranges(self) -> tuple[StoredAt, ...]:
        return (self.source,) if self.scales is None else (self.source, self.scales)

    def rows(self, start: int, stop: int) -> StoredAt:
        shape, nbytes = (stop - start, *self.shape[1:]), self.nbytes // self.shape[0] * (stop - start)
        return replace(self, shape=shape, nbytes=nbytes, first=self.first + self.apart * start)

    def read(self) -> Bytes:
        n = self.shape[0]
        if n == 0:
            return np.empty(0, np.uint8)
        last = self.first + (n - 1) * self.apart + 1
        if self.turned:
            columns = self.source.read().reshape(*self.source.shape, self.type.nbytes)[:, self.first : last : self.apart]
            return np.ascontiguousarray(columns.swapaxes(0, 1)).reshape(-1)
        rows, *exponents = (each.rows(self.first, last).read().reshape(last - self.first, -1)[:: self.apart] for each in self.ranges)
        if not exponents:
            return np.ascontiguousarray(rows).reshape(-1)
        codes = np.stack([rows & 15, rows >> 4], -1).reshape(n, -1, 2, _CODES)
        blocks = np.empty((n, codes.shape[1], 1 + _CODES), np.uint8)
        blocks[:, :, 0], blocks[:, :, 1:] = exponents[0], codes[:, :, 0] | codes[:, :, 1] << 4
        return blocks.reshape(-1)


def unstacked(name: str, at: StoredAt, scales: Mapping[str, StoredAt], n_experts: int) -> Iterator[tuple[str, StoredAt]]:
    """Yield the tensors of the single experts for a tensor that holds all of them, under our names; any other tensor unchanged.

    Args:
        name: the tensor's name, in our words.
        scales: the tensors of exponents, by their names in the files.
    """
    before, _, word = name.rpartition(".")
    fused, _, kind = word.partition("_proj")
    names, sizes = _PARTS.get(f"{fused}_proj", ()), list(at.shape)
    exponents = scales.get(at.name.removesuffix("_blocks") + "_scales") if kind == "_blocks" else None
    sound = {
        "": len(sizes) == 3,
        "_bias": len(sizes) == 2,
        "_blocks": exponents is not None
        and len(exponents.shape) == 3
        and exponents.shape[:2] == at.shape[:2]
        and _CODES * exponents.nbytes == at.nbytes,
    }.get(kind, False)
    height = sizes[2 if kind == "" else 1] if sound else 0
    if not before.endswith(".mlp.experts") or not names or not height or sizes[0] != n_experts or height % len(names):
        yield name, at
        return
    rows = height // len(names)
    stored_type, inputs = (at.type, sizes[1]) if exponents is None else (TENSOR_TYPES["MXFP4"], GROUP * exponents.shape[2])
    shape = (rows,) if kind == "_bias" else (rows, inputs)
    for expert in range(n_experts):
        source, own = _of_expert(at, expert), None if exponents is None else _of_expert(exponents, expert)
        nbytes = rows * stored_type.row_bytes(1 if kind == "_bias" else inputs)
        for first, part in enumerate(names):
            picked = PickedAt(at.path, at.name, stored_type, shape, source.offset, nbytes, source, first, len(names), own, kind == "")
            yield f"{before}.{expert}.{part}.{'bias' if kind == '_bias' else 'weight'}", picked


def _of_expert(at: StoredAt, expert: int) -> StoredAt:
    nbytes = at.nbytes // at.shape[0]
    return replace(at, shape=at.shape[1:], offset=at.offset + expert * nbytes, nbytes=nbytes)
