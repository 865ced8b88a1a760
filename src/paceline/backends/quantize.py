"""Convert stored tensors to the uniform formats: requantise, widen, round. Compiled, shared by all backends.

int4 is held as Q4_1, from a group's minimum to its maximum; int8 as Q8_0, symmetric about zero; Q5_1 lies between. Blocks of 4-bit codes with a scale
and an offset (Q4_0, Q4_1, Q4_K) keep their codes as int4, and Q8_0 is int8; all other types are converted to float32 first. Threads share the work in
slabs of rows, so that temporaries stay small compared with the tensor.

Shapes: N outputs (rows), K inputs (columns), G = K / 32 groups, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from paceline.backends.ggml import quantise
from paceline.backends.ggml.dequantise import dequantise
from paceline.core.weights import BlockTensor, DenseTensor, StoredTensor

Float32 = npt.NDArray[np.float32]
Target = Literal["Q4_1", "Q5_1", "Q8_0"]

SLAB_WEIGHTS: Final = 1 << 20
"""Weights of a slab, which take 4 MiB as float32. Raising it: more memory for little speed."""


_REQUANTISE: Final[Mapping[str, Callable[[Float32, npt.NDArray[np.uint8]], None]]] = {
    "Q4_1": quantise.to_q4_1,
    "Q5_1": quantise.to_q5_1,
    "Q8_0": quantise.to_q8_0,
}


def blocks_of(tensor: StoredTensor, kind: Target, rows: slice, out_NB: npt.NDArray[np.uint8]) -> None:
    """Write rows of a matrix as blocks of another type."""
    match tensor:
        case BlockTensor(type="Q4_0") if kind == "Q4_1":
            quantise.q4_0_to_q4_1(tensor.rows_NB[rows], out_NB)
        case BlockTensor(type="Q4_K") if kind == "Q4_1":
            quantise.q4_k_to_q4_1(tensor.rows_NB[rows], out_NB)
        case _:
            _REQUANTISE[kind](_widen(tensor, rows), out_NB)


def to_float32(tensor: StoredTensor, threads: int = 1) -> Float32:
    """Return the tensor's values as float32, in its own shape."""
    shape = tensor_shape(tensor)
    if len(shape) != 2:
        return _widen(tensor, slice(None)).reshape(shape)
    out = np.empty(shape, np.float32)

    def widen(rows: slice) -> None:
        out[rows] = _widen(tensor, rows)

    each_slab(shape, threads, widen)
    return out


def to_bf16_bits(tensor: StoredTensor, threads: int = 1) -> npt.NDArray[np.uint16]:
    """Return the tensor's values as bf16 bits, rounded to the nearest (ties to even), in its own shape."""
    if isinstance(tensor, DenseTensor) and tensor.dtype == "bf16":
        return tensor.data.view(np.uint16)
    shape = tensor_shape(tensor)
    if len(shape) != 2:
        return round_to_bf16(_widen(tensor, slice(None)).reshape(shape))
    out = np.empty(shape, np.uint16)
    each_slab(shape, threads, lambda rows: quantise.to_bf16(_widen(tensor, rows), out[rows]))
    return out


def round_to_bf16(values: Float32) -> npt.NDArray[np.uint16]:
    """Return float32 values as bf16 bits, rounded to the nearest, ties to even. A NaN stays a NaN."""
    out = np.empty(values.shape, np.uint16)
    quantise.to_bf16(np.ascontiguousarray(values, np.float32).reshape(1, -1), out.reshape(1, -1))
    return out


def tensor_shape(tensor: StoredTensor) -> tuple[int, ...]:
    """Return the shape of the values that a stored tensor stands for."""
    return tensor.shape if isinstance(tensor, BlockTensor) else tensor.data.shape


def slabs(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield ranges of a matrix's rows with about `SLAB_WEIGHTS` weights each, in whole blocks of 16 rows."""
    step = max(16, SLAB_WEIGHTS // max(1, shape[1]) // 16 * 16)
    for start in range(0, shape[0], step):
        yield slice(start, min(shape[0], start + step))


def each_slab(shape: tuple[int, ...], threads: int, work: Callable[[slice], None]) -> None:
    """Call `work` with every slab of a matrix's rows, on a pool of `threads` threads."""
    if threads == 1 or shape[0] * shape[1] <= SLAB_WEIGHTS:
        for rows in slabs(shape):
            work(rows)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, slabs(shape)):
            pass


def _widen(tensor: StoredTensor, rows: slice) -> Float32:
    """Return rows as float32; a quantised vector completely, as one row."""
    if isinstance(tensor, BlockTensor):
        k, is_vector = tensor.shape[-1], len(tensor.shape) == 1
        rows_NB = tensor.rows_NB if is_vector else tensor.rows_NB[rows]
        out = np.empty((len(rows_NB), k), np.float32)
        dequantise(tensor.type, rows_NB, out)
        return out
    data = tensor.data[rows]
    if tensor.dtype == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
