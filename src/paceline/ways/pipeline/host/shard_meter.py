"""What a host counts of its shards. Sessions count in threads of their own; what they share has a lock."""

from __future__ import annotations

import threading
from collections import Counter

from paceline.core.stats import LabelledHistograms

LATENCY_BOUNDS_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0)
WINDOW = 256
"""Batches of which a session's p95 is."""


class Latencies:
    """The last few of one session, in milliseconds. Written by its thread, read by any."""

    def __init__(self) -> None:
        self._ring = [0.0] * WINDOW
        self._count = 0
        self.sum_ms = 0.0
        """Of all there were."""

    def add(self, ms: float) -> None:
        self.sum_ms += ms
        self._ring[self._count % WINDOW] = ms
        self._count += 1

    @property
    def p95(self) -> float:
        """0 where there are none."""
        n = min(self._count, WINDOW)
        return sorted(self._ring[:n])[(95 * n - 1) // 100] if n else 0.0


class ShardMeter:
    """Counters of one host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latency = LabelledHistograms(LATENCY_BOUNDS_MS, "others")
        """Of a batch, in milliseconds, by shard."""
        self.sessions_opened = 0
        self.sessions_refused = 0
        self.evictions = 0
        self.loads = 0
        self._corruption = 0
        self._blocks: Counter[str] = Counter()

    @property
    def blocks(self) -> Counter[str]:
        """KV blocks on the disk, of sessions that have ended, by what became of them."""
        with self._lock:
            return Counter(self._blocks)

    def note_blocks(self, counts: Counter[str]) -> None:
        """Of one that ended."""
        with self._lock:
            self._blocks += counts

    @property
    def corruption(self) -> int:
        """Times that something came which is no activations."""
        return self._corruption

    def corrupt(self) -> None:
        """Once more."""
        with self._lock:
            self._corruption += 1
