"""Who was refused, in the log: each party and reason once a minute, however often it knocks, so that a flood fills no disk."""

from __future__ import annotations

import logging
from collections import OrderedDict

from paceline.core.clock import Clock, SystemClock

logger = logging.getLogger(__name__)


class Refusals:
    """The log of refused parties of one process.

    Args:
        clock: for the minute.
    """

    EVERY_S = 60.0
    REMEMBERED = 256

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._last: OrderedDict[tuple[str, str], float] = OrderedDict()
        self.total = 0
        """Refusals since the start, logged or not."""

    def note(self, who: str, why: str) -> None:
        """Say that `who` (a node id, an address) was refused, and why. Neither may hold a secret."""
        self.total += 1
        now = self._clock.monotonic()
        last = self._last.get((who, why))
        if last is not None and now - last < self.EVERY_S:
            return
        self._last[who, why] = now
        self._last.move_to_end((who, why))
        if len(self._last) > self.REMEMBERED:
            self._last.popitem(last=False)
        logger.warning("refused %s: %s", _printable(who), _printable(why))


def _printable(text: str) -> str:
    """What a stranger wrote can't start a line of its own."""
    return "".join(char if char.isprintable() else "?" for char in text[:300])
