"""How many draft tokens to verify: as many as give the most tokens a second, from how often such drafts are accepted and what rows cost.

A draft's *run* is the evidence for it: the tokens of the suffix that found it, and its own tokens accepted so far. Longer runs are accepted more often, and how
much more depends on the text. So acceptance rates are kept by run, for each sequence, and start from the rates of all sequences.

Everything here estimates speed. No answer depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LONGEST = 128
"""Tokens ahead for which chances are given, at most."""
_STARTS = (0, 1, 2, 3, 4, 6, 9, 14)
"""Shortest run of each group; a group's rate is counted together."""
_GROUP = tuple(sum(run >= start for start in _STARTS) - 1 for run in range(_STARTS[-1] + 1))
_GROUPS = tuple(tuple(_GROUP[min(run + step, _STARTS[-1])] for step in range(LONGEST)) for run in range(_STARTS[-1] + 1))
"""Groups of the tokens ahead, by run."""
ASSUMED = (0.1, 0.1, 0.25, 0.45, 0.6, 0.75, 0.88, 0.94)
OWN_GAIN = 1 / 8
"""Weight of one token in a sequence's own rates. Raising it: the rates follow the sequence's text faster, and also chance."""
COMMON_GAIN = 1 / 64
LONG = 16
"""Longest draft that is learned from, in tokens; a longer one counts as this long."""
MARGIN = 1.06
"""Least ratio of the rate with a draft to the rate without it. Raising it: fewer drafts that lose by chance, and fewer that win a little."""
WORTH_A_ROW = 0.3
"""Least chance of acceptance for which an idle pipeline runs a row. Raising it: stages rest more, and less work is thrown away."""
WORTH_ASKING = 0.1
"""Least chance of acceptance for which a token is requested. Raising it: shorter drafts, which arrive sooner."""
UNLIKELY = 0.03
"""Chance of acceptance below which tokens are not counted on."""


class Acceptance:
    """Acceptance rates of draft tokens, by run."""

    __slots__ = ("_common", "came_true", "compared", "fresh", "rates")

    def __init__(self, common: Acceptance | None = None) -> None:
        """Start from the rates known so far.

        Args:
            common: rates over all sequences, which also learn everything that this object learns. None: this object is the common one.
        """
        self._common = common
        self.rates = list(ASSUMED if common is None else common.rates)
        self.fresh = 1.0 if common is None else common.fresh
        """Expected number of accepted tokens at the start of a new draft."""
        self.compared, self.came_true = 0, 0
        """Draft tokens compared with drawn ones, and how many of them were right."""

    def learn(self, run: int, came_true: bool) -> None:
        """Count a draft token with this run that was right or wrong."""
        group = _GROUP[min(run, _STARTS[-1])]
        self.compared += 1
        self.came_true += came_true
        hit = 1.0 if came_true else 0.0
        self.rates[group] += (hit - self.rates[group]) * (COMMON_GAIN if self._common is None else OWN_GAIN)
        if self._common is not None:
            self._common.learn(run, came_true)

    def learn_fresh(self, came_true: int) -> None:
        """Count a draft that ended after `came_true` accepted tokens."""
        self.fresh += (min(came_true, LONG) - self.fresh) * (COMMON_GAIN if self._common is None else OWN_GAIN)
        if self._common is not None:
            self._common.learn_fresh(came_true)

    def chances(self, run: int, n: int) -> list[float]:
        """Return the chance of each of the draft's next n tokens, given that those before it are accepted."""
        rates, ahead = self.rates, _GROUPS[min(run, _STARTS[-1])]
        return [rates[group] for group in ahead[:n]]

    def chance(self, run: int) -> float:
        """Return the chance of the draft's next token."""
        return self.rates[_GROUP[min(run, _STARTS[-1])]]


def likely_length(chances: Sequence[float]) -> int:
    """Return how many draft tokens to request: as long as the chance that all are accepted is `WORTH_ASKING` or more. At least two, if the draft has them."""
    likely = 1.0
    for n, chance in enumerate(chances):
        likely *= chance
        if likely < WORTH_ASKING:
            return max(2, n)
    return len(chances)


def length_ahead(certain: float, chances: Sequence[float], seconds: Callable[[int], float]) -> int:
    """Return how many draft rows to run in a machine that would be idle otherwise.

    Args:
        certain: chance that all draft tokens before these rows are accepted.
        chances: chance of each row's token.
        seconds: cost of a step by its rows.
    """
    best, rate = 0, 0.0
    likely, tokens = certain, 0.0
    for n, chance in enumerate(chances, 1):
        likely *= chance
        if likely < WORTH_A_ROW:
            break
        tokens += likely
        if tokens / seconds(n) > rate:
            best, rate = n, tokens / seconds(n)
    return best


def lengths(chances: Sequence[Sequence[float]], seconds: Callable[[int], float], most: int) -> list[int]:
    """Return how many draft tokens of each sequence to verify in one step.

    Args:
        chances: for each sequence, the chances of its draft tokens, as `Acceptance.chances` returns them; empty without a draft.
        seconds: cost of a step by its rows.
        most: maximum of draft tokens over all sequences.

    Returns:
        Lengths, each at most the number of the sequence's chances. Drafts with the likeliest first token are served first.
    """
    found = [0] * len(chances)
    rows = len(chances)
    tokens = float(rows)
    rate = tokens / seconds(rows)
    left = most
    for place in sorted((place for place in range(rows) if chances[place]), key=lambda place: -chances[place][0]):
        likely, gain, best = 1.0, 0.0, (0, 0.0)
        least = rate * MARGIN
        for n, chance in enumerate(chances[place][:left], 1):
            likely *= chance
            if likely < UNLIKELY:
                break
            gain += likely
            promised = (tokens + gain) / seconds(rows + n)
            if promised > least:
                rate = least = promised
                best = (n, gain)
        found[place] = best[0]
        rows += best[0]
        left -= best[0]
        tokens += best[1]
    return found
