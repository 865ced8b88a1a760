"""A machine that slept has lost no time, and compiling counts against no load."""

from __future__ import annotations

import pytest
from tests.fakes.clock import FakeClock

from paceline.core.clock import PREPARE_S, SteadyClock, silence_allowed


def test_time_passes_as_on_the_clock_beneath_while_it_is_looked_at() -> None:
    clock = FakeClock(5.0)
    steady = SteadyClock(clock, most_s=3.0)
    for passed in (0.0, 1.0, 3.0, 2.5):
        before = steady.monotonic()
        clock.advance(passed)
        assert steady.monotonic() == before + passed
    assert steady.wall() == clock.wall()


def test_a_sleep_counts_as_the_longest_time_between_two_looks() -> None:
    clock = FakeClock(5.0)
    steady = SteadyClock(clock, most_s=3.0)
    before = steady.monotonic()
    clock.advance(3600)
    assert steady.monotonic() == before + 3
    clock.advance(1)
    assert steady.monotonic() == before + 4


@pytest.mark.parametrize(("done", "total", "s"), [(0, 0, PREPARE_S), (0, 10, 20.0), (9, 10, 20.0), (10, 10, PREPARE_S)])
def test_a_load_without_bytes_to_count_may_compile(done: int, total: int, s: float) -> None:
    assert silence_allowed(done, total, 20.0) == s
    assert silence_allowed(done, total, 2 * PREPARE_S) == 2 * PREPARE_S
