"""Clocks. Code that needs the time gets a clock as an argument."""

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
    """The clocks of the operating system."""

    def monotonic(self) -> float:
        return time.perf_counter()

    def wall(self) -> float:
        return time.time()


class SteadyClock:
    """A monotonic clock that leaves out the time for which the machine slept, so that peers are not blamed for silence meanwhile. For one thread.

    Law: a step between two readings counts for `most_s` at most, so it must be read more often than that.

    Args:
        most_s: seconds. Raising it: more of a sleep counts. Lowering it: time is lost while the thread is held up.
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
"""Seconds for which a load may go on without bytes to count. Kernels are compiled before the first byte and after the last, by one process of a machine at a
time; compiling takes 45 s on two cores. Raising it: a load that hangs there is given up later; lowering it: slow or busy machines never load for the first
time.
"""


def silence_allowed(done: int, total: int, still_s: float) -> float:
    """Return how many seconds a load may show no progress.

    Args:
        done: bytes loaded.
        total: bytes to load; 0 while that is not known.
        still_s: seconds allowed while bytes are counted.
    """
    return still_s if done < total else max(still_s, PREPARE_S)
