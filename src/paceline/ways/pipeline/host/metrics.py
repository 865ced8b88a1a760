"""A node's shards as Prometheus metrics, collected when the page is scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.ways.pipeline.host.host import NodeShardHost
from paceline.ways.pipeline.host.meter import ShardMeter


class ShardMetrics(Collector):
    """For `server.metrics.MetricsPage.add`."""

    def __init__(self, host: NodeShardHost, meter: ShardMeter) -> None:
        self._host, self._meter = host, meter

    def describe(self) -> list[Metric]:
        """Nothing ahead of time."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        warm, meter = self._host.warm, self._meter
        latency = HistogramMetricFamily(
            "paceline_shard_latency_ms",
            "Milliseconds from a batch's arrival at this machine's layers to its departure.",
            labels=["shard_id"],
        )
        for shard_id, histogram in meter.latency().items():
            histogram.add_to(latency, [shard_id])
        yield latency
        loaded = [shard for shard in warm.shards if shard.loaded is not None]
        yield GaugeMetricFamily("paceline_shards_loaded", "Ranges of layers in memory for other machines.", value=len(loaded))
        yield GaugeMetricFamily("paceline_shard_memory_bytes", "What they take, weights and KV.", value=warm.used_bytes)
        yield GaugeMetricFamily("paceline_shard_sessions", "Sessions of other machines on them.", value=self._host.sessions)
        yield GaugeMetricFamily("paceline_shard_queue_depth", "Batches that wait.", value=sum(shard.queue_depth for shard in loaded))
        yield CounterMetricFamily("paceline_shard_sessions_opened", "Sessions that began.", value=meter.sessions_opened)
        yield CounterMetricFamily("paceline_shard_sessions_refused", "Sessions refused for want of room.", value=meter.sessions_refused)
        yield CounterMetricFamily("paceline_shard_loads", "Times that layers were loaded.", value=meter.loads)
        yield CounterMetricFamily("paceline_shard_evictions", "Times that layers were freed.", value=meter.evictions)
