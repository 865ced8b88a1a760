"""The fleet's rows on the metrics page."""

from __future__ import annotations

from paceline.core.stats import Metrics, Row, counter, gauge, histogram
from paceline.net.member.node import FleetNode

# fmt: off
ROWS: tuple[Row[FleetNode], ...] = (
    gauge("paceline_fleet_nodes", "Nodes in view, this one included.", lambda node: len(node.view().nodes)),
    gauge("paceline_fleet_revoked", "Nodes known to be revoked.", lambda node: len(node.view().revoked)),
    gauge("paceline_fleet_clashes", "1 while another running process claims the id of this node.", lambda node: len(node.view().clashes)),
    gauge("paceline_fleet_failing_addresses", "Addresses whose last call failed.", lambda node: len(node.book.failures)),
    counter("paceline_gossip_rounds", "Rounds of exchanges begun.", lambda node: node.meter.rounds),
    histogram("paceline_gossip_exchange_seconds", "Exchanges that this node began, until they were answered.", lambda node: node.meter.exchange),
    counter("paceline_gossip_exchanges_failed", "Exchanges that this node began and no node answered.", lambda node: node.meter.failed),
    counter("paceline_gossip_exchanges_answered", "Exchanges that peers began.", lambda node: node.meter.answered),
    counter("paceline_gossip_refused", "Requests, cards and revocations not taken.", lambda node: node.meter.refused),
    counter("paceline_gossip_sent_bytes", "Of messages, before TLS.", lambda node: node.meter.sent_bytes),
    counter("paceline_gossip_received_bytes", "Of messages, after TLS.", lambda node: node.meter.received_bytes),
    counter("paceline_fleet_refusals", "Parties turned away, logged or not.", lambda node: node.refusals.total),
    counter("paceline_fleet_forwarded", "Requests sent to another node.", lambda node: node.meter.forwarded),
    counter("paceline_fleet_retried", "How often one left a node that could not go on with it.", lambda node: node.meter.retried),
    counter("paceline_fleet_served", "Requests run for another node.", lambda node: node.meter.served),
    gauge("paceline_link_rtt_seconds", "Round trip to a node, over the best address.",
            lambda node: {link.to: link.rtt_s for link in node.links}, "to"),
    gauge("paceline_link_bytes_per_second", "Bandwidth to a node, over the best address.",
            lambda node: {link.to: link.bytes_per_s for link in node.links}, "to"),
    counter("paceline_rpcs_answered", "RPCs of members answered.", lambda node: node.rpcs.answered, "method"),
    counter("paceline_rpcs_failed", "RPCs refused, cancelled or broken.", lambda node: node.rpcs.failed, "method"),
    gauge("paceline_rpcs_open", "RPCs under way.", lambda node: node.rpcs.open, "method"),
)
# fmt: on


def fleet_metrics(fleet: FleetNode) -> Metrics[FleetNode]:
    return Metrics(ROWS, lambda: fleet)
