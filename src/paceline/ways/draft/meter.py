"""What a node counts of the drafts it has from others, and its drafts as Prometheus metrics, collected when the page is scraped; what became of drafts,
the engine counts. Everything happens on the event loop, so counting needs no lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.stats import Histogram
from paceline.engine.drafts import ProposerStats
from paceline.ways.draft.desk import ProposerDesk

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


class DraftMetrics(Collector):
    """For `server.metrics.MetricsPage.add`.

    Args:
        meter: what it has from others; None where it runs no model.
        drafting: by source, whether a proposer drafts at present.
    """

    def __init__(self, desk: ProposerDesk, meter: Callable[[], DraftMeter | None], drafting: Callable[[], Mapping[str, bool]]) -> None:
        self._desk, self._meter, self._drafting = desk, meter, drafting

    def describe(self) -> list[Metric]:
        """Nothing ahead of time."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        desk = self._desk
        yield from _counts("paceline_proposer", "model", "for whoever asked", desk.stats)
        yield GaugeMetricFamily("paceline_proposer_sessions", "Texts that proposers here remember.", value=desk.sessions)
        yield GaugeMetricFamily("paceline_proposer_session_tokens", "Tokens of these texts.", value=desk.tokens)
        meter = self._meter()
        if meter is None:
            return
        yield from _counts("paceline_draft_source", "source", "for this node's model by proposers of the fleet", meter.stats)
        yield meter.hop.family("paceline_draft_hop_seconds", "From asking for a draft until it is there: wire, queues and drafting.")
        failures = CounterMetricFamily("paceline_draft_failures", "Drafts asked for and not had.", labels=["node", "status"])
        for (node, status), count in meter.failures.items():
            failures.add_metric([node, status], count)
        yield failures
        yield CounterMetricFamily("paceline_draft_proposer_changes", "Times that a proposer took over.", value=meter.changes)
        available = GaugeMetricFamily("paceline_draft_source_available", "1 where a proposer drafts at present.", labels=["source"])
        for source, drafts in self._drafting().items():
            available.add_metric([source], int(drafts))
        yield available


def _counts(name: str, label: str, whose: str, stats: Mapping[str, ProposerStats]) -> Iterator[Metric]:
    blocks = CounterMetricFamily(f"{name}_blocks", f"Blocks drafted {whose}.", labels=[label])
    tokens = CounterMetricFamily(f"{name}_tokens", "Tokens of these blocks.", labels=[label])
    passes = CounterMetricFamily(f"{name}_forward_passes", "Forward passes that they took.", labels=[label])
    failures = CounterMetricFamily(f"{name}_failures", "Blocks asked for and not had.", labels=[label])
    for key, one in stats.items():
        for family, count in ((blocks, one.blocks), (tokens, one.tokens), (passes, one.forward_passes), (failures, one.failures)):
            family.add_metric([key], count)
    yield from (blocks, tokens, passes, failures)
