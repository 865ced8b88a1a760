"""Random tensors of every GGML type: codes and sub-scales are random bytes, and scales are chosen so that the weights have a wanted spread.

Law: bytes follow from the generator's raw words alone, so that a seed gives the same file with every NumPy. A piece is drawn at a time, so
that a tensor of any size takes some 16 MiB of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.core.weights import TENSOR_TYPES

Bytes = npt.NDArray[np.uint8]

DENSE: Final = frozenset({"F32", "F16", "BF16"})
PIECE_BYTES: Final = 1 << 24
_SAMPLE_BLOCKS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a type's blocks hold their scales: byte offset and factor of each float16 field, and how to draw what lies between."""

    fields: tuple[tuple[int, float], ...]
    signed: bool = False
    """Real files have scales of both signs, which centres the weights: codes of -8 to 7 have a mean of -0.5."""
    shape: Callable[[Bytes], None] | None = None
    """Makes random sub-scales like those of real files."""


def _equal_nibbles(blocks_NB: Bytes) -> None:
    """Q2_K: every offset is that of its scale, so that weights are centred."""
    blocks_NB[:, :16] = (blocks_NB[:, :16] & 15) * 17


def _k_scales(blocks_NB: Bytes) -> None:
    """Q4_K and Q5_K: eight scales of 6 bits from 32 to 63, and offsets that differ from them by -2 to 1."""
    packed_N12 = blocks_NB[:, 4:16]
    scales_N8 = (packed_N12[:, :8] & 31) | 32
    offsets_N8 = np.minimum(scales_N8 + ((packed_N12[:, 4:12] >> 5) & 3) - 2, 63).astype(np.uint8)
    packed_N12[:, 0:4] = scales_N8[:, :4] | ((scales_N8[:, 4:] >> 4) << 6)
    packed_N12[:, 4:8] = offsets_N8[:, :4] | ((offsets_N8[:, 4:] >> 4) << 6)
    packed_N12[:, 8:12] = (scales_N8[:, 4:] & 15) | ((offsets_N8[:, 4:] & 15) << 4)


def _q6_scales(blocks_NB: Bytes) -> None:
    """Q6_K: sixteen scales of both signs, from 64 to 127 in size."""
    scales_N16 = blocks_NB[:, 192:208]
    size_N16 = ((scales_N16 & 63) + 64).astype(np.int8)
    scales_N16[:] = np.where(scales_N16 & 128, -size_N16, size_N16).view(np.uint8)


def _no_lowest(blocks_NB: Bytes) -> None:
    """Q8_0: quantisers never write -128."""
    codes_NG = blocks_NB[:, 2:].view(np.int8)
    np.maximum(codes_NG, -127, out=codes_NG)


_LAYOUTS: Final = {
    "Q4_0": _Layout(((0, 1.0),), signed=True),
    "Q4_1": _Layout(((0, 1.0), (2, -7.5))),
    "Q5_0": _Layout(((0, 1.0),), signed=True),
    "Q5_1": _Layout(((0, 1.0), (2, -15.5))),
    "Q8_0": _Layout(((0, 1.0),), shape=_no_lowest),
    "Q2_K": _Layout(((80, 1.0), (82, 1.5)), shape=_equal_nibbles),
    "Q3_K": _Layout(((108, 1.0),), signed=True),
    "Q4_K": _Layout(((0, 1.0), (2, 7.5)), shape=_k_scales),
    "Q5_K": _Layout(((0, 1.0), (2, 15.5)), shape=_k_scales),
    "Q6_K": _Layout(((208, 1.0),), shape=_q6_scales),
    "IQ2_XXS": _Layout(((0, 1.0),)),
    "IQ2_XS": _Layout(((0, 1.0),)),
    "IQ2_S": _Layout(((0, 1.0),)),
    "IQ3_XXS": _Layout(((0, 1.0),)),
    "IQ3_S": _Layout(((0, 1.0),)),
    "IQ1_S": _Layout(((0, 1.0),)),
    "IQ1_M": _Layout(()),
    "IQ4_NL": _Layout(((0, 1.0),), signed=True),
    "IQ4_XS": _Layout(((0, 1.0),), signed=True),
    "TQ1_0": _Layout(((52, 1.0),)),
    "TQ2_0": _Layout(((64, 1.0),), signed=True),
    "MXFP4": _Layout(()),
}
BLOCK_TYPES: Final = tuple(_LAYOUTS)


def random_tensor(kind: str, shape: tuple[int, ...], spread: float, seed: tuple[int, ...], quiet_rows: int = 0) -> Iterator[Bytes]:
    """A random tensor's bytes as a GGUF file holds them, a piece at a time.

    Args:
        kind: the GGML type's name.
        shape: rows first; the last is a multiple of the type's block.
        spread: standard deviation of the weights.
        seed: what all follows from.
        quiet_rows: the first so many rows are an eighth as large.
    """
    type_ = TENSOR_TYPES[kind]
    generator = np.random.SFC64(np.random.SeedSequence(seed))
    row_blocks = shape[-1] // type_.block
    n_blocks, quiet_blocks = int(np.prod(shape[:-1], dtype=np.int64)) * row_blocks, quiet_rows * row_blocks
    piece = max(1, PIECE_BYTES // type_.nbytes)
    for start in range(0, n_blocks, piece):
        spread_N1 = np.full((min(piece, n_blocks - start), 1), spread, np.float32)
        spread_N1[: max(0, quiet_blocks - start)] /= 8
        yield _piece(kind, generator, spread_N1).reshape(-1)


def _piece(kind: str, generator: np.random.SFC64, spread_N1: npt.NDArray[np.float32]) -> Bytes:
    """Blocks whose weights have the spread that is given for each of them."""
    n = len(spread_N1)
    if kind in DENSE:
        return _dense(kind, _centred(generator, n)[:, None] * spread_N1)
    blocks_NB = _random_bytes(generator, n * TENSOR_TYPES[kind].nbytes).reshape(n, -1)
    _set_scales(kind, blocks_NB, spread_N1 / _unit_spread(kind))
    return blocks_NB


def _random_bytes(generator: np.random.SFC64, n: int) -> Bytes:
    return generator.random_raw(-(-n // 8)).view(np.uint8)[:n]


def _centred(generator: np.random.SFC64, n: int) -> npt.NDArray[np.float32]:
    """Nearly normal numbers of mean 0 and deviation 1."""
    return _nearly_normal()[_random_bytes(generator, 2 * n).view(np.uint16)]


@cache
def _nearly_normal() -> npt.NDArray[np.float32]:
    """65,536 numbers to draw from: sums of four bytes, so that they are the same everywhere."""
    sums = _random_bytes(np.random.SFC64(0), 4 << 16).reshape(-1, 4).sum(axis=1, dtype=np.uint16).astype(np.float32)
    return (sums - sums.mean()) / sums.std()


def _dense(kind: str, values: npt.NDArray[np.float32]) -> Bytes:
    match kind:
        case "F32":
            return values.view(np.uint8)
        case "F16":
            return values.astype(np.float16).view(np.uint8)
        case _:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def _set_scales(kind: str, blocks_NB: Bytes, scale_N1: npt.NDArray[np.float32]) -> None:
    """Make random bytes blocks of a type: its scale fields are the ones given, a quarter more or less."""
    layout = _LAYOUTS[kind]
    if layout.shape is not None:
        layout.shape(blocks_NB)
    if kind == "MXFP4":
        octave = np.rint(np.log2(scale_N1)).astype(np.int16) + 127
        blocks_NB[:, :1] = np.clip(octave - (blocks_NB[:, :1] & 1), 1, 254).astype(np.uint8)
        return
    chance_N1 = blocks_NB[:, layout.fields[0][0] if layout.fields else 48][:, None]
    scale_N1 = scale_N1 * (0.75 + (chance_N1 >> 1) / 254).astype(np.float32)
    if layout.signed:
        scale_N1 = np.where(chance_N1 & 1, -scale_N1, scale_N1)
    for at, factor in layout.fields:
        blocks_NB[:, at : at + 2] = (scale_N1 * np.float32(factor)).astype(np.float16).view(np.uint8)
    if kind == "IQ1_M":  # its scale lies in the highest four bits of four words
        bits_N1 = scale_N1.astype(np.float16).view(np.uint16)
        words_N4 = blocks_NB[:, 48:56].copy().view(np.uint16)
        blocks_NB[:, 48:56] = (
            ((words_N4 & 0xFFF) | ((bits_N1 >> np.array([0, 4, 8, 12], np.uint16)) << 12)).astype(np.uint16).view(np.uint8)
        )


@cache
def _unit_spread(kind: str) -> float:
    """Deviation of the weights where a type's scale is 1: measured, by the gguf library's own reading of it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks_NB = _random_bytes(np.random.SFC64(0), _SAMPLE_BLOCKS * TENSOR_TYPES[kind].nbytes).reshape(_SAMPLE_BLOCKS, -1)
    _set_scales(kind, blocks_NB, np.ones((_SAMPLE_BLOCKS, 1), np.float32))
    return float(np.std(dequantize(blocks_NB, GGMLQuantizationType[kind]), dtype=np.float64))
