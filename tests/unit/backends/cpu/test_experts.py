"""Experts of a row, against the written arithmetic, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends import cpu

if not cpu.runs_here():
    pytest.skip("no compiled kernels for this processor", allow_module_level=True)

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from tests.sampling import examples
from tests.unit.backends.cpu import experts_reference as reference

from paceline.backends.cpu import experts
from paceline.backends.cpu.shares import segment_bounds
from paceline.backends.cpu.sizes import aligned

Float32 = npt.NDArray[np.float32]
LOGITS = st.floats(-30, 30, width=32) | st.sampled_from([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, 1e-40])


@njit
def call_choose(logits: int, weights: int, n: int, k: int, normed: bool, choices: int, shares: int) -> None:
    experts.choose(logits, weights, n, k, normed, choices, shares)


@njit
def call_mix(outputs: int, hidden: int, k: int, places: int, shares: int, choices: int, segment_of: int, out: int) -> None:
    experts._mix(outputs, hidden, k, places, shares, choices, segment_of, out)


def floats(n: int) -> Float32:
    return aligned(4 * n).view(np.float32)


def chosen_of(logits_E: Float32, k: int, *, normed: bool) -> tuple[list[int], Float32]:
    n = len(logits_E)
    logits, weights, shares, choices = floats(-(-n // 16) * 16), floats(-(-n // 16) * 16), floats(k), np.zeros(k, np.int32)
    logits[:n] = logits_E
    call_choose(logits.ctypes.data, weights.ctypes.data, n, k, normed, choices.ctypes.data, shares.ctypes.data)
    return choices.tolist(), shares


@settings(deadline=None, max_examples=examples(300))
@given(st.lists(LOGITS, min_size=1, max_size=70), st.integers(1, 9), st.booleans())
def test_choices_and_shares_are_the_written_ones(logits: list[float], k: int, normed: bool) -> None:
    logits_E, k = np.array(logits, np.float32), min(k, len(logits))
    expected, expected_shares = reference.choose(logits_E, k, normed=normed)
    chosen, shares = chosen_of(logits_E, k, normed=normed)
    assert chosen == expected
    np.testing.assert_array_equal(shares, expected_shares)


def test_equal_logits_choose_the_first_and_what_is_no_number_is_chosen_last() -> None:
    assert chosen_of(np.array([1, 2, 2, 2, 1], np.float32), 2, normed=True)[0] == [1, 2]
    assert chosen_of(np.array([np.nan, -np.inf, 3, np.nan], np.float32), 3, normed=True)[0] == [0, 1, 2]


@pytest.mark.parametrize("n", [1, 6, 16, 60, 128])
def test_the_sum_is_the_written_one(n: int) -> None:
    rng, hidden = np.random.default_rng(n), 96
    k = min(8, n)
    segment_of, places = np.zeros(n, np.int32), rng.permutation(3 * k)[:k].astype(np.int32)
    for segment, (start, stop) in enumerate(pairwise(segment_bounds(n))):
        segment_of[start:stop] = segment
    outputs, shares, out = floats(3 * k * hidden), floats(k), floats(hidden)
    outputs[:] = rng.standard_normal(3 * k * hidden)
    shares[:] = rng.random(k)
    choices = np.sort(rng.permutation(n)[:k]).astype(np.int32)
    call_mix(outputs.ctypes.data, hidden, k, *(one.ctypes.data for one in (places, shares, choices, segment_of, out)))
    expected = reference.mix(outputs.reshape(-1, hidden)[places], choices.tolist(), shares, n)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
