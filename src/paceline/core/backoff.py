"""Pauses after failures, and keys that are left out for a while. Callers pass the time, in seconds of one monotonic clock."""

from __future__ import annotations

import math
from collections import deque
from typing import Generic, TypeVar

Key = TypeVar("Key")
Why = TypeVar("Why")


class Backoff:
    """The pause after failures in a row: each is twice as long as the one before.

    Args:
        first_s: seconds after the first failure.
        most_s: the longest pause, in seconds.
        steady_s: a failure at least this long after the end of the last pause counts as the first again. Infinite: only `reset` forgets.
    """

    def __init__(self, first_s: float, most_s: float, steady_s: float = math.inf) -> None:
        self._first_s, self._most_s, self._steady_s = first_s, most_s, steady_s
        self.failures = 0
        self.until_s = -math.inf
        """The monotonic time at which the last pause ends."""

    def fail(self, now: float) -> float:
        """Count a failure. Returns the seconds to wait."""
        if self.is_steady(now):
            self.failures = 0
        pause_s = min(self._first_s * 2.0 ** min(self.failures, 63), self._most_s)
        self.failures += 1
        self.until_s = now + pause_s
        return pause_s

    def is_steady(self, now: float) -> bool:
        """Return whether there was no failure, or the last pause ended at least `steady_s` ago."""
        return not self.failures or now - self.until_s >= self._steady_s

    def reset(self) -> None:
        """Forget the failures."""
        self.failures, self.until_s = 0, -math.inf


class LeftOut(Generic[Key, Why]):
    """Keys that are left out until a time, each with a reason."""

    def __init__(self) -> None:
        self._left_out: dict[Key, tuple[float, Why]] = {}

    def add(self, key: Key, until_s: float, why: Why) -> None:
        """Leave a key out until `until_s`. Replaces the key's earlier time and reason."""
        self._left_out[key] = until_s, why

    def remove(self, key: Key) -> None:
        """Let a key in again. Idempotent."""
        self._left_out.pop(key, None)

    def now(self, now: float) -> dict[Key, Why]:
        """Return the keys that are left out at `now`, each with its reason. Expired keys are forgotten."""
        self._left_out = {key: each for key, each in self._left_out.items() if each[0] > now}
        return {key: why for key, (_, why) in self._left_out.items()}


class Recent:
    """The times of the last events. It is full where `most` of them came within the last `within_s` seconds."""

    def __init__(self, most: int, within_s: float) -> None:
        self._within_s = within_s
        self._times = deque[float](maxlen=most)

    def add(self, now: float) -> None:
        """Count an event."""
        self._times.append(now)

    def ago(self, now: float) -> list[float]:
        """Return how many seconds ago each event was that still counts, the oldest first."""
        return [now - at for at in self._times if now - at < self._within_s]

    def is_full(self, now: float) -> bool:
        """Return whether the limit is reached."""
        return len(self.ago(now)) == self._times.maxlen

    def clear(self) -> None:
        """Forget all events."""
        self._times.clear()
