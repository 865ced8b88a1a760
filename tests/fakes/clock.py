"""A clock that moves when told."""

from __future__ import annotations


class FakeClock:
    """A `core.clock.Clock` for tests."""

    def __init__(self, monotonic: float = 0.0, wall: float = 1_750_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let time pass. It never goes back."""
        if seconds < 0:
            raise ValueError(f"{seconds} seconds")
        self._monotonic += seconds
        self._wall += seconds
