"""Which rows of prompts a step runs beside its answers: a chunk is shared among all of them, within a time.

Laws:
- The oldest prompt gets a row at least in every step, and a fifth of what prompts get where others would take it all.
- Else the one with the least left comes first. Where some end in a step, so that their first tokens wait for it, what runs beside them makes the step
  longer by a quarter at most.
- While an answer waits for its next token, a step keeps to its budget, as far as steps were measured. Answers may take longer by themselves, or nearly
  as long: prompts then still get half as much time as answers do, lest a new request wait until others end.

Bytes don't depend on any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from paceline.engine.step_costs import StepCosts, StepLoad

FLOOR = 5
"""The oldest prompt gets one part in so many. Raising it: short prompts are answered sooner behind a long one, and that one later."""
LONGER = 1.25
"""By what factor rows that end no wait may lengthen a step that an answer waits for. Raising it: prompts get on sooner, and first tokens come later."""
BESIDE = 1.5
"""By what factor prompts may lengthen the step of answers, whatever the budget. Raising it: prompts get on sooner beside many answers, and these slower."""


@dataclass(frozen=True, slots=True)
class PromptLeft:
    """What is left to run of a sequence's known tokens."""

    start: int
    """Position of the first."""
    rows: int
    """That may run in one step: they are of one path."""
    left: int
    """In all."""


def rows_of_prompts(prompts: Sequence[PromptLeft], most: int, answers: int, costs: StepCosts, budget_s: float = inf) -> list[int]:
    """How many rows of each prompt to run in a step.

    Args:
        prompts: the oldest first.
        answers: rows beside them.
        budget_s: what the step may take; infinite where nothing waits for it.
    """
    if not prompts or most <= 0:
        return [0] * len(prompts)
    base = StepLoad(answers)
    limit = max(budget_s, BESIDE * costs.of(base)) if costs.any_known and answers else budget_s if costs.any_known else inf
    step = _Step(prompts, most, base, costs)
    order = sorted(range(len(prompts)), key=lambda place: prompts[place].left)
    floor = max(1, most // FLOOR)
    for place in order:
        # Until the oldest had its turn, its part is left to it.
        kept = 0 if place == 0 or step.rows[0] else floor
        if prompts[place].rows < prompts[place].left or not step.takes_all(place, kept, limit):
            break
        limit = min(limit, LONGER * costs.of(step.load))
    if not step.rows[0]:
        # Where no prompt got a row yet, the oldest takes its part of the time, not all of it.
        taken = costs.of(step.load)
        allowed = limit if step.load != base or limit == inf else taken + (limit - taken) / FLOOR
        step.take(0, floor, allowed, least=1)
    for place in order:
        step.take(place, most, limit)
    return step.rows


class _Step:
    """Rows given so far."""

    def __init__(self, prompts: Sequence[PromptLeft], most: int, load: StepLoad, costs: StepCosts) -> None:
        self._prompts, self._left, self._costs = prompts, most, costs
        self.load = load
        self.rows = [0] * len(prompts)

    def takes_all(self, place: int, kept: int, limit: float) -> bool:
        """Give a prompt all it has left, if there is room for it beside `kept` rows."""
        prompt = self._prompts[place]
        if prompt.rows > self._left - kept or self._costs.of(self.load.more(prompt.rows, prompt.start)) > limit:
            return False
        self._give(place, prompt.rows)
        return True

    def take(self, place: int, most: int, limit: float, least: int = 0) -> None:
        """Give a prompt as many more rows as fit."""
        given = self.rows[place]
        start = self._prompts[place].start + given
        high = min(most, self._prompts[place].rows - given, self._left)
        low = min(least, high)
        if limit == inf or (high and self._costs.of(self.load.more(high, start)) <= limit):
            low = high
        while high - low > 1:
            middle = (low + high) // 2
            if self._costs.of(self.load.more(middle, start)) <= limit:
                low = middle
            else:
                high = middle
        self._give(place, low)

    def _give(self, place: int, rows: int) -> None:
        if rows:
            self.load = self.load.more(rows, self._prompts[place].start + self.rows[place])
            self.rows[place] += rows
            self._left -= rows
