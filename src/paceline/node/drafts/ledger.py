"""Which proposers failed, and for how long they are left out: longer each time, until they have drafted well for a while."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.node.drafts.drafter import Key

LEFT_OUT_S, LEFT_OUT_MOST_S = 2.0, 300.0
"""How long who failed is left out: doubled each time. Raising them: one that was only restarted is missed for longer."""
MOST_DOUBLED = 8
FORGIVEN = 64
"""Blocks after which old failures no longer count."""


@dataclass(slots=True)
class _Record:
    times: int = 0
    until_s: float = 0.0
    good: int = 0
    """Blocks since it failed last."""


class Ledger:
    """Of one source."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[Key, _Record] = {}

    def failed(self, key: Key) -> float:
        """How many seconds it is left out from now on."""
        record = self._records.setdefault(key, _Record())
        left_out_s = min(LEFT_OUT_S * 2 ** min(record.times, MOST_DOUBLED), LEFT_OUT_MOST_S)
        record.times, record.until_s, record.good = record.times + 1, self._clock.monotonic() + left_out_s, 0
        return left_out_s

    def drafted(self, key: Key) -> None:
        """It drafted a block."""
        record = self._records.get(key)
        if record is not None:
            record.good += 1
            if record.good == FORGIVEN:
                del self._records[key]

    def left_out(self) -> Collection[Key]:
        """Those that are, now."""
        now = self._clock.monotonic()
        return [key for key, record in self._records.items() if record.until_s > now]

    def next_s(self) -> float | None:
        """Until the first of them is no longer; None: none is left out."""
        now = self._clock.monotonic()
        return min((record.until_s - now for record in self._records.values() if record.until_s > now), default=None)
