from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.fleet.card import settled, settled_within, two_digits


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, 0),
        (123456, 120000),
        (0.01267, 0.013),
        (99.4, 99),
        (99.6, 100),
        (1, 1),
        (-123, -120),
        (math.nan, 0),
        (math.inf, 0),
        (5e-324, 5e-324),
    ],
)
def test_two_digits(value: float, shown: float) -> None:
    assert two_digits(value) == shown


@pytest.mark.parametrize(
    ("value", "before", "shown"),
    [
        (134.0, 0, 130), (135.4, 130, 130), (137.4, 130, 130), (137.6, 130, 140), (134.4, 140, 140), (132.4, 140, 130),
        (9.94, 10, 10), (9.9, 10, 9.9), (10.4, 9.9, 10), (250, 130, 250), (0, 130, 0), (-130, 130, -130), (1e300, 1, 1e300),
    ],
)  # fmt: skip
def test_a_figure_stays_until_it_clearly_changed(value: float, before: float, shown: float) -> None:
    assert settled(value, before) == shown


values = st.floats(1e-6, 1e15)


@given(values, st.lists(st.floats(-0.24, 0.24), max_size=20))
def test_a_value_that_trembles_changes_a_figure_once(value: float, tremors: list[float]) -> None:
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    shown = settled(value, 0)
    seen = {shown}
    for tremor in tremors:
        shown = settled(value + tremor * step * 0.1, shown)
        seen.add(shown)
    assert len(seen) == 1


@given(values, values)
def test_a_figure_is_near_its_value_and_stable(value: float, before: float) -> None:
    shown = settled(value, two_digits(before))
    assert abs(shown - value) <= 0.08 * value
    assert settled(value, shown) == shown


@pytest.mark.parametrize(
    ("value", "before", "shown"),
    [(167.9, 0, 160), (160, 0, 160), (99.6, 0, 99), (101, 0, 100), (99.9, 100, 99), (160.1, 150, 150), (162.6, 150, 160), (159, 160, 150), (0, 160, 0)],
)  # fmt: skip
def test_what_may_be_taken_is_never_more_than_there_is(value: float, before: float, shown: float) -> None:
    assert settled_within(value, before) == shown


@given(st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_nor_whatever_was_shown_before(value: int, before: int) -> None:
    assert 0 <= settled_within(value, settled_within(before, 0)) <= value
