"""How long steps take, of all batches in flight: what `StepCosts` learns from."""

from __future__ import annotations

from collections import deque

from paceline.core.clock import Clock
from paceline.engine.step_costs import Load, StepCosts


class StepTimes:
    """Times of one engine's batches.

    Args:
        costs: is told of each.
        clock: for what they take.
    """

    def __init__(self, costs: StepCosts, clock: Clock) -> None:
        self._costs, self._clock = costs, clock
        self._flying: deque[tuple[Load, float]] = deque()
        """Of batches in flight: what they run, and when they were submitted."""
        self._collected_at = 0.0

    def submitted(self, load: Load) -> None:
        """A batch is about to be run."""
        self._flying.append((load, self._clock.monotonic()))

    @property
    def expected_s(self) -> float:
        """Of all batches in flight; 0 where no step was measured."""
        return sum(self._costs.of(load) for load, _ in self._flying) if self._costs.any_known else 0.0

    def collected(self, *, whole: bool) -> None:
        """The oldest batch was run, or given up."""
        now = self._clock.monotonic()
        load, submitted_at = self._flying.popleft()
        if whole:
            # In a pipeline that is kept busy, a batch costs what it adds.
            self._costs.took(load, now - max(submitted_at, self._collected_at))
        self._collected_at = now

    def lost(self) -> None:
        """All batches in flight are."""
        self._flying.clear()
