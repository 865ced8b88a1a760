"""A machine that slept has lost no time."""

from __future__ import annotations

from tests.fakes.clock import FakeClock

from paceline.core.clock import SteadyClock


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
