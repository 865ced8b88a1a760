"""Rounding to bf16, and groups that hold what they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.quantize import round_to_bf16, to_float32, to_grouped
from paceline.core.errors import UnsupportedModel
from paceline.core.weights import DenseTensor


def test_bf16_rounds_to_the_nearest_even_and_keeps_what_is_no_number() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -0.0, 3.0e38, np.inf, np.nan], np.float32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F62, 0x7F80, 0x7FC0]
    assert round_to_bf16(values).tolist() == expected


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_are_within_half_a_step(bits: int) -> None:
    weights = np.random.default_rng(bits).standard_normal((3, 64), np.float32)
    grouped = to_grouped(DenseTensor(weights, "f32"), 4 if bits == 4 else 8)
    step = np.repeat(grouped.scale_NG.astype(np.float32), 32, axis=1)
    # Half a step of rounding; the offset and the ends of a group are float16's roundings more.
    assert (np.abs(to_float32(grouped) - weights) <= 0.51 * step + 1e-3).all()


def test_rows_that_are_no_whole_groups_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="groups of 32"):
        to_grouped(DenseTensor(np.zeros((2, 40), np.float32), "f32"), 4)
