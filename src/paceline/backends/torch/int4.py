"""Matrices for torch's int4 CPU kernel: pack, read rows back, dequantise.

The kernel computes `(code - 8) * scale + zero` in float32 from codes packed two a byte and bf16 scales, gives a row the same bits
whatever the rows or threads, and returns bf16. 8-bit codes run on it too, as two nibbles side by side along the inputs:
`code = 16 * (high - 8) + (low - 8) + 8`, both halves of one dot product, summed in float32 (torch's own int8 kernel has one scale a
whole row, not a group). torch packs by instruction set; which layout is in force is found by packing a probe.

Shapes: N outputs (whole blocks of 64), K inputs, H = K or 2 K packed inputs, G = K / 32 groups, J = N / B blocks, T rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.backends.quantize import GroupedTensor
from paceline.core.errors import UnsupportedModel
from paceline.core.weights import GROUP

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
