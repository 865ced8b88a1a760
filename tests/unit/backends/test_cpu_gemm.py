"""The compiled matrix product against NumPy, for every format, tile and remainder; and its promise that rows don't see one another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu
from paceline.backends.quantize import round_to_bf16, to_bf16_bits, to_float32, to_grouped
from paceline.core.weights import DenseTensor

if not cpu.runs_here():
    pytest.skip("this processor has no AVX512-BF16", allow_module_level=True)

from paceline.backends.cpu import pack
from paceline.backends.cpu.aligned import aligned
from paceline.backends.cpu.gemm import BF16, INT4, INT8, SLICE, gemm

N_BLOCKS = 7
"""Blocks of 16 outputs: one chunk of four, and a remainder."""
GROUPS = 2 * SLICE + 1
ROWS = 44


def widen(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


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
    sums = widen(x).reshape(ROWS, GROUPS, 32).sum(2, dtype=np.float32)
    scratch = aligned(4 * SLICE * 1024)

    def product(first: int, rows: int) -> npt.NDArray[np.float32]:
        out = np.full((rows, n), np.nan, np.float32)
        gemm(
            form,
            words.ctypes.data,
            N_BLOCKS,
            x[first:].ctypes.data,
            2 * k,
            sums[first:].ctypes.data,
            4 * GROUPS,
            rows,
            out.ctypes.data,
            4 * n,
            GROUPS,
            scratch.ctypes.data,
        )
        return out

    whole = product(0, ROWS)
    exact = widen(x).astype(np.float64) @ weights.T.astype(np.float64)
    # fp32 sums of k products of order one: rounding errors add like a random walk.
    assert np.abs(whole - exact).max() < 1e-5 * k
    for rows in (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 33, 38):
        for first in (0, ROWS - rows):
            assert product(first, rows).tobytes() == whole[first : first + rows].tobytes(), f"{rows} rows from {first}"


def test_outputs_that_do_not_fill_a_block_are_followed_by_zeros() -> None:
    bits = round_to_bf16(np.ones((5, 32), np.float32))
    words = np.zeros((1, 1, 512), np.uint16)
    pack.pack_bf16(bits, words)
    lanes = words.reshape(16, 16, 2)
    assert (lanes[:, :5] == 0x3F80).all()
    assert not lanes[:, 5:].any()
