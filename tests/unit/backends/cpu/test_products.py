"""The compiled matrix product against NumPy, for every format, tile and remainder; and its promise that rows don't see one another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu
from paceline.backends.quantize import round_to_bf16, to_bf16_bits, to_blocks, to_float32, to_grouped
from paceline.core.weights import DenseTensor

if not cpu.runs_here():
    pytest.skip("this processor lacks AVX512-BF16 or AVX512-VNNI", allow_module_level=True)

from numba import njit

from paceline.backends.cpu import pack
from paceline.backends.cpu.aligned import aligned
from paceline.backends.cpu.forms import LAYOUT, Form, Inputs
from paceline.backends.cpu.products import bounds_of, call_product, product
from paceline.backends.cpu.rows import quantize

N_BLOCKS = 3
"""Blocks of 16 outputs: one tile of two, and a remainder."""
GROUPS = 19
ROWS = 44


@njit
def call(
    address: int,
    w: int,
    w_stride: int,
    x: int,
    x_stride: int,
    scales: int,
    scales_stride: int,
    rows: int,
    out: int,
    bounds: int,
    segments: int,
) -> None:
    call_product(address, w, w_stride, N_BLOCKS, x, x_stride, scales, scales_stride, rows, out, 64 * N_BLOCKS, bounds, segments)


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
    """Codes [rows, k] and (scale, scale * sum, -32 * sums of halves as bits) [rows, G, 4] as the kernel writes them."""
    codes = np.zeros(x.shape, np.int8 if bits == 8 else np.int16)
    scales = np.zeros((len(x), x.shape[1] // 32, 4), np.float32)
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
    assert (scales[3, :, :2] == 0).all()
    assert np.array_equal(scales[live, :, 2:].view(np.int32), -32 * found[live].reshape(4, 3, 2, 16).sum(3, dtype=np.int32))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden_by_quantising(poison: float) -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 40] = poison
    _, scales = quantized(round_to_bf16(x), 8)
    assert (scales[0, 0, :2] == 0).all()
    assert not np.isfinite(scales[0, 1, :2]).any()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("segments", [1, 16])
@pytest.mark.parametrize("form", [Form.Q4_1, Form.Q8_0, Form.BF16])
def test_product(form: Form, segments: int) -> None:
    rng = np.random.default_rng(form)
    n, k = 16 * N_BLOCKS, 32 * GROUPS
    layout = LAYOUT[form]
    dense = DenseTensor(rng.standard_normal((n, k), np.float32), "f32")
    words = aligned(layout.packed_bytes(n, k)).view(np.uint16).reshape(N_BLOCKS, GROUPS, -1)
    if form is Form.BF16:
        bits = to_bf16_bits(dense)
        pack.pack_bf16(bits, words)
        weights = widen(bits)
    else:
        grouped = to_grouped(dense, 4 if form is Form.Q4_1 else 8)
        pack.pack_grouped(grouped, words)
        weights = to_float32(to_blocks(dense, "Q4_1" if form is Form.Q4_1 else "Q8_0"))
    x = round_to_bf16(rng.standard_normal((ROWS, k), np.float32))
    inputs, scales, meant = x, np.zeros((ROWS, GROUPS, 4), np.float32), widen(x).astype(np.float64)
    if form is not Form.BF16:
        inputs, scales = quantized(x, 8 if layout.inputs is Inputs.INT8 else 16)
        meant = (inputs.reshape(ROWS, GROUPS, 32) * scales[..., :1].astype(np.float64)).reshape(ROWS, k)
    bounds = bounds_of(GROUPS, 1) if segments > 1 else np.array([0, GROUPS])

    def multiply(first: int, rows: int) -> npt.NDArray[np.float32]:
        out = np.full((rows, n), np.nan, np.float32)
        x_, s_ = inputs[first:].ctypes.data, scales[first:].ctypes.data
        call(product(form), words.ctypes.data, words.strides[0], x_, inputs.strides[0], s_, scales.strides[0], rows, out.ctypes.data,
             bounds.ctypes.data, len(bounds) - 1)  # fmt: skip
        return out

    whole = multiply(0, ROWS)
    exact = meant @ weights.T.astype(np.float64)
    # fp32 sums of k products of order one: rounding errors add like a random walk.
    assert np.abs(whole - exact).max() < 1e-5 * k
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 31, 32, 33, 38):
        for first in (0, ROWS - rows):
            assert multiply(first, rows).tobytes() == whole[first : first + rows].tobytes(), f"{rows} rows from {first}"


def test_outputs_that_do_not_fill_a_block_are_followed_by_zeros() -> None:
    bits = round_to_bf16(np.ones((5, 32), np.float32))
    words = np.zeros((1, 1, 512), np.uint16)
    pack.pack_bf16(bits, words)
    lanes = words.reshape(16, 16, 2)
    assert (lanes[:, :5] == 0x3F80).all()
    assert not lanes[:, 5:].any()
