"""Compiled products against the written arithmetic, bit for bit, in every form; and their promise that tiles, rows and threads change no byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu
from paceline.backends.quantize import round_to_bf16

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from numba import njit
from tests.unit.backends.cpu import arithmetic

from paceline.backends.cpu.forms import GROUP_BYTES, LAYOUT, PANEL, Form, Inputs
from paceline.backends.cpu.pack import pack_rows
from paceline.backends.cpu.products import bounds_of, call_product, product
from paceline.backends.cpu.rows import deal_bf16, quantize
from paceline.backends.cpu.sizes import aligned, expanded_bytes

pytestmark = pytest.mark.timeout(300)
SEGMENTS = {
    "whole": [0, 24],
    "sixteen": bounds_of(24, 1).tolist(),
    "three heads": bounds_of(3, 8).tolist(),
    "eleven": bounds_of(11, 2).tolist(),
}
"""Where segments begin and end, by what is shared; superblocks are cut anywhere."""


@njit
def quantize_int8(x: int, n: int, out: int, apart: int) -> None:
    quantize(8, x, n, out, apart)


@njit
def quantize_int16(x: int, n: int, out: int, apart: int) -> None:
    quantize(16, x, n, out, apart)


@njit
def deal(x: int, n: int, out: int, apart: int) -> None:
    deal_bf16(x, n, out, apart)


@njit
def call(
    address: int, w: int, w_stride: int, blocks: int, x: int, panel: int, rows: int, out: int, bounds: int, segments: int, room: int
) -> None:
    call_product(address, w, w_stride, blocks, x, panel, rows, out, 64 * blocks, bounds, segments, room)


WRITE = {Inputs.INT8: quantize_int8, Inputs.INT16: quantize_int16, Inputs.BF16: deal}


def panels(x: npt.NDArray[np.uint16], kind: Inputs) -> npt.NDArray[np.uint8]:
    """Rows [T, K] as the kernels hold them."""
    row_bytes, out = x.shape[1] // 32 * GROUP_BYTES[kind], aligned(x.size // 32 * GROUP_BYTES[kind])
    for row in range(len(x)):
        panel = row // PANEL * PANEL
        high = min(PANEL, len(x) - panel)
        at = out.ctypes.data + panel * row_bytes + (row - panel) * GROUP_BYTES[kind]
        WRITE[kind](x[row].ctypes.data, x.shape[1], at, high * GROUP_BYTES[kind])
    return out


def quantized(x: npt.NDArray[np.uint16], bits: int) -> tuple[npt.NDArray[np.signedinteger], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Codes [T, K], (scale, scale * sum) [T, G, 2] and -32 * sums of halves [T, G, 2] as the kernel writes them."""
    kind, codes = (Inputs.INT8, np.dtype("i1")) if bits == 8 else (Inputs.INT16, np.dtype("<i2"))
    record = np.dtype([("codes", codes, 32), ("scales", "<f4", 2), ("sums", "<i4", 2 if bits == 8 else 0)])
    groups = np.stack([panels(row[None], kind).view(record) for row in x])
    return groups["codes"].reshape(x.shape), groups["scales"], groups["sums"]


@pytest.mark.parametrize("bits", [8, 16])
def test_quantize(bits: int) -> None:
    x = round_to_bf16(
        np.random.default_rng(bits).standard_normal((5, 96), np.float32) * np.array([[1], [1e-30], [1e30], [7], [0]], np.float32)
    )
    codes, scales, sums = quantized(x, bits)
    wanted_codes, wanted_scales, wanted_sums = arithmetic.quantise(x[:4], bits)
    assert np.array_equal(codes[:4], wanted_codes)
    assert np.array_equal(scales[:4, :, 0], wanted_scales)
    assert np.array_equal(scales[:4, :, 1], wanted_sums)
    if bits == 8:
        assert np.array_equal(sums[:4], -32 * wanted_codes.reshape(4, 3, 2, 16).sum(3))
    assert (scales[4] == 0).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden_by_quantising(poison: float) -> None:
    x = np.zeros((1, 64), np.float32)
    x[0, 40] = poison
    _, scales, _ = quantized(round_to_bf16(x), 8)
    assert (scales[0, 0] == 0).all()
    assert not np.isfinite(scales[0, 1]).any()


@pytest.mark.parametrize("bits", [8, 16])
def test_what_no_scale_has_an_inverse_for_counts_as_the_least_code(bits: int) -> None:
    x = np.full((1, 32), 1e-37, np.float32)
    x[0, ::2] = -1e-37
    x[0, 3] = 0
    codes, scales, _ = quantized(round_to_bf16(x), bits)
    assert (codes == -(2 ** (bits - 1))).all()
    assert 0 < scales[0, 0, 0] < 1e-38


class Product:
    """Random weights and activations of one form, and the compiled product of them."""

    def __init__(self, form: Form, n: int, k: int, rows: int) -> None:
        rng = np.random.default_rng(form)
        layout = LAYOUT[form]
        self.form, self.n, self.k = form, n, k
        self.stored = arithmetic.random_rows(form, n, k, rng)
        self.packed = aligned(layout.packed_bytes(n, k))
        pack_rows(form, self.stored, 0, self.packed)
        self.x = round_to_bf16(rng.standard_normal((rows, k), np.float32) * np.exp2(rng.integers(-20, 20, (rows, k))).astype(np.float32))
        self._inputs = layout.inputs

    def run(self, first: int, rows: int, bounds: list[int]) -> npt.NDArray[np.float32]:
        blocks = -(-self.n // 16)
        out, ends = np.full((rows, 16 * blocks), np.nan, np.float32), np.array(bounds)
        x, room = panels(self.x[first : first + rows], self._inputs), aligned(expanded_bytes(self.k))
        call(product(self.form), self.packed.ctypes.data, len(self.packed) // blocks, blocks, x.ctypes.data,
             PANEL * self.k // 32 * GROUP_BYTES[self._inputs], rows, out.ctypes.data, ends.ctypes.data, len(ends) - 1,
             room.ctypes.data)  # fmt: skip
        assert not out[:, self.n :].any(), "outputs beyond the last"
        return out[:, : self.n]

    def reference(self, bounds: list[int]) -> npt.NDArray[np.float32]:
        return arithmetic.product(self.form, self.stored, self.x, bounds)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("form", Form, ids=lambda form: form.name)
def test_a_product_is_what_the_written_arithmetic_says(form: Form, segments: str) -> None:
    bounds = SEGMENTS[segments]
    # Three blocks of outputs, the last one not full: a tile of two and a remainder. 34 rows: wide tiles, and two rows more.
    case = Product(form, 41, 768, 34)
    assert case.run(0, 34, bounds).tobytes() == case.reference(bounds)[:, :41].tobytes()


@pytest.mark.parametrize("form", Form, ids=lambda form: form.name)
def test_rows_do_not_see_one_another(form: Form) -> None:
    bounds = SEGMENTS["sixteen"]
    case = Product(form, 48, 768, 44)
    whole = case.run(0, 44, bounds)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 31, 32, 33, 38):
        for first in (0, 44 - rows):
            assert case.run(first, rows, bounds).tobytes() == whole[first : first + rows].tobytes(), f"{rows} rows from {first}"


@pytest.mark.parametrize("form", [form for form in Form if LAYOUT[form].groups == 1])
def test_inputs_that_fill_no_superblock(form: Form) -> None:
    case = Product(form, 16, 19 * 32, 3)
    bounds = bounds_of(19, 1).tolist()
    assert case.run(0, 3, bounds).tobytes() == case.reference(bounds).tobytes()


def test_a_product_is_near_the_true_one() -> None:
    """The reference itself: every form within what 8-bit activations lose."""
    for form in Form:
        case = Product(form, 16, 768, 4)
        weights = arithmetic.widen(case.stored.view(np.uint16)) if form is Form.BF16 else arithmetic.matrix(form, case.stored).values()
        x = arithmetic.widen(case.x)
        true, found = x.astype(np.float64) @ weights.T.astype(np.float64), case.reference([0, 24])
        assert np.abs(found - true).max() <= 0.01 * (np.abs(x).astype(np.float64) @ np.abs(weights.T).astype(np.float64)).max()


def test_segments_are_the_same_for_any_number_of_ranks() -> None:
    assert bounds_of(448, 1).tolist() == [28 * i for i in range(17)]
    assert bounds_of(3, 6).tolist() == [0, 6, 12, 18]
    assert bounds_of(1, 4).tolist() == [0, 4]
    uneven = np.diff(bounds_of(19, 1))
    assert (len(uneven), uneven.sum(), set(uneven.tolist())) == (16, 19, {1, 2})
