"""What an orchestrator counts of its pipelines, and a node's page of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.node.shards.meter import ShardMeter


class PipelineMeter:
    """Counted by the engine's thread and by the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._corruption = 0

    @property
    def corruption(self) -> int:
        """Stages that sent garbage, or wrong numbers."""
        return self._corruption

    def corrupt(self) -> None:
        """One more."""
        with self._lock:
            self._corruption += 1


class PipelineMetrics(Collector):
    """For `server.metrics.MetricsPage.add`.

    Args:
        pipelines: of this node.
        shards: of the layers it runs for others, where it does.
    """

    def __init__(self, pipelines: PipelineMeter, shards: ShardMeter | None) -> None:
        self._pipelines, self._shards = pipelines, shards

    def describe(self) -> list[Metric]:
        """Nothing ahead of time."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        corruption = self._pipelines.corruption + (0 if self._shards is None else self._shards.corruption)
        yield CounterMetricFamily(
            "paceline_shard_corruption_detected",
            "Times that another machine sent what is no activations, or was found to compute wrong numbers.",
            value=corruption,
        )
