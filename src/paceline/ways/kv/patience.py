"""How long blocks are waited for that come from elsewhere.

Law: pure; the time is an argument. Bounded are silence and what is left, never the whole. Each block that comes earns what computing it here takes, and a little:
who sends faster than that is waited for however long the prompt is. Who is slower falls behind, by one silence at most, and is then left: what is left
is computed sooner here. No silence is longer than computing what is left.
"""

from __future__ import annotations

from math import inf
from typing import Final

BESIDE: Final = 1.25
"""By what factor a block may take longer than here: to begin with others' is decided by estimates. Raising it: one that turns out slower than this node is
waited for longer."""
LEAST_S: Final = 1.0
"""What is left is worth this much at least. Raising it: the last blocks of one that is gone are waited for longer."""
SILENCE_S: Final = 10.0
"""Without a block, where more is left than that is worth. Raising it: one that is gone is waited for longer; lowering it: one that is busy is taken for gone."""
MOST_SILENCE_S: Final = 45.0
"""Also of those of which many blocks come at once, and seldom: less than a sequence may wait for KV."""


class Patience:
    """With one fetch.

    Args:
        here_s: what computing a block takes here; infinite where that is not to count: then silence alone is bounded.
        left: blocks that are to come.
        at_once: blocks of these that come together, as a peer computes them.
        silence_s: as long as nothing may come, where more is left than that is worth.
        within_s: of all, where who wants them must hear by then how many came.
    """

    def __init__(self, now: float, here_s: float, left: int, at_once: int = 1, silence_s: float = SILENCE_S, within_s: float = inf) -> None:
        self._here_s, self._left, self._at_once, self._least_silence_s = here_s, left, at_once, silence_s
        self._end = now + within_s
        self.until = min(now + self.silence_s, self._end)
        """It is over then, if no block comes."""

    @property
    def silence_s(self) -> float:
        """As long as nothing may come now."""
        block_s, left = BESIDE * self._here_s, max(1, self._left)
        most_s = max(self._least_silence_s, min(self._at_once, left) * block_s)
        return min(MOST_SILENCE_S, max(BESIDE * LEAST_S, left * block_s), most_s)

    def came(self, now: float) -> None:
        """The next block is here."""
        self._left -= 1
        self.until = min(self.until + BESIDE * self._here_s, now + self.silence_s, self._end)


def by_silence(now: float) -> Patience:
    """With one whose blocks are wanted however long they take."""
    return Patience(now, inf, 1, silence_s=MOST_SILENCE_S)
