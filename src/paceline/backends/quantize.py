"""Between stored tensors and the formats that kernels hold: requantise, widen, round. NumPy only, shared by all CPU backends.

Blocks of the bits asked for (Q4_0, Q4_1, Q8_0) keep their own codes; Q4_0's offset is -8 * scale, exact in float16. Anything else goes
through float32: 4 bits span each group's minimum to its maximum, 8 bits are symmetric about zero (GGUF's Q4_1 and Q8_0).
Codes are chosen for the scale as float16 holds it. Work goes in slabs of rows, so that temporaries stay small beside the tensor.

Shapes: N outputs (rows), K inputs (columns), G = K / 32 groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UnsupportedModel
from paceline.core.weights import GROUP, BlockTensor, DenseTensor, GroupedTensor, StoredTensor

Float32 = npt.NDArray[np.float32]

_SLAB = 1 << 20
"""Weights a slab holds: its temporaries take some 16 MiB. Raising it gains little speed."""

_CODE_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Types whose blocks are groups of one scale and one offset at most, with codes of so many bits."""

_HALF_MAX = float(np.finfo(np.float16).max)


def to_grouped(tensor: StoredTensor, bits: Literal[4, 8]) -> GroupedTensor:
    """A matrix in groups of 32.

    Args:
        tensor: a matrix [N, K].
        bits: 4 (codes 0..15, scale and offset) or 8 (codes -127..127, scale).

    Raises:
        UnsupportedModel: it is no matrix, or its rows are no whole groups.
    """
    shape = tensor_shape(tensor)
    if isinstance(tensor, BlockTensor) and _CODE_BITS.get(tensor.type) == bits and len(shape) == 2:
        return _split(tensor)
    if len(shape) != 2 or shape[1] % GROUP:
        raise UnsupportedModel(f"A tensor of shape {list(shape)} can't be held in groups of {GROUP} inputs", "Use --weights bf16.")
    scale_NG = np.empty((shape[0], shape[1] // GROUP), np.float16)
    if bits == 8:
        codes_NK = np.empty(shape, np.int8)
        for rows in _slabs(shape):
            codes_NK[rows], scale_NG[rows] = _symmetric(_widen(tensor, rows))
        return GroupedTensor(8, codes_NK, scale_NG, None)
    unsigned_NK, offset_NG = np.empty(shape, np.uint8), np.empty_like(scale_NG)
    for rows in _slabs(shape):
        unsigned_NK[rows], scale_NG[rows], offset_NG[rows] = _min_max(_widen(tensor, rows))
    return GroupedTensor(4, unsigned_NK, scale_NG, offset_NG)


def to_float32(tensor: StoredTensor | GroupedTensor) -> Float32:
    """The tensor's values, float32, in its own shape. Exact but for one rounding where a group has an offset."""
    shape = tensor_shape(tensor)
    if len(shape) != 2:
        return _widen(tensor, slice(None))
    out = np.empty(shape, np.float32)
    for rows in _slabs(shape):
        out[rows] = _widen(tensor, rows)
    return out


def to_bf16_bits(tensor: StoredTensor) -> npt.NDArray[np.uint16]:
    """The tensor's values as bf16 bits, rounded to the nearest (ties to even), in its own shape."""
    if isinstance(tensor, DenseTensor) and tensor.dtype == "bf16":
        return tensor.data.view(np.uint16)
    shape = tensor_shape(tensor)
    if len(shape) != 2:
        return round_to_bf16(_widen(tensor, slice(None)))
    out = np.empty(shape, np.uint16)
    for rows in _slabs(shape):
        out[rows] = round_to_bf16(_widen(tensor, rows))
    return out


def round_to_bf16(values: Float32) -> npt.NDArray[np.uint16]:
    """bf16 bits of float32 values, to the nearest, ties to even. A NaN stays a NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    missing = np.isnan(values)
    if missing.any():
        rounded[missing] = 0x7FC0
    return rounded


def tensor_shape(tensor: StoredTensor | GroupedTensor) -> tuple[int, ...]:
    """Shape of the values a stored tensor stands for."""
    match tensor:
        case GroupedTensor():
            return tensor.codes_NK.shape
        case BlockTensor():
            return tensor.shape
        case DenseTensor():
            return tensor.data.shape


def _slabs(shape: tuple[int, ...]) -> Iterator[slice]:
    step = max(1, _SLAB // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield slice(start, start + step)


def _split(tensor: BlockTensor) -> GroupedTensor:
    """Codes, scales and offsets of Q4_0, Q4_1 or Q8_0 blocks."""
    n, k = tensor.shape
    groups_NGB = tensor.rows_NB.reshape(n, k // GROUP, -1)
    halves_at = lambda at: np.ascontiguousarray(groups_NGB[:, :, at : at + 2]).view(np.float16).reshape(n, -1)  # noqa: E731
    scale_NG = halves_at(0)
    if tensor.type == "Q8_0":
        return GroupedTensor(8, np.ascontiguousarray(groups_NGB[:, :, 2:]).view(np.int8).reshape(n, k), scale_NG, None)
    offset_NG, first = (halves_at(2), 4) if tensor.type == "Q4_1" else (scale_NG * np.float16(-8), 2)
    quants_NGB = groups_NGB[:, :, first:]
    codes_NGK = np.empty((n, k // GROUP, GROUP), np.uint8)
    np.bitwise_and(quants_NGB, 15, out=codes_NGK[:, :, : GROUP // 2])
    np.right_shift(quants_NGB, 4, out=codes_NGK[:, :, GROUP // 2 :])
    return GroupedTensor(4, codes_NGK.reshape(n, k), scale_NG, offset_NG)


def _dequantised(tensor: BlockTensor, rows: slice) -> Float32:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if len(tensor.shape) < 2:
        return dequantize(tensor.rows_NB, GGMLQuantizationType[tensor.type]).reshape(tensor.shape)[rows]
    return dequantize(tensor.rows_NB[rows], GGMLQuantizationType[tensor.type])


def _widen(tensor: StoredTensor | GroupedTensor, rows: slice) -> Float32:
    if isinstance(tensor, BlockTensor):
        return _dequantised(tensor, rows)
    if isinstance(tensor, GroupedTensor):
        codes = tensor.codes_NK[rows].astype(np.float32)
        groups = codes.reshape(*codes.shape[:-1], -1, GROUP)
        groups *= tensor.scale_NG[rows, :, None].astype(np.float32)
        if tensor.offset_NG is not None:
            groups += tensor.offset_NG[rows, :, None].astype(np.float32)
        return codes
    data = tensor.data[rows]
    if tensor.dtype == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def _halves(values: Float32) -> npt.NDArray[np.float16]:
    return np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)


def _inverse(scale_NG: npt.NDArray[np.float16]) -> Float32:
    wide = scale_NG.astype(np.float32)
    return np.divide(1, wide, out=np.zeros_like(wide), where=wide != 0)


def _symmetric(weights_NK: Float32) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    groups = weights_NK.reshape(len(weights_NK), -1, GROUP)
    scale_NG = _halves(np.abs(groups).max(axis=2) / 127)
    codes = np.clip(np.rint(groups * _inverse(scale_NG)[:, :, None]), -127, 127)
    return codes.astype(np.int8).reshape(weights_NK.shape), scale_NG


def _min_max(weights_NK: Float32) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    groups = weights_NK.reshape(len(weights_NK), -1, GROUP)
    low = groups.min(axis=2)
    scale_NG, offset_NG = _halves((groups.max(axis=2) - low) / 15), _halves(low)
    from_low = groups - offset_NG.astype(np.float32)[:, :, None]
    codes = np.clip(np.rint(from_low * _inverse(scale_NG)[:, :, None]), 0, 15)
    return codes.astype(np.uint8).reshape(weights_NK.shape), scale_NG, offset_NG
