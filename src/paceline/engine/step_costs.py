"""What a step costs by its rows, as measured while it is served: what drafts are weighed against.

Only ratios matter. A row count that was not seen yet is assumed cheap, so that it is tried; what was measured long ago is believed less and less.

Law: one measurement, however wild, moves an estimate by a bounded factor: on a shared machine many are wild. At first it may lower all of them by
more: a machine that begins is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_ROWS = 64
"""Beyond this, costs are taken to grow in proportion."""
ASSUMED_ROW = 0.05
"""What a row more costs, of a step of one row, until it was measured. Raising it: longer drafts are tried later."""
WILD = 2.0
OWN_GAIN, LEVEL_GAIN = 0.25, 0.1
FIRST, MUCH = 16, 8.0
"""So many steps, if they are faster than expected, lower all estimates, by as much."""
HALF_LIFE = 1024
"""Steps after which half of an old measurement is forgotten."""


@dataclass(slots=True)
class _Seen:
    factor: float
    """Of the assumed cost."""
    at: int


class StepCosts:
    """Estimates for one engine."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._expected: dict[int, float] = {}
        """What was computed since the last measurement."""
        self._level = 0.0
        """Seconds of a step of one row as assumed; 0: nothing was measured."""
        self._steps = 0

    @property
    def known(self) -> bool:
        """Whether `seconds` are seconds yet."""
        return self._level > 0

    def took(self, rows: int, seconds: float) -> None:
        """A step without prompts was measured."""
        if seconds <= 0 or not 0 < rows <= MOST_ROWS:
            return
        self._steps += 1
        if not self._level:
            self._level = seconds / _assumed(rows)
        off = seconds / self._compute(rows)
        if self._steps <= FIRST and off < 1:
            self._level *= max(off, 1 / MUCH)
            off = 1.0
        off = min(max(off, 1 / WILD), WILD)
        self._seen[rows] = _Seen(self._factor(rows) * off**OWN_GAIN, self._steps)
        self._level *= off**LEVEL_GAIN
        self._expected.clear()

    def seconds(self, rows: int) -> float:
        """A step's expected time; relative to others even where none was measured."""
        found = self._expected.get(rows)
        if found is None:
            found = self._expected[rows] = self._compute(rows)
        return found

    def _compute(self, rows: int) -> float:
        if rows > MOST_ROWS:
            return self.seconds(MOST_ROWS) * rows / MOST_ROWS
        return (self._level or 1.0) * _assumed(rows) * self._factor(rows)

    def _factor(self, rows: int) -> float:
        seen = self._seen.get(rows)
        if seen is None:
            return self._below(rows)
        trust = 0.5 ** ((self._steps - seen.at) / HALF_LIFE)
        if trust > 0.99:
            return seen.factor
        below = self._below(rows)
        return below + (seen.factor - below) * trust

    def _below(self, rows: int) -> float:
        """Of the next smaller step that was seen."""
        for fewer in range(rows - 1, 0, -1):
            seen = self._seen.get(fewer)
            if seen is not None:
                return seen.factor
        return 1.0


def _assumed(rows: int) -> float:
    return 1 + ASSUMED_ROW * (rows - 1)
