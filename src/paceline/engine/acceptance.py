"""How many drafted tokens to verify: as many as make the most tokens a second, by how often such drafts come true and what rows cost.

A draft's *run* is how much stands behind it: the tokens of the suffix it was found by, and those of it that came true already. Longer runs come true
more often, each kind of text in its own measure, so rates are kept by run, for each sequence, beginning with those of all.

Everything here is a guess about speed. No token depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

LONGEST = 128
"""Tokens ahead whose chances are told."""
_STARTS = (0, 1, 2, 3, 4, 6, 9, 14)
"""Shortest run of each group whose rate is counted together."""
_GROUP = tuple(sum(run >= start for start in _STARTS) - 1 for run in range(_STARTS[-1] + 1))
_GROUPS = tuple(tuple(_GROUP[min(run + step, _STARTS[-1])] for step in range(LONGEST)) for run in range(_STARTS[-1] + 1))
"""By run: the groups of the tokens ahead."""
ASSUMED = (0.1, 0.1, 0.25, 0.45, 0.6, 0.75, 0.88, 0.94)
OWN_GAIN = 1 / 8
"""Raising it: a sequence's rates follow its text faster, and chance."""
COMMON_GAIN = 1 / 64
LONG = 16
"""A draft that came true for so long counts as no longer."""
MARGIN = 1.06
"""What a draft must promise beside none. Raising it: fewer drafts that lose by chance, and fewer that win a little."""
WORTH_A_ROW = 0.3
"""The least chance for which an idle pipeline runs a row. Raising it: stages rest more, and less is thrown away."""
WORTH_ASKING = 0.1
"""The least chance for which a token is asked for. Raising it: shorter drafts, which come sooner."""
UNLIKELY = 0.03
"""Of tokens whose chance is below this nothing is expected."""


class Acceptance:
    """Shares of drafted tokens that came true, by run."""

    __slots__ = ("_common", "came_true", "compared", "fresh", "rates")

    def __init__(self, common: Acceptance | None = None) -> None:
        """Begin with what is known.

        Args:
            common: of all sequences, told of all that this learns; None: this is the one.
        """
        self._common = common
        self.rates = list(ASSUMED if common is None else common.rates)
        self.fresh = 1.0 if common is None else common.fresh
        """How many tokens of a new draft come true before the first that does not."""
        self.compared, self.came_true = 0, 0
        """Tokens this was told of, and those of them that came true."""

    def learn(self, run: int, came_true: bool) -> None:
        """A token with such a run behind it came true, or did not."""
        group = _GROUP[min(run, _STARTS[-1])]
        self.compared += 1
        self.came_true += came_true
        hit = 1.0 if came_true else 0.0
        self.rates[group] += (hit - self.rates[group]) * (COMMON_GAIN if self._common is None else OWN_GAIN)
        if self._common is not None:
            self._common.learn(run, came_true)

    def learn_fresh(self, came_true: int) -> None:
        """A draft ended after so many tokens that came true."""
        self.fresh += (min(came_true, LONG) - self.fresh) * (COMMON_GAIN if self._common is None else OWN_GAIN)
        if self._common is not None:
            self._common.learn_fresh(came_true)

    def chances(self, run: int, n: int) -> list[float]:
        """Of each of the next n tokens of a draft, given that those before it come true."""
        rates, ahead = self.rates, _GROUPS[min(run, _STARTS[-1])]
        return [rates[group] for group in ahead[:n]]

    def chance(self, run: int) -> float:
        """Of the next token of a draft."""
        return self.rates[_GROUP[min(run, _STARTS[-1])]]


def likely_length(chances: Sequence[float]) -> int:
    """How many tokens of a draft are worth asking for: those that are likelier used than not worth the wait for them. At least two."""
    likely = 1.0
    for n, chance in enumerate(chances):
        likely *= chance
        if likely < WORTH_ASKING:
            return max(2, n)
    return len(chances)


def length_ahead(certain: float, chances: Sequence[float], seconds: Callable[[int], float]) -> int:
    """How many rows to run on a guess, where the machine would do nothing otherwise.

    Args:
        certain: chance that what is guessed before them comes true.
        chances: of the tokens of the rows.
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
    """How many drafted tokens of each sequence to verify in one step.

    Args:
        chances: of each sequence's drafted tokens, as `Acceptance.chances` has them; none where nothing is drafted.
        most: drafted tokens in all.

    Returns:
        Lengths, each at most that of the sequence's chances. Likely drafts are served first.
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
