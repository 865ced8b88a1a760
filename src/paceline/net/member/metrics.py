"""A node's fleet life as Prometheus metrics, collected when the page is scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.net.member.node import FleetNode


class FleetMetrics(Collector):
    """For `server.metrics.MetricsPage.add`."""

    def __init__(self, fleet: FleetNode) -> None:
        self._fleet = fleet

    def describe(self) -> list[Metric]:
        """Nothing ahead of time."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One family a metric."""
        fleet, meter = self._fleet, self._fleet.meter
        view = fleet.view()
        yield GaugeMetricFamily("paceline_fleet_nodes", "Nodes in view, this one included.", value=len(view.nodes))
        yield GaugeMetricFamily("paceline_fleet_revoked", "Nodes known to be revoked.", value=len(view.revoked))
        yield GaugeMetricFamily("paceline_fleet_clashes", "Node ids that two running processes claim.", value=len(view.clashes))
        yield GaugeMetricFamily("paceline_fleet_failing_addresses", "Addresses whose last call failed.", value=len(fleet.book.failures))
        yield CounterMetricFamily("paceline_gossip_rounds", "Rounds of exchanges begun.", value=meter.rounds)
        yield meter.exchange.family("paceline_gossip_exchange_seconds", "Exchanges that this node began, until they were answered.")
        yield CounterMetricFamily(
            "paceline_gossip_exchanges_failed", "Exchanges that this node began and no node answered.", value=meter.failed
        )
        yield CounterMetricFamily("paceline_gossip_exchanges_answered", "Exchanges that peers began.", value=meter.answered)
        yield CounterMetricFamily("paceline_gossip_refused", "Requests, cards, stamps and revocations not taken.", value=meter.refused)
        yield CounterMetricFamily("paceline_gossip_sent_bytes", "Of messages, before TLS.", value=meter.sent_bytes)
        yield CounterMetricFamily("paceline_gossip_received_bytes", "Of messages, after TLS.", value=meter.received_bytes)
        yield CounterMetricFamily("paceline_fleet_refusals", "Parties turned away, logged or not.", value=fleet.refusals.total)
        yield CounterMetricFamily("paceline_fleet_forwarded", "Requests sent to another node.", value=meter.forwarded)
        yield CounterMetricFamily("paceline_fleet_retried", "How often one left a node that could not go on with it.", value=meter.retried)
        yield CounterMetricFamily("paceline_fleet_served", "Requests run for another node.", value=meter.served)
        yield from self._links()
        yield from self._rpcs()

    def _links(self) -> Iterator[Metric]:
        rtt = GaugeMetricFamily("paceline_link_rtt_seconds", "Round trip to a node, over the best address.", labels=["to"])
        rate = GaugeMetricFamily("paceline_link_bytes_per_second", "Bandwidth to a node, over the best address.", labels=["to"])
        for link in self._fleet.links:
            rtt.add_metric([link.to], link.rtt_s)
            rate.add_metric([link.to], link.bytes_per_s)
        yield rtt
        yield rate

    def _rpcs(self) -> Iterator[Metric]:
        meter = self._fleet.rpcs
        answered = CounterMetricFamily("paceline_rpcs_answered", "RPCs of members answered.", labels=["method"])
        failed = CounterMetricFamily("paceline_rpcs_failed", "RPCs refused, cancelled or broken.", labels=["method"])
        under_way = GaugeMetricFamily("paceline_rpcs_open", "RPCs under way.", labels=["method"])
        for family, counts in ((answered, meter.answered), (failed, meter.failed), (under_way, meter.open)):
            for method, count in counts.items():
                family.add_metric([method], count)
            yield family
