from __future__ import annotations

import pytest

from paceline.core.backoff import Backoff, LeftOut, Recent


def test_each_pause_is_twice_the_one_before_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    assert backoff.until_s < 0.0
    assert [backoff.fail(10.0 * place) for place in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert (backoff.failures, backoff.until_s) == (5, 45.0)
    backoff.reset()
    assert (backoff.fail(50.0), backoff.failures) == (1.0, 1)


def test_failures_are_forgotten_once_it_was_steady_after_the_pause() -> None:
    backoff = Backoff(1.0, 60.0, steady_s=100.0)
    assert backoff.is_steady(0.0)
    assert backoff.fail(0.0) == 1.0
    assert not backoff.is_steady(100.9)
    assert backoff.fail(100.9) == 2.0
    assert backoff.is_steady(202.9)
    assert backoff.fail(202.9) == 1.0


@pytest.mark.parametrize("failures", [100, 2000])
def test_any_number_of_failures_has_a_pause(failures: int) -> None:
    backoff = Backoff(0.5, 60.0)
    assert [backoff.fail(0.0) for _ in range(failures)][-1] == 60.0


def test_a_key_is_left_out_until_its_time_or_until_it_is_let_in() -> None:
    left_out: LeftOut[str, str] = LeftOut()
    left_out.add("p", 10.0, "late")
    left_out.add("q", 20.0, "wrong")
    assert left_out.now(9.9) == {"p": "late", "q": "wrong"}
    assert left_out.now(10.0) == {"q": "wrong"}
    left_out.add("q", 30.0, "late")
    assert left_out.now(25.0) == {"q": "late"}
    left_out.remove("q")
    left_out.remove("q")
    assert left_out.now(25.0) == {}


def test_a_limit_is_reached_by_so_many_events_within_the_time() -> None:
    recent = Recent(2, 60.0)
    recent.add(0.0)
    assert not recent.is_full(0.0)
    recent.add(59.0)
    assert recent.ago(59.9) == pytest.approx([59.9, 0.9])
    assert recent.is_full(59.9)
    assert not recent.is_full(60.0)
    recent.add(61.0)
    assert recent.is_full(118.9)
