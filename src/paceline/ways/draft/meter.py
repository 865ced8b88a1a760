"""What a node counts of the drafts it has from others; what became of drafts, the engine counts. Everything happens on the event loop, so
counting needs no lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.core.stats import Histogram
from paceline.engine.drafts import ProposerStats

HOP_BOUNDS_S = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.25, 0.5, 1.0)


@dataclass(slots=True)
class DraftMeter:
    """Of all sources of one node."""

    hop: Histogram = field(default_factory=lambda: Histogram(HOP_BOUNDS_S))
    """From the engine's ask until its answer is there: queues, wire and drafting."""
    stats: dict[str, ProposerStats] = field(default_factory=dict[str, ProposerStats])
    """By source."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By node and gRPC's name for what went wrong."""
    changes: int = 0
    """Times that another proposer took over."""

    def of(self, name: str) -> ProposerStats:
        """Counts of one source."""
        return self.stats.setdefault(name, ProposerStats())
