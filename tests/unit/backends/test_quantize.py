"""Rounding to bf16."""

from __future__ import annotations

import numpy as np

from paceline.backends.quantize import round_to_bf16


def test_bf16_rounds_to_the_nearest_even_and_keeps_what_is_no_number() -> None:
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -0.0, 3.0e38, np.inf, np.nan], np.float32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F62, 0x7F80, 0x7FC0]
    assert round_to_bf16(values).tolist() == expected
