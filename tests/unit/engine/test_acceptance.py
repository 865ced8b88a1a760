"""As many drafted tokens are verified as make the most tokens a second."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.acceptance import MARGIN, UNLIKELY, Acceptance, length_ahead, lengths
from paceline.engine.step_costs import HALF_LIFE, OFTEN, WILD, StepCosts, StepLoad

some_chances = st.lists(st.floats(0, 1), max_size=6)


def test_where_rows_are_free_all_are_verified() -> None:
    assert lengths([[0.9] * 5, [0.5] * 3], lambda rows: 1.0, 100) == [5, 3]


def test_where_rows_cost_in_proportion_none_is() -> None:
    assert lengths([[0.9] * 5, [0.99] * 3], lambda rows: float(rows), 100) == [0, 0]


def test_a_tile_of_rows_is_filled() -> None:
    assert lengths([[0.9] * 15], lambda rows: float(-(-rows // 4)), 100) == [3]


@given(st.lists(some_chances, min_size=1, max_size=4), st.lists(st.floats(0.5, 2), min_size=30, max_size=30), st.integers(0, 12))
def test_what_is_chosen_is_no_slower_than_nothing(chances: list[list[float]], steps: list[float], most: int) -> None:
    def seconds(rows: int) -> float:
        return sum(steps[:rows])

    found = lengths(chances, seconds, most)
    assert sum(found) <= most
    assert all(0 <= n <= len(each) for n, each in zip(found, chances, strict=True))
    n = len(chances)
    gained = sum(expected(each[:length]) for each, length in zip(chances, found, strict=True))
    if any(found):
        assert (n + gained) / seconds(n + sum(found)) >= n / seconds(n) * MARGIN * (1 - 1e-9)


@given(some_chances, st.lists(st.floats(0.5, 2), min_size=10, max_size=10))
def test_of_one_sequence_the_best_length_is_chosen(chances: list[float], steps: list[float]) -> None:
    def rate(n: int) -> float:
        return (1 + expected(chances[:n])) / sum(steps[: 1 + n])

    found = lengths([chances], lambda rows: sum(steps[:rows]), 100)[0]
    likely = [n for n in range(1, len(chances) + 1) if all(_prod(chances[:m]) >= UNLIKELY for m in range(1, n + 1))]
    best = max((rate(n) for n in likely), default=0.0)
    assert rate(found) == pytest.approx(best if best > rate(0) * MARGIN else rate(0))


@given(st.floats(0, 1), some_chances)
def test_an_idle_pipeline_runs_what_is_likely_enough(certain: float, chances: list[float]) -> None:
    n = length_ahead(certain, chances, lambda rows: 1.0)
    assert all(certain * _prod(chances[:m]) >= 0.3 for m in range(1, n + 1))
    assert n == len(chances) or certain * _prod(chances[: n + 1]) < 0.3


def test_rates_follow_the_text_and_begin_with_what_is_common() -> None:
    common = Acceptance()
    first = Acceptance(common)
    before = first.chances(1, 1)[0]
    for _ in range(200):
        first.learn(1, came_true=False)
    assert first.chances(1, 1)[0] < 0.01 < before
    assert Acceptance(common).chances(1, 1)[0] < before
    for _ in range(20):
        first.learn(1, came_true=True)
    assert first.chances(1, 1)[0] > 0.8
    assert first.chances(50, 3) == first.chances(14, 1) * 3


class TestStepCosts:
    def test_ratios_are_learnt(self) -> None:
        costs = StepCosts()
        for rows, seconds in [(1, 0.004), (4, 0.005), (8, 0.008), (16, 0.014)] * 40:
            costs.took(StepLoad(rows), seconds)
        for rows, ratio in [(4, 1.25), (8, 2.0), (16, 3.5)]:
            assert costs.seconds(rows) / costs.seconds(1) == pytest.approx(ratio, rel=0.1)
        assert costs.seconds(128) == pytest.approx(2 * costs.seconds(64))

    def test_other_nodes_are_told_of_what_was_seen_often(self) -> None:
        costs = StepCosts()
        assert (costs.seen_seconds(), costs.seen_prefill()) == ({}, 0.0)
        prompt = StepLoad(0).more(256, 0)
        for _ in range(OFTEN):
            assert costs.seen_seconds() == {}
            for rows, seconds in [(1, 0.004), (5, 0.005), (7, 0.006)]:
                costs.took(StepLoad(rows), seconds)
            costs.took(prompt, 0.256)
        costs.took(StepLoad(9), 0.008)
        assert costs.seen_seconds() == pytest.approx({1: 0.004, 7: 0.006}, rel=0.15)
        assert costs.seen_prefill() == pytest.approx(1000, rel=0.3)

    def test_a_wild_measurement_moves_little(self) -> None:
        costs = StepCosts()
        for _ in range(20):
            costs.took(StepLoad(1), 0.004)
        costs.took(StepLoad(4), 4.0)
        assert costs.seconds(4) / costs.seconds(1) < WILD

    def test_a_wild_measurement_moves_little_of_what_was_measured_often_however_early(self) -> None:
        costs = StepCosts()
        for rows in (1, 4, 1, 4, 1, 4, 1, 1, 1):
            costs.took(StepLoad(rows), 1.0)
        one, four = costs.seconds(1), costs.seconds(4)
        costs.took(StepLoad(1), 0.05)
        assert costs.seconds(1) > one / WILD
        assert costs.seconds(4) > four / WILD

    def test_what_was_never_run_is_tried(self) -> None:
        costs = StepCosts()
        costs.took(StepLoad(1), 0.004)
        assert costs.seconds(4) < 1.2 * costs.seconds(1)

    def test_a_step_without_rows_takes_no_time_whatever_was_measured(self) -> None:
        costs = StepCosts()
        for load in (StepLoad(0).more(32, 0), StepLoad(2).more(8, 64)):
            costs.took(load, 0.05)
        assert costs.of(StepLoad(0)) == 0.0
        assert costs.of(StepLoad(0).more(1, 0)) > 0

    def test_old_news_is_forgotten(self) -> None:
        costs = StepCosts()
        for rows in [1, 4] * 30:
            costs.took(StepLoad(rows), 0.004 if rows == 1 else 0.04)
        dear = costs.seconds(4) / costs.seconds(1)
        for _ in range(3 * HALF_LIFE):
            costs.took(StepLoad(1), 0.004)
        assert costs.seconds(4) / costs.seconds(1) < 0.4 * dear

    @pytest.mark.parametrize("rows", [1, 8])
    def test_a_slow_beginning_is_soon_forgotten(self, rows: int) -> None:
        costs = StepCosts()
        costs.took(StepLoad(rows), 60.0)
        for _ in range(8):
            costs.took(StepLoad(1), 0.01)
        assert 0.008 < costs.seconds(1) < 0.0125
        assert costs.seconds(8) < 2 * costs.seconds(1)

    @pytest.mark.parametrize(("rows", "seconds"), [(0, 0.004), (1000, 0.004), (1, 0.0), (1, -1.0)])
    def test_what_is_no_measurement_changes_nothing(self, rows: int, seconds: float) -> None:
        costs = StepCosts()
        costs.took(StepLoad(rows), seconds)
        assert not costs.known


def expected(chances: Sequence[float]) -> float:
    return sum(_prod(chances[: n + 1]) for n in range(len(chances)))


def _prod(chances: Sequence[float]) -> float:
    result = 1.0
    for chance in chances:
        result *= chance
    return result
