"""Who was refused, in the log. A party that keeps knocking gets a few lines a minute, so that a flood fills no disk."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass

from paceline.core.clock import Clock, SystemClock

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Lines:
    """What a party was granted in its current minute."""

    since: float
    count: int = 0


class Refusals:
    """The log of refused parties of one process. For any thread.

    Args:
        clock: for the minute.
    """

    EVERY_S = 60.0
    LINES = 8
    REMEMBERED = 256

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._lines: OrderedDict[str, _Lines] = OrderedDict()
        self.total = 0
        """Refusals since the start, logged or not."""

    def note(self, who: str, why: str, *, at: str = "") -> None:
        """Say that somebody was refused, and why. Nothing here may hold a secret.

        Args:
            who: a node id that was proved, or an address's host: by this the lines are counted.
            why: what was wrong.
            at: more of where, such as a port.
        """
        with self._lock:
            self.total += 1
            now = self._clock.monotonic()
            lines = self._lines.get(who)
            if lines is None or now - lines.since >= self.EVERY_S:
                lines = self._lines[who] = _Lines(now)
                if len(self._lines) > self.REMEMBERED:
                    self._lines.popitem(last=False)
            self._lines.move_to_end(who)
            lines.count += 1
            count = lines.count
        if count <= self.LINES:
            last = " (no more of this for a minute)" if count == self.LINES else ""
            logger.warning("refused %s: %s%s", _printable(f"{who} ({at})" if at else who), _printable(why), last)


def _printable(text: str) -> str:
    """What a stranger wrote can't start a line of its own."""
    return "".join(char if char.isprintable() else "?" for char in text[:300])
