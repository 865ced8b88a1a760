"""The compiled matrix product against NumPy, for every format, tile and remainder; and its promise that rows don't see one another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu
from paceline.backends.quantize import round_to_bf16, to_bf16_bits, to_float32, to_grouped
from paceline.core.weights import DenseTensor

if not cpu.runs_here():
    pytest.skip("this processor lacks AVX512-BF16 or AVX512-VNNI", allow_module_level=True)

from numba import njit

from paceline.backends.cpu import pack
from paceline.backends.cpu.aligned import aligned
from paceline.backends.cpu.gemm import BF16, INT4, INT8, gemm
from paceline.backends.cpu.rows import quantize

N_BLOCKS = 3
"""Blocks of 16 outputs: one tile of two, and a remainder."""
GROUPS = 19
ROWS = 44
ACTIVATION_BITS = {INT4: 8, INT8: 16}


@njit
def quantize_int8(x: int, n: int, out: int, scales: int) -> None:
    quantize(8, x, n, out, scales)


@njit
def quantize_int16(x: int, n: int, out: int, scales: int) -> None:
    quantize(16, x, n, out, scales)


QUANTIZE = {8: quantize_int8, 16: quantize_int16}


def widen(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def quantized(x: npt.NDArray[np.uint16], bits: int) -> tuple[npt.NDArray[np.signedinteger], npt.NDArray[np.float32]]:
    """Codes [rows, k] and (scale, sum) [rows, G, 2] as the kernel writes them."""
    codes = np.zeros(x.shape, np.int8 if bits == 8 else np.int16)
    scales = np.zeros((len(x), x.shape[1] // 32, 2), np.float32)
    for row in range(len(x)):
        QUANTIZE[bits](x[row].ctypes.data, x.shape[1], codes[row].ctypes.data, scales[row].ctypes.data)
    return codes, scales


@pytest.mark.parametrize("bits", [8, 16])
def test_quantize(bits: int) -> None:
    x = round_to_bf16(
        np.random.default_rng(bits).standard_normal((5, 96), np.float32) * np.array([[1], [1e-30], [1e30], [0], [7]], np.float32)
    )
    codes, scales = quantized(x, bits)
    groups, most = widen(x).reshape(5, 3, 32), np.float32(2 ** (bits - 1) - 1)
    peak = np.abs(groups).max(2)
    assert np.array_equal(scales[..., 0], peak / most)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.rint(groups * (most / peak)[..., None])
    found = codes.reshape(5, 3, 32)
    live = np.array([0, 1, 2, 4])
    assert np.array_equal(found[live], wanted[live])
    assert np.array_equal(scales[live, :, 1], scales[live, :, 0] * found[live].sum(2, dtype=np.int32).astype(np.float32))
    assert (scales[3] == 0).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden_by_quantising(poison: float) -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 40] = poison
    _, scales = quantized(round_to_bf16(x), 8)
    assert (scales[0, 0] == 0).all()
    assert not np.isfinite(scales[0, 1]).any()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", [INT4, INT8, BF16])
def test_product(form: int) -> None:
    rng = np.random.default_rng(form)
    n, k = 16 * N_BLOCKS, 32 * GROUPS
    dense = DenseTensor(rng.standard_normal((n, k), np.float32), "f32")
    words = aligned(pack.packed_bytes(form, n, k)).view(np.uint16).reshape(N_BLOCKS, GROUPS, -1)
    if form == BF16:
        bits = to_bf16_bits(dense)
        pack.pack_bf16(bits, words)
        weights = widen(bits)
    else:
        grouped = to_grouped(dense, 4 if form == INT4 else 8)
        pack.pack_grouped(grouped, words)
        weights = to_float32(grouped)
    x = round_to_bf16(rng.standard_normal((ROWS, k), np.float32))
    inputs, scales, meant = x, np.zeros((ROWS, GROUPS, 2), np.float32), widen(x).astype(np.float64)
    if form != BF16:
        inputs, scales = quantized(x, ACTIVATION_BITS[form])
        meant = (inputs.reshape(ROWS, GROUPS, 32) * scales[..., :1].astype(np.float64)).reshape(ROWS, k)

    def product(first: int, rows: int) -> npt.NDArray[np.float32]:
        out = np.full((rows, n), np.nan, np.float32)
        gemm(
            form,
            words.ctypes.data,
            N_BLOCKS,
            inputs[first:].ctypes.data,
            inputs.strides[0],
            scales[first:].ctypes.data,
            scales.strides[0],
            rows,
            out.ctypes.data,
            4 * n,
            GROUPS,
        )
        return out

    whole = product(0, ROWS)
    exact = meant @ weights.T.astype(np.float64)
    # fp32 sums of k products of order one: rounding errors add like a random walk.
    assert np.abs(whole - exact).max() < 1e-5 * k
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 31, 32, 33, 38):
        for first in (0, ROWS - rows):
            assert product(first, rows).tobytes() == whole[first : first + rows].tobytes(), f"{rows} rows from {first}"


def test_outputs_that_do_not_fill_a_block_are_followed_by_zeros() -> None:
    bits = round_to_bf16(np.ones((5, 32), np.float32))
    words = np.zeros((1, 1, 512), np.uint16)
    pack.pack_bf16(bits, words)
    lanes = words.reshape(16, 16, 2)
    assert (lanes[:, :5] == 0x3F80).all()
    assert not lanes[:, 5:].any()
