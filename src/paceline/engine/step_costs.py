"""What a step costs by its rows, as measured while it is served: what drafts and chunks of prompts are weighed against. And which rows of prompts a step
runs beside its answers: a chunk is shared among all of them, within a time.

Steps with prompts have a curve of their own, by all their rows, and beside it what a row's look at one earlier position (a key) costs: attention
grows with the context. Of drafts only ratios matter: a row count that was not seen yet is assumed cheap, so that it is tried. Of prompts seconds do:
a count that was not seen lies between those that were. What was measured long ago is believed less and less.

Laws:
- One measurement, however wild, moves an estimate by a bounded factor: on a shared machine many are wild. At first it may lower those by more that
  nothing confirmed: a machine that begins is slow.
- The oldest prompt gets a row at least in every step, and a fifth of what prompts get where others would take it all. Else the one with the least left
  comes first. Where some end in a step, so that their first tokens wait for it, what runs beside them makes the step longer by a quarter at most.
- While an answer waits for its next token, a step keeps to its budget, as far as steps were measured. Answers may take longer by themselves, or nearly
  as long: prompts then still get half as much time as answers do, lest a new request wait until others end. Bytes don't depend on any of this.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

from paceline.core.clock import Clock

MOST_ROWS = 64
"""Of a step without prompts. Beyond this, its costs are taken to grow in proportion."""
ASSUMED_ROW = 0.05
"""What a row more costs, of a step of one row, until it was measured. Raising it: longer drafts are tried later."""
ASSUMED_PROMPT_ROW = 0.1
"""Likewise, of a step with prompts. Raising it: the first chunks beside an answer are shorter. Source: 0.11 here at 135M, 0.10 at 8B."""
ASSUMED_KEY = 5e-6
"""What a key costs, of a step of one row, until it was measured."""
WILD = 2.0
OWN_GAIN, LEVEL_GAIN = 0.25, 0.1
PROMPT_GAIN = 0.5
"""As `OWN_GAIN`, of steps with prompts. Raising it: the budget of a step is kept sooner after a change, and missed oftener by chance."""
FIRST, MUCH = 16, 8.0
"""So many steps, if they are faster than expected, lower all estimates by as much, but for those of counts that were measured twice."""
OFTEN = 8
"""Measurements of a row count that make a figure for other nodes. Raising it: what is seldom seen is guessed for longer."""
LEAST_CHUNK, TYPICAL_PROMPT = 32, 512
HALF_LIFE = 1024
"""Steps after which half of an old measurement is forgotten."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What one step runs."""

    rows: int
    """Of prompts and answers."""
    prompt_rows: int = 0
    keys: int = 0
    """That the rows of prompts look at: the sum of their positions."""

    def more(self, rows: int, start: int) -> StepLoad:
        """With rows of another prompt, the first at position `start`."""
        return StepLoad(self.rows + rows, self.prompt_rows + rows, self.keys + rows * start + rows * (rows + 1) // 2)


@dataclass(slots=True)
class _Seen:
    factor: float
    """Of the assumed cost."""
    at: int
    times: int
    """Measured since one was much faster than all before."""


class StepCosts:
    """Estimates for one engine."""

    def __init__(self) -> None:
        self._answers = _Curve(ASSUMED_ROW, OWN_GAIN)
        self._prompts = _Curve(ASSUMED_PROMPT_ROW, PROMPT_GAIN)
        self._key_s = 0.0

    @property
    def known(self) -> bool:
        """Whether `seconds` are seconds yet."""
        return self._answers.level > 0

    @property
    def any_known(self) -> bool:
        """Whether `of` gives seconds yet."""
        return self._answers.level > 0 or self._prompts.level > 0

    def took(self, load: StepLoad, seconds: float) -> None:
        if seconds <= 0 or load.rows <= 0:
            return
        if load.prompt_rows:
            self._took_prompts(load, seconds)
        elif load.rows <= MOST_ROWS:
            curve = self._answers
            curve.level = curve.level or seconds / curve.assumed(load.rows)
            factor = curve.factor(load.rows)
            curve.correct(load.rows, factor, seconds / (curve.level * curve.assumed(load.rows) * factor))

    def seconds(self, rows: int) -> float:
        """A step's expected time where it has no prompts; relative to others even where none was measured."""
        if rows > MOST_ROWS:
            return self.seconds(MOST_ROWS) * rows / MOST_ROWS
        return self._answers.seconds(rows)

    def of(self, load: StepLoad) -> float:
        """A step's expected time; relative to others even where none was measured. One without rows takes none."""
        if not load.rows:
            return 0.0
        if not load.prompt_rows and self._answers.level:
            return self.seconds(load.rows)
        return self._rows_with_prompts(load.rows) + load.keys * (self._key_s or ASSUMED_KEY * (self._answers.level or 1.0))

    def seen_seconds(self) -> dict[int, float]:
        """Of steps without prompts, by rows: of row counts that were measured often, the largest between two powers of two."""
        often = self._answers.seen_often()
        return {rows: self._answers.seconds(rows) for rows in {rows.bit_length(): rows for rows in often}.values()}

    def seen_prefill(self) -> float:
        """Tokens of a prompt of `TYPICAL_PROMPT` a second, by the largest chunks that were measured often; 0: there are none of `LEAST_CHUNK`."""
        rows = max(self._prompts.seen_often(), default=0)
        return rows / self.of(StepLoad(rows, rows, rows * TYPICAL_PROMPT // 2)) if rows >= LEAST_CHUNK else 0.0

    # -------------------------------------------------------------------------------------------------------------------- inside

    def _took_prompts(self, load: StepLoad, seconds: float) -> None:
        curve = self._prompts
        if curve.level:
            factor = curve.factor_between(load.rows, self._one_row())
        else:
            curve.level = seconds / (curve.assumed(load.rows) + ASSUMED_KEY * load.keys)
            self._key_s, factor = ASSUMED_KEY * curve.level, 1.0
        of_keys = load.keys * self._key_s
        expected = curve.level * curve.assumed(load.rows) * factor + of_keys
        share, off = of_keys / expected, seconds / expected
        # Rows and keys are each corrected by what they are of it: chunks at several contexts tell one from the other.
        curve.correct(load.rows, factor, off, 1 - share)
        self._key_s *= min(max(off, 1 / WILD), WILD) ** (PROMPT_GAIN * share)

    def _rows_with_prompts(self, rows: int) -> float:
        curve = self._prompts
        if curve.level:
            return curve.level * curve.assumed(rows) * curve.factor_between(rows, self._one_row())
        return self._answers.seconds(1) * curve.assumed(rows)

    def _one_row(self) -> float:
        """Factor of a step of one row with prompts: one without any, as far as that was measured."""
        return self._answers.seconds(1) / self._prompts.level if self._answers.level else 1.0


class _Curve:
    """Seconds by rows: an assumed shape, and by what factor it was seen to be off."""

    def __init__(self, row: float, gain: float) -> None:
        self._row = row
        self.level = 0.0
        """Seconds of a step of one row as assumed; 0: nothing was measured."""
        self._gain = gain
        self._seen: dict[int, _Seen] = {}
        self._order: list[int] = []
        """Row counts that were seen, few to many."""
        self._expected: dict[int, float] = {}
        """What was computed since the last measurement."""
        self._steps = 0

    def assumed(self, rows: int) -> float:
        """Of a step of one row, so many times."""
        return 1 + self._row * (rows - 1)

    def seen_often(self) -> list[int]:
        """Row counts, few to many, that were measured often enough to be told to others."""
        return [rows for rows in self._order if self._seen[rows].times >= OFTEN]

    def correct(self, rows: int, factor: float, off: float, share: float = 1.0) -> None:
        """A step took `off` times what was expected by a factor, of which `share` is this curve's."""
        rows = _counted_with(rows)
        self._steps += 1
        # What a measurement agrees with, or exceeds, it confirms.
        times = self._seen[rows].times if rows in self._seen else 0
        confirmed, times = times > 1, times + 1 if off > 1 / WILD else 1
        if self._steps <= FIRST and off < 1:
            lower = max(off, 1 / MUCH) ** share
            self.level *= lower
            for seen in self._seen.values():
                if seen.times > 1:
                    seen.factor /= lower
            if confirmed:
                factor /= lower
            else:
                off = 1.0
        off = min(max(off, 1 / WILD), WILD) ** share
        if rows not in self._seen:
            insort(self._order, rows)
        self._seen[rows] = _Seen(factor * off**self._gain, self._steps, times)
        self.level *= off**LEVEL_GAIN
        self._expected.clear()

    def seconds(self, rows: int) -> float:
        """Of a step; a count that was not seen costs no more than the next smaller one suggests."""
        found = self._expected.get(rows)
        if found is None:
            found = self._expected[rows] = (self.level or 1.0) * self.assumed(rows) * self.factor(rows)
        return found

    def factor(self, rows: int) -> float:
        """Of the assumed cost."""
        seen = self._seen.get(rows)
        if seen is None:
            return self._below(rows)
        trust = 0.5 ** ((self._steps - seen.at) / HALF_LIFE)
        if trust > 0.99:
            return seen.factor
        below = self._below(rows)
        return below + (seen.factor - below) * trust

    def factor_between(self, rows: int, one_row: float) -> float:
        """Likewise; of a count that was not seen, between those of the next that were.

        Args:
            one_row: factor of a step of one row, where that was not seen.
        """
        rows = _counted_with(rows)
        if rows in self._seen:
            return self._seen[rows].factor
        place = bisect_left(self._order, rows)
        fewer, below = (self._order[place - 1], self._seen[self._order[place - 1]].factor) if place else (1, one_row)
        if place == len(self._order) or rows <= fewer:
            return below
        more = self._order[place]
        part = log(rows / fewer) / log(more / fewer)
        return below ** (1 - part) * self._seen[more].factor ** part

    def _below(self, rows: int) -> float:
        """Of the next smaller step that was seen."""
        place = bisect_left(self._order, rows)
        return self._seen[self._order[place - 1]].factor if place else 1.0


def _counted_with(rows: int) -> int:
    """Large row counts are counted with those near: eight kinds from one power of two to the next."""
    if rows <= MOST_ROWS:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return rows // step * step


class StepTimes:
    """Times of one engine's batches."""

    def __init__(self, costs: StepCosts, clock: Clock) -> None:
        self._costs, self._clock = costs, clock
        self._flying: deque[tuple[StepLoad, float]] = deque()
        """Of batches in flight: what they run, and when they were submitted."""
        self._collected_at = 0.0

    def submitted(self, load: StepLoad) -> None:
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
