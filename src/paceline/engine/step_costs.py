"""Estimates the time of a step from its rows, and chooses the prompt rows of a step (`rows_of_prompts`). Times are measured during serving. The estimates
also size drafts.

Steps with prompts have a curve of their own by their total rows, and a cost for each earlier position (key) that a row attends to, since attention grows with
the context. For drafts only ratios matter: a row count not yet seen is assumed to be cheap, so that it is tried. Old measurements of steps without prompts lose
weight with time. For prompts seconds matter: a count not yet seen is interpolated between those seen.

Laws:
- One measurement, however wild, moves an estimate by a bounded factor: on a shared machine many are wild. At first it may lower unconfirmed estimates by more,
  because a machine that begins is slow.
- The oldest prompt gets at least one row in every step, and a fifth of the prompts' share where others would take it all. Otherwise the prompt with the least
  left comes first. Once that one ends in a step, its first token waits for the step: all further rows lengthen the step by a quarter at most.
- While an answer waits for its next token, a step keeps to its budget, as far as steps were measured. Whatever the budget, prompts may take half as much time
  as the answers alone, because a new request should not wait until others end. Bytes don't depend on any of this.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log

from paceline.core.clock import Clock

MOST_ROWS = 64
"""Largest step without prompts that is measured, in rows. Beyond this, costs are taken to grow in proportion."""
ASSUMED_ROW = 0.05
"""Assumed cost of each further row in a step without prompts, relative to a step of one row, until it was measured. Raising it: longer drafts are tried
later."""
ASSUMED_PROMPT_ROW = 0.1
"""Assumed cost of each further row in a step with prompts, relative to a step of one row. Raising it: the first chunks next to an answer are shorter.
Source: 0.11 measured with a model of 135M parameters, 0.10 with one of 8B.
"""
ASSUMED_KEY = 5e-6
"""Assumed cost of a key, relative to a step of one row, until it was measured."""
WILD = 2.0
OWN_GAIN, LEVEL_GAIN = 0.25, 0.1
PROMPT_GAIN = 0.5
"""Exponent on measured / expected time when a step with prompts corrects its row count's factor; `OWN_GAIN` is that of other steps. Raising it: the
budget of a step is kept sooner after a change, and missed more often by chance."""
FIRST, MUCH = 16, 8.0
"""Each of a curve's first `FIRST` measurements lowers all its estimates if it is faster than expected, by a factor of `MUCH` at most. Row counts measured
twice keep their estimates. Raising them: a slow start is corrected sooner, and chance lowers estimates more often.
"""
OFTEN = 8
"""Measurements of a row count before it is reported to other nodes. Raising it: other nodes estimate rare row counts for longer."""
LEAST_CHUNK, TYPICAL_PROMPT = 32, 512
HALF_LIFE = 1024
"""Steps without prompts after which an unrepeated measurement has half its weight; the other half is the estimate from the next smaller row count."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The rows of one step."""

    rows: int
    """Rows of prompts and answers together."""
    prompt_rows: int = 0
    keys: int = 0
    """Number of keys that prompt rows attend to. Each attends to its own position and all before it."""

    def more(self, rows: int, start: int) -> StepLoad:
        """Return this load plus `rows` consecutive rows of one prompt, the first at position `start`."""
        return StepLoad(self.rows + rows, self.prompt_rows + rows, self.keys + rows * start + rows * (rows + 1) // 2)


@dataclass(slots=True)
class _Seen:
    factor: float
    """Measured cost relative to the assumed cost."""
    at: int
    times: int
    """Measurements since the last one that took less than 1 / `WILD` of the expected time, which counts as the first."""


class StepCosts:
    """Estimates of step times for one engine."""

    def __init__(self) -> None:
        self._answers = _Curve(ASSUMED_ROW, OWN_GAIN)
        self._prompts = _Curve(ASSUMED_PROMPT_ROW, PROMPT_GAIN)
        self._key_s = 0.0

    @property
    def known(self) -> bool:
        """True once `seconds` returns seconds, not ratios."""
        return self._answers.level > 0

    @property
    def any_known(self) -> bool:
        """True once `of` returns seconds, not ratios."""
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
        """Return the expected time of a step without prompts, in seconds; before the first measurement only ratios have a meaning."""
        if rows > MOST_ROWS:
            return self.seconds(MOST_ROWS) * rows / MOST_ROWS
        return self._answers.seconds(rows)

    def of(self, load: StepLoad) -> float:
        """Return the expected time of a step, in seconds; before the first measurement only ratios have a meaning. A step without rows takes none."""
        if not load.rows:
            return 0.0
        if not load.prompt_rows and self._answers.level:
            return self.seconds(load.rows)
        return self._rows_with_prompts(load.rows) + load.keys * (self._key_s or ASSUMED_KEY * (self._answers.level or 1.0))

    def seen_seconds(self) -> dict[int, float]:
        """Return seconds by row count, of steps without prompts. Only counts measured often appear: between two powers of two, the largest."""
        often = self._answers.seen_often()
        return {rows: self._answers.seconds(rows) for rows in {rows.bit_length(): rows for rows in often}.values()}

    def seen_prefill(self) -> float:
        """Return the estimated prompt tokens a second, for a prompt of `TYPICAL_PROMPT` tokens in chunks of the largest size measured often.

        0 if that size is below `LEAST_CHUNK`.
        """
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
        # Rows and keys are each corrected by their share: chunks at several contexts separate the two.
        curve.correct(load.rows, factor, off, 1 - share)
        self._key_s *= min(max(off, 1 / WILD), WILD) ** (PROMPT_GAIN * share)

    def _rows_with_prompts(self, rows: int) -> float:
        curve = self._prompts
        if curve.level:
            return curve.level * curve.assumed(rows) * curve.factor_between(rows, self._one_row())
        return self._answers.seconds(1) * curve.assumed(rows)

    def _one_row(self) -> float:
        """Return the factor of a step of one row with prompts. It follows from the time of one row without prompts; 1 if that was not measured."""
        return self._answers.seconds(1) / self._prompts.level if self._answers.level else 1.0


class _Curve:
    """Seconds by rows: an assumed shape, and the measured factor on it for each row count."""

    def __init__(self, row: float, gain: float) -> None:
        self._row = row
        self.level = 0.0
        """Seconds of a step of one row under the assumed shape; 0: nothing was measured."""
        self._gain = gain
        self._seen: dict[int, _Seen] = {}
        self._order: list[int] = []
        """Measured row counts, in ascending order."""
        self._expected: dict[int, float] = {}
        """Results of `seconds` since the last measurement."""
        self._steps = 0

    def assumed(self, rows: int) -> float:
        """Return the assumed cost, as a multiple of a step of one row."""
        return 1 + self._row * (rows - 1)

    def seen_often(self) -> list[int]:
        """Return the row counts, in ascending order, that were measured often enough to be reported to other nodes."""
        return [rows for rows in self._order if self._seen[rows].times >= OFTEN]

    def correct(self, rows: int, factor: float, off: float, share: float = 1.0) -> None:
        """Correct the estimate after a step that took `off` times the time expected with `factor`; `share` of that time is this curve's."""
        rows = _counted_with(rows)
        self._steps += 1
        # A measurement confirms an estimate unless it is much below it.
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
        """Return the seconds of a step. A row count not seen costs no more than the next smaller one suggests."""
        found = self._expected.get(rows)
        if found is None:
            found = self._expected[rows] = (self.level or 1.0) * self.assumed(rows) * self.factor(rows)
        return found

    def factor(self, rows: int) -> float:
        """Return the factor on the assumed cost."""
        seen = self._seen.get(rows)
        if seen is None:
            return self._below(rows)
        trust = 0.5 ** ((self._steps - seen.at) / HALF_LIFE)
        if trust > 0.99:
            return seen.factor
        below = self._below(rows)
        return below + (seen.factor - below) * trust

    def factor_between(self, rows: int, one_row: float) -> float:
        """Return the factor on the assumed cost; for a row count not seen, interpolate between the nearest counts seen.

        Args:
            one_row: factor of a step of one row, used if no smaller count was seen.
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
        """Return the factor of the nearest smaller row count seen; 1 if there is none."""
        place = bisect_left(self._order, rows)
        return self._seen[self._order[place - 1]].factor if place else 1.0


def _counted_with(rows: int) -> int:
    """Return the row count under which this one is measured. Counts above `MOST_ROWS` are rounded down, to one of eight between two powers of two."""
    if rows <= MOST_ROWS:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return rows // step * step


class StepTimes:
    """Measures the times of one engine's batches."""

    def __init__(self, costs: StepCosts, clock: Clock) -> None:
        self._costs, self._clock = costs, clock
        self._flying: deque[tuple[StepLoad, float]] = deque()
        """For each batch in flight, its load and the monotonic time of its submission."""
        self._collected_at = 0.0

    def submitted(self, load: StepLoad) -> None:
        """Record that a batch is about to run."""
        self._flying.append((load, self._clock.monotonic()))

    @property
    def expected_s(self) -> float:
        """Expected seconds of all batches in flight; 0 if no step was measured."""
        return sum(self._costs.of(load) for load, _ in self._flying) if self._costs.any_known else 0.0

    def collected(self, *, whole: bool) -> None:
        """Record that the oldest batch was run, or was cancelled if not `whole`."""
        now = self._clock.monotonic()
        load, submitted_at = self._flying.popleft()
        if whole:
            # In a busy pipeline, a batch costs only the time it adds.
            self._costs.took(load, now - max(submitted_at, self._collected_at))
        self._collected_at = now

    def lost(self) -> None:
        """Forget all batches in flight, which were lost."""
        self._flying.clear()


FLOOR = 5
"""Reserves 1 / `FLOOR` of the prompt rows for the oldest prompt, or of their time where that is less. Raising it: short prompts behind a long one are
answered sooner, and the long one later."""
LONGER = 1.25
"""Factor by which further rows may lengthen a step in which the shortest prompt ends, since its first token waits. Raising it: other prompts advance sooner,
and first tokens come later."""
BESIDE = 1.5
"""Factor by which prompts may lengthen a step of answers, whatever the budget. Raising it: prompts advance sooner next to many answers, which are slower."""


@dataclass(frozen=True, slots=True)
class PromptLeft:
    """The rest of a sequence's known tokens that is still to run."""

    start: int
    """Position of the first token."""
    rows: int
    """Rows that may run in the next step. It is below `left` if both prompt and generated tokens are left, or if the scheduler limits it."""
    left: int
    """Rows left in total."""


def rows_of_prompts(prompts: Sequence[PromptLeft], most: int, answers: int, costs: StepCosts, budget_s: float = inf) -> list[int]:
    """Return how many rows of each prompt to run in a step.

    Args:
        prompts: the oldest first.
        most: maximum rows of prompts.
        answers: rows of answers in the same step.
        costs: estimates of step times.
        budget_s: seconds that the step may take; infinite if no answer waits for it.
    """
    if not prompts or most <= 0:
        return [0] * len(prompts)
    base = StepLoad(answers)
    limit = max(budget_s, BESIDE * costs.of(base)) if costs.any_known and answers else budget_s if costs.any_known else inf
    step = _Step(prompts, most, base, costs)
    order = sorted(range(len(prompts)), key=lambda place: prompts[place].left)
    floor = max(1, most // FLOOR)
    for place in order:
        # Until the oldest prompt has rows, its part is reserved.
        kept = 0 if place == 0 or step.rows[0] else floor
        if prompts[place].rows < prompts[place].left or not step.takes_all(place, kept, limit):
            break
        # The first prompt that ends sets the bound: if each further one raised it, the first token would wait for all of them.
        limit = min(limit, LONGER * costs.of(step.load))
    if not step.rows[0]:
        # If no prompt has a row yet, the oldest takes its part of the time, not all of it.
        taken = costs.of(step.load)
        allowed = limit if step.load != base or limit == inf else taken + (limit - taken) / FLOOR
        step.take(0, floor, allowed, least=1)
    for place in order:
        step.take(place, most, limit)
    return step.rows


class _Step:
    """Distributes the prompt rows of one step among prompts. Limits are seconds that the step may take."""

    def __init__(self, prompts: Sequence[PromptLeft], most: int, load: StepLoad, costs: StepCosts) -> None:
        self._prompts, self._left, self._costs = prompts, most, costs
        self.load = load
        self.rows = [0] * len(prompts)

    def takes_all(self, place: int, kept: int, limit: float) -> bool:
        """Give a prompt all rows that it may run, if `kept` rows stay free and the step stays within `limit`. Returns whether it did."""
        prompt = self._prompts[place]
        if prompt.rows > self._left - kept or self._costs.of(self.load.more(prompt.rows, prompt.start)) > limit:
            return False
        self._give(place, prompt.rows)
        return True

    def take(self, place: int, most: int, limit: float, least: int = 0) -> None:
        """Give a prompt up to `most` more rows that keep the step within `limit`. The first `least` rows may exceed the limit."""
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
