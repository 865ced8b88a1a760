from __future__ import annotations

import math

import pytest

from paceline.machine.speed import Spread, Timing, percentile


def test_one_sequence_decodes_between_its_first_and_last_token() -> None:
    timing = Timing(10.0, ((11.0, 11.5, 12.0, 12.5, 13.0),))
    assert timing.sequence_decode_per_s == pytest.approx(4 / 2.0)
    assert timing.total_decode_per_s == pytest.approx(4 / 2.0)
    assert timing.aggregate_per_s == pytest.approx(5 / 3.0)
    assert timing.first_token_s == pytest.approx((1.0,))
    assert timing.gaps_s == pytest.approx((0.5,) * 4)
    assert timing.prefill_per_s(128) == pytest.approx(128.0)


def test_total_decode_counts_only_while_every_sequence_decodes() -> None:
    early = (1.0, 2.0, 3.0, 4.0, 5.0)
    late = (3.0, 4.0, 5.0, 6.0, 7.0)
    # From 3 (the last first token) to 5 (the first end): two tokens of each.
    assert Timing(0.0, (early, late)).total_decode_per_s == pytest.approx(4 / 2.0)


def test_total_decode_of_sequences_that_never_ran_together_is_not_a_number() -> None:
    assert math.isnan(Timing(0.0, ((1.0, 2.0), (3.0, 4.0))).total_decode_per_s)


def test_decode_of_single_tokens_is_not_a_number() -> None:
    timing = Timing(0.0, ((1.0,), (2.0,)))
    assert math.isnan(timing.sequence_decode_per_s)
    assert math.isnan(timing.total_decode_per_s)
    assert timing.prefill_per_s(100) == pytest.approx(100.0)
    assert timing.gaps_s == ()


def test_the_sequences_rate_is_their_median() -> None:
    timing = Timing(0.0, ((1.0, 2.0), (1.0, 1.5), (1.0, 1.25)))
    assert timing.sequence_decode_per_s == pytest.approx(2.0)


def test_tokens_that_came_together_leave_a_gap_of_zero() -> None:
    assert Timing(0.0, ((1.0, 1.0, 2.0),)).gaps_s == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 1.0), (10, 1.0), (11, 2.0), (50, 5.0), (90, 9.0), (91, 10.0), (99, 10.0), (100, 10.0)],
)
def test_percentile_is_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([float(value) for value in (10, 1, 9, 2, 8, 3, 7, 4, 6, 5)], percent) == expected


def test_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 50))


def test_spread_is_in_milliseconds() -> None:
    assert Spread.of([0.001, 0.002, 0.004]) == Spread(2.0, 4.0, 4.0)
