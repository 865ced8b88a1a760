"""Matrix products of a layer: `linear(x, path)`, whatever format the weights are in.

Quantised weights run torch's int4 kernel on the generated path and a library's product on the prompt path, of weights that were
dequantised at load (resident) or are now, into one scratch buffer (streamed): the same function fills both, so the bytes are the
same. Libraries choose kernels by how many rows there are, and their kernels add in different orders: so the prompt path's product is always of
as many rows, `BLOCK`, in bf16 where the processor multiplies that, else in float32. bf16 weights run one product for both paths, of whatever
rows there are; a single row is padded to two.

Shapes: T rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.backends.quantize import to_bf16_bits, to_grouped
from paceline.backends.torch.int4 import PackedMatrix
from paceline.backends.torch.processor import multiplies_bf16
from paceline.core.model import WeightsFormat
from paceline.core.weights import StoredTensor
from paceline.engine.executor import Path

BLOCK = {torch.bfloat16: 64, torch.float32: 16}
"""Rows of a prompt that are multiplied at once. With 16 every library seen gives a row the same bits in each place of a block, with 64 not in
float32 under AVX2; fewer are slower."""


class Linear(Protocol):
    """One matrix, or several fused along their outputs."""

    def __call__(self, x_TK: Tensor, path: Path) -> Tensor:
        """bf16 [T, N] of bf16 [T, K]."""
        ...


class Table(Linear, Protocol):
    """An embedding or a head: an embedding is looked up in its head."""

    def rows(self, rows_T: Tensor) -> Tensor:
        """Weights of the outputs named, bf16 [T, K]."""
        ...


class DenseLinear:
    """bf16 weights, one path."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._weight_NK, self._bias_N = weight_NK, bias_N

    def __call__(self, x_TK: Tensor, path: Path) -> Tensor:
        return two_rows(lambda x: F.linear(x, self._weight_NK, self._bias_N), x_TK)

    def rows(self, rows_T: Tensor) -> Tensor:
        return self._weight_NK[rows_T]


class Scratch:
    """Room for the bf16 weights of one matrix at a time, as large as the largest."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.bfloat16)

    def reserve(self, numbers: int) -> None:
        if numbers > self._room.numel():
            self._room = torch.empty(numbers, dtype=torch.bfloat16)

    def take(self, n: int, k: int) -> Tensor:
        return self._room[: n * k].view(n, k)


class QuantLinear:
    """int4 or int8 weights, two paths. Without a scratch buffer the prompt path's weights are resident."""

    def __init__(self, matrix: PackedMatrix, scratch: Scratch | None) -> None:
        self._matrix, self._scratch = matrix, scratch
        self._dtype = torch.bfloat16 if multiplies_bf16() else torch.float32
        self._resident: Tensor | None = None
        if scratch is None:
            self._resident = matrix.dequantise(torch.empty(matrix.padded, matrix.k, dtype=torch.bfloat16))
        else:
            scratch.reserve(matrix.k * matrix.padded)

    def __call__(self, x_TK: Tensor, path: Path) -> Tensor:
        return self._matrix.multiply(x_TK) if path is Path.GENERATED else self._prompt_product(x_TK)

    def _prompt_product(self, x_TK: Tensor) -> Tensor:
        matrix, scratch, block = self._matrix, self._scratch, BLOCK[self._dtype]
        weight_NK = self._resident if scratch is None else matrix.dequantise(scratch.take(matrix.padded, matrix.k))
        assert weight_NK is not None
        weight_NK = weight_NK.to(self._dtype)
        whole = F.pad(x_TK.to(self._dtype), (0, 0, 0, -len(x_TK) % block))
        y_TN = torch.cat([F.linear(rows, weight_NK) for rows in whole.split(block)])
        return y_TN[: len(x_TK), : matrix.n].bfloat16()


class JoinedLinear:
    """Matrices of several formats, one after the other along their outputs, and their bias."""

    def __init__(self, parts: Sequence[Linear], bias_N: Tensor | None) -> None:
        self._parts, self._bias_N = parts, bias_N

    def __call__(self, x_TK: Tensor, path: Path) -> Tensor:
        y_TN = self._parts[0](x_TK, path) if len(self._parts) == 1 else torch.cat([part(x_TK, path) for part in self._parts], 1)
        return y_TN if self._bias_N is None else y_TN + self._bias_N


class HeadLinear:
    """A quantised embedding or head: the int4 kernel for every row, whichever path led to it."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self._matrix = matrix

    def __call__(self, x_TK: Tensor, path: Path) -> Tensor:
        return self._matrix.multiply(x_TK)

    def rows(self, rows_T: Tensor) -> Tensor:
        return self._matrix.rows(rows_T)


def make_linear(
    tensors: Sequence[tuple[StoredTensor, WeightsFormat]], bias_N: Tensor | None, scratch: Scratch | None, device: torch.device
) -> Linear:
    """Fuse matrices of one width into one `Linear`.

    Args:
        tensors: matrices [N_i, K], and the format to hold each in: bf16 all or none.
        bias_N: bf16, of all of them.
        scratch: for streamed prompt weights; None: resident.
        device: where bf16 weights go. Quantised ones are the CPU's.
    """
    if all(weights is WeightsFormat.BF16 for _, weights in tensors):
        return DenseLinear(dense([tensor for tensor, _ in tensors], device), bias_N)
    parts: list[Linear] = []
    for weights, alike in groupby(tensors, lambda pair: pair[1]):
        bits = 4 if weights is WeightsFormat.INT4 else 8
        parts.append(QuantLinear(PackedMatrix([to_grouped(tensor, bits, torch.get_num_threads()) for tensor, _ in alike]), scratch))
    return parts[0] if len(parts) == 1 and bias_N is None else JoinedLinear(parts, bias_N)


def make_table(tensor: StoredTensor, weights: WeightsFormat, device: torch.device) -> Table:
    """An embedding or a head: bf16, or 8 bits."""
    if weights is WeightsFormat.BF16:
        return DenseLinear(dense([tensor], device))
    return HeadLinear(PackedMatrix([to_grouped(tensor, 8, torch.get_num_threads())]))


def dense(tensors: list[StoredTensor], device: torch.device) -> Tensor:
    """bf16 tensors, joined along their first dimension."""
    bits = [to_bf16_bits(tensor, torch.get_num_threads()) for tensor in tensors]
    joined = bits[0] if len(bits) == 1 else np.concatenate(bits)
    return torch.from_numpy(joined.view(np.int16)).view(torch.bfloat16).to(device)


def two_rows(product: Callable[[Tensor], Tensor], x_TK: Tensor) -> Tensor:
    """`product` of at least two rows."""
    if len(x_TK) > 1:
        return product(x_TK)
    return product(torch.cat([x_TK, torch.zeros_like(x_TK)]))[:1]
