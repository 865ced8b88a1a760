"""Matrix products of a layer: `linear(x, path)`, whatever format the weights are in.

Quantised weights run torch's int4 kernel on the generated path and a library's product on the prompt path, of weights that were
dequantised at load (resident) or are now, into one scratch buffer (streamed): the same function fills both, so the bytes are the
same. Libraries choose kernels by how many rows there are, and their kernels add in different orders: so the prompt path's product is always of
as many rows, `BLOCK`, in bf16 where the processor multiplies that, else in float32. bf16 weights run one product for both paths, of whatever
rows there are; a single row is padded to two.

Shapes: T rows, N outputs, K inputs.

Matrices for torch's int4 CPU kernel: pack, read rows back, dequantise.

The kernel computes `(code - 8) * scale + zero` in float32 from codes packed two a byte and bf16 scales, gives a row the same bits
whatever the rows or threads, and returns bf16. 8-bit codes run on it too, as two nibbles side by side along the inputs:
`code = 16 * (high - 8) + (low - 8) + 8`, both halves of one dot product, summed in float32 (torch's own int8 kernel has one scale a
whole row, not a group). torch packs by instruction set; which layout is in force is found by packing a probe.

Shapes: N outputs (whole blocks of 64), K inputs, H = K or 2 K packed inputs, G = K / 32 groups, J = N / B blocks, T rows.

oneDNN, which torch multiplies bf16 matrices with, does not tell which instructions it uses. It chooses by what the processor has, below the bound of an
environment variable; so does `onednn_isa`. Source: oneDNN's developer guide, "CPU dispatcher control".
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from llvmlite import binding
from torch import Tensor

from paceline.backends.quantize import GroupedTensor, to_bf16_bits, to_grouped
from paceline.core.errors import UnsupportedModel
from paceline.core.model import WeightsFormat
from paceline.core.weights import GROUP, StoredTensor
from paceline.engine.executor import Path

_LEVELS = {
    "AVX": ("avx",),
    "AVX2": ("avx2", "fma"),
    "AVX2_VNNI": ("avxvnni",),
    "AVX2_VNNI_2": ("avxvnniint8", "avxneconvert"),
    "AVX512_CORE": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "AVX512_CORE_VNNI": ("avx512vnni",),
    "AVX512_CORE_BF16": ("avx512bf16",),
    "AVX512_CORE_FP16": ("avx512fp16",),
    "AVX512_CORE_AMX": ("amx-tile", "amx-bf16", "amx-int8"),
    "AVX512_CORE_AMX_FP16": ("amx-fp16",),
}
"""oneDNN's names, ascending, and what each adds. AVX512_CORE does not need the levels between AVX2 and itself."""
_BOUNDS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_UNITS = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16")


def onednn_isa() -> str:
    """The highest level in use; on other processors than x86, their name and whether they multiply bf16."""
    features = binding.get_host_cpu_features()
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return f"{platform.machine()}{' bf16' if features.get('bf16', False) else ''}"
    bound = next((os.environ[name].upper() for name in _BOUNDS if os.environ.get(name)), "ALL")
    found = "SSE41"
    for level, needs in _LEVELS.items():
        if all(features.get(need, False) for need in needs):
            found = level
        if level == bound:
            break
    return found


@cache
def multiplies_bf16() -> bool:
    """Whether there are instructions for products of bf16; where there are none, float32 is several times faster."""
    isa = onednn_isa()
    return isa in _UNITS or isa.endswith(" bf16")


Scalar = TypeVar("Scalar", bound=np.generic)

ROWS = 64
"""Outputs are padded to whole blocks of the widest layout."""

_SLAB = 4096
"""Outputs packed at a time: torch wants the codes as int32."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """`block` outputs lie together, input by input, `block / 2` bytes each: low nibbles hold the first half, high ones the second."""

    block: int

    def place(self, rows_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(block, byte, shift) of each output."""
        within = rows_T % self.block
        return rows_T // self.block, within % (self.block // 2), within // (self.block // 2) * 4


@cache
def _layout() -> _Layout:
    codes = torch.arange(128 * 32, dtype=torch.int32).reshape(128, 32).mul_(7).remainder_(61).remainder_(16)
    packed = _pack(codes)
    for block in (64, 32, 16):
        layout = _Layout(block)
        at, byte, shift = layout.place(torch.arange(128))
        if torch.equal((packed.view(-1, 32, block // 2)[at, :, byte] >> shift[:, None]) & 15, codes):
            return layout
    raise UnsupportedModel("This build of torch packs 4-bit weights in an unknown layout", "Use --weights bf16, or torch 2.13.")


def _pack(codes_NH: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NH, 1)


class PackedMatrix:
    """One matrix, packed. `table_GN2` holds bf16 (scale, zero) of each group and output. What is dequantised of 8-bit codes takes the scale as it was,
    `fine_GN` in fp16: rounded twice, weights would be further from the file than its own error allows.

    Args:
        tensors: grouped matrices of one width and equal bits, stacked along the outputs.
    """

    def __init__(self, tensors: list[GroupedTensor]) -> None:
        self.bits: Literal[4, 8] = tensors[0].bits
        self.n = sum(len(t.codes_NK) for t in tensors)
        self.k = tensors[0].codes_NK.shape[1]
        codes_NK = _whole_blocks(np.concatenate([t.codes_NK for t in tensors]))
        scale_NG = _whole_blocks(np.concatenate([t.scale_NG for t in tensors]))
        scale = _bf16(scale_NG)
        if self.bits == 4:
            offset = _whole_blocks(np.concatenate([t.offset_NG if t.offset_NG is not None else np.zeros_like(t.scale_NG) for t in tensors]))
            zero = torch.from_numpy(offset.astype(np.float32) + 8 * scale_NG.astype(np.float32)).bfloat16()
            self._table, self._fine_GN = _table(scale, zero), None
        else:
            self._table = torch.cat([_table(16 * scale, torch.zeros_like(scale)), _table(scale, 8 * scale)])
            self._fine_GN = torch.from_numpy(np.ascontiguousarray(scale_NG.T))
        slabs = [_pack(_nibbles(codes_NK[at : at + _SLAB], self.bits)) for at in range(0, len(codes_NK), _SLAB)]
        self._packed = torch.cat([slab.view(-1) for slab in slabs])

    def multiply(self, x_TK: Tensor) -> Tensor:
        """bf16 [T, N] of bf16 [T, K]: the generated path's product."""
        x_TH = x_TK if self.bits == 4 else torch.cat([x_TK, x_TK], 1)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x_TH, self._packed.view(-1, x_TH.shape[1] // 2), GROUP, self._table)
        return y[:, : self.n]

    def rows(self, rows_T: Tensor) -> Tensor:
        """Weights of the outputs named, bf16 [T, K]."""
        layout, nibbles = _layout(), self.k * (self.bits // 4)
        block, byte, shift = layout.place(rows_T)
        codes_TH = (self._packed.view(-1, nibbles, layout.block // 2)[block, :, byte] >> shift[:, None]) & 15
        spread = lambda of_GT: of_GT.T[:, :, None]  # noqa: E731
        if self._fine_GN is None:
            scale_GT, zero_GT = self._table[:, rows_T].unbind(2)
            codes_TGK = (codes_TH.bfloat16() - 8).reshape(len(rows_T), -1, GROUP)
            return torch.addcmul(spread(zero_GT), codes_TGK, spread(scale_GT)).reshape(len(rows_T), self.k)
        codes_TGK = _signed(*codes_TH.chunk(2, 1)).reshape(len(rows_T), -1, GROUP)
        return (codes_TGK * spread(self._fine_GN[:, rows_T])).bfloat16().reshape(len(rows_T), self.k)

    def dequantise(self, out_NK: Tensor) -> Tensor:
        """All weights: bf16, rounded once, written to `out_NK` [N padded, K] and returned."""
        layout, groups = _layout(), self.k // GROUP
        half = layout.block // 2
        packed = self._packed.view(-1, self.bits // 4, groups, GROUP, half)
        out = out_NK.view(-1, 2, half, groups, GROUP).permute(0, 3, 4, 1, 2)
        by_block = lambda of_GN: of_GN.reshape(groups, 1, -1, 2, half).permute(2, 0, 1, 3, 4)  # noqa: E731
        for side, nibble in enumerate((packed & 15, packed >> 4)):
            if self._fine_GN is None:
                scale, zero = (by_block(of_GN)[:, :, :, side] for of_GN in self._table.unbind(2))
                torch.addcmul(zero, nibble[:, 0].bfloat16().sub_(8), scale, out=out[:, :, :, side])
            else:
                # The product of bf16 and fp16 is float32, rounded once.
                torch.mul(_signed(nibble[:, 0], nibble[:, 1]), by_block(self._fine_GN)[:, :, :, side], out=out[:, :, :, side])
        return out_NK

    @property
    def padded(self) -> int:
        """Outputs, padding included: `dequantise` wants room for `padded * k` numbers."""
        return -(-self.n // ROWS) * ROWS


def _signed(high: Tensor, low: Tensor) -> Tensor:
    """bf16 of 8-bit codes from their nibbles; exact, since bf16 holds every integer to 256."""
    return high.bfloat16().sub_(8).mul_(16).add_(low.bfloat16())


def _nibbles(codes_NK: npt.NDArray[np.uint8 | np.int8], bits: int) -> Tensor:
    codes = torch.from_numpy(codes_NK).int()
    return codes if bits == 4 else torch.cat([(codes >> 4) + 8, codes & 15], 1)


def _table(scale_NG: Tensor, zero_NG: Tensor) -> Tensor:
    return torch.stack([scale_NG.T, zero_NG.T], 2).contiguous()


def _bf16(array: npt.NDArray[np.float16]) -> Tensor:
    return torch.from_numpy(array.astype(np.float32)).bfloat16()


def _whole_blocks(matrix: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    return np.pad(matrix, ((0, -len(matrix) % ROWS), (0, 0)))


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
