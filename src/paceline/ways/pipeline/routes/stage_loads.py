"""How far the machines of a route that is being opened are with their layers, and how long they will need.

Law: what counts as progress only rises. A machine whose load failed and began anew has made none until it is beyond where it was, so that one
which fails again and again is not waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.ways.pipeline.executor.route import Opening
from paceline.ways.pipeline.executor.sessions import StageLoading
from paceline.ways.pipeline.routes.choosing import Part


@dataclass(slots=True)
class _Load:
    """One machine's."""

    began_s: float
    began_bytes: int
    news: StageLoading

    def seconds_left(self, now_s: float) -> float | None:
        """At its pace until now: while nothing comes, it takes longer."""
        gained = self.news.bytes_done - self.began_bytes
        if gained <= 0 or now_s <= self.began_s:
            return None
        return (self.news.bytes_total - self.news.bytes_done) * (now_s - self.began_s) / gained


class StageLoads:
    """Of one router. Told on the event loop, asked by the engine's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._parts: tuple[Part, ...] = ()
        self._loads: dict[Part, _Load] = {}
        self._most: dict[Part, int] = {}
        """Bytes that each had at most, over all attempts."""

    def begin(self, parts: Sequence[Part]) -> None:
        """A route over these machines is asked for."""
        with self._lock:
            self._parts, self._loads = tuple(parts), {}

    def told(self, part: Part, news: StageLoading) -> None:
        """A machine said how far it is."""
        now = self._clock.monotonic()
        with self._lock:
            load = self._loads.setdefault(part, _Load(now, news.bytes_done, news))
            load.news = news
            self._most[part] = max(self._most.get(part, 0), news.bytes_done)

    def opened(self, part: Part) -> None:
        """A machine has its layers."""
        with self._lock:
            if (load := self._loads.get(part)) is not None:
                load.news = StageLoading(load.news.bytes_total, load.news.bytes_total)

    def end(self) -> None:
        """There is a route."""
        with self._lock:
            self._parts, self._loads, self._most = (), {}, {}

    @property
    def opening(self) -> Opening:
        """All of it."""
        now = self._clock.monotonic()
        with self._lock:
            loads = [(part, load) for part in self._parts if (load := self._loads.get(part)) is not None]
            left = [load.seconds_left(now) for _, load in loads if load.news.bytes_done < load.news.bytes_total]
            known = [seconds for seconds in left if seconds is not None]
            return Opening(
                sum(load.news.bytes_done for _, load in loads),
                sum(load.news.bytes_total for _, load in loads),
                sum(self._most.values()),
                max(known) if known and len(known) == len(left) else None,
                tuple(part.node_id for part, load in loads if load.news.bytes_done < load.news.bytes_total or not load.news.bytes_total),
            )
