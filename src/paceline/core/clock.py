"""Time as an argument: code that needs the time is given a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.perf_counter()

    def wall(self) -> float:
        return time.time()


class SteadyClock:
    """A clock by which a machine that slept has lost no time: what others did not say meanwhile is not held against them. For one thread.

    Law: between two looks at most `most_s` pass, so it must be looked at more often than that.

    Args:
        most_s: raising it: more of a sleep counts; lowering it: time counts less while the thread is held up.
    """

    def __init__(self, clock: Clock, most_s: float = 3.0) -> None:
        self._clock, self._most_s = clock, most_s
        self._looked_s = clock.monotonic()
        self._slept_s = 0.0

    def monotonic(self) -> float:
        now_s = self._clock.monotonic()
        self._slept_s += max(0.0, now_s - self._looked_s - self._most_s)
        self._looked_s = now_s
        return now_s - self._slept_s

    def wall(self) -> float:
        return self._clock.wall()


PREPARE_S = 600.0
"""Seconds that a load may go on without bytes to count: before the first and after the last, kernels are compiled, by one process of a machine at a time.
Compiling takes 45 s on two cores. Raising it: a load that hangs there is given up later; lowering it: slow or busy machines never load for the first time.
"""


def silence_allowed(done: int, total: int, still_s: float) -> float:
    """Return how many seconds a load may show no progress.

    Args:
        done: bytes loaded.
        total: bytes to load; 0 while that is not known.
        still_s: while bytes are counted.
    """
    return still_s if done < total else max(still_s, PREPARE_S)
