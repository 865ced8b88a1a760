"""The log of refused callers. A caller that keeps calling gets a few lines a minute, so that a flood does not fill the disk."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from urllib.parse import unquote

from cachetools import LRUCache

from paceline.core.clock import Clock, SystemClock
from paceline.core.text import printable

logger = logging.getLogger(__name__)


def remote_of(peer: str) -> tuple[str, int]:
    """Return host and port of a caller that gRPC calls ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]").partition("%")[0].removeprefix("::ffff:"), int(port) if port.isdigit() else 0


@dataclass(slots=True)
class _Lines:
    """Log lines that a party has used in its current minute."""

    since: float
    count: int = 0


class Refusals:
    """Rate-limited log of refused parties, one per process. Thread-safe."""

    EVERY_S = 60.0
    LINES = 8
    MOST_LINES = 256
    """Lines a minute for all parties together: an unauthenticated peer may have as many addresses as it likes."""
    REMEMBERED = 256

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._lines: LRUCache[str, _Lines] = LRUCache(self.REMEMBERED)
        self.total = 0
        """Refusals since the start, logged or not."""
        self._all = _Lines(0.0)

    def note(self, who: str, why: str, *, at: str = "") -> None:
        """Log that a caller was refused, and why. No argument may hold a secret.

        Args:
            who: the node id that the caller proved, or the host of its address; lines are counted by it.
            why: what was wrong.
            at: more of the caller's address, such as a port.
        """
        with self._lock:
            self.total += 1
            now = self._clock.monotonic()
            lines = self._lines.get(who)
            if lines is None or now - lines.since >= self.EVERY_S:
                lines = self._lines[who] = _Lines(now)
            lines.count += 1
            if now - self._all.since >= self.EVERY_S:
                self._all = _Lines(now)
            is_told = lines.count <= self.LINES and self._all.count < self.MOST_LINES
            self._all.count += is_told
            is_last = lines.count == self.LINES or self._all.count == self.MOST_LINES
        if is_told:
            last = " (no more of this for a minute)" if is_last else ""
            logger.warning("refused %s: %s%s", printable(f"{who} ({at})" if at else who), printable(why), last)
