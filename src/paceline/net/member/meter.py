"""What a node counts of its fleet life, its metrics, and what it says of it in its log. Everything happens on the event loop, so counting needs no lock."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.stats import Histogram, Metrics, Row, counter, gauge, histogram
from paceline.fleet.messages import Appeared, Clashed, Effect, Expired, Left, Restarted, Revoked

if TYPE_CHECKING:
    from paceline.net.member.node import FleetNode

EXCHANGE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(slots=True)
class FleetMeter:
    rounds: int = 0
    """Rounds of exchanges that this node began."""
    exchange: Histogram = field(default_factory=lambda: Histogram(EXCHANGE_BOUNDS_S))
    """Exchanges that this node began and a peer answered."""
    failed: int = 0
    """Those that no node answered."""
    answered: int = 0
    """Those that peers began."""
    refused: int = 0
    """Requests, cards, stamps and revocations that were not taken."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """Of exchanges, without TLS and framing."""
    forwarded: int = 0
    """Requests run by another node."""
    served: int = 0
    """Requests run for another node."""
    retried: int = 0
    """How often requests left a node before their end, before their first token or behind it."""


logger = logging.getLogger(__name__)


def log_news(effect: Effect) -> None:
    """One line, where it is worth one."""
    match effect:
        case Appeared(card):
            logger.info("%s is here, at %s", card.node_id, ", ".join(card.addresses))
        case Restarted(card):
            logger.info("%s started anew", card.node_id)
        case Left(node_id):
            logger.info("%s left", node_id)
        case Expired(node_id):
            logger.warning("%s was not heard of any more", node_id)
        case Revoked(node_id):
            logger.warning("%s was revoked", node_id)
        case Clashed(node_id, addresses, others):
            logger.error(
                "two running nodes claim the id %s: at %s and at %s; stop one, and join anew there",
                node_id,
                ", ".join(addresses),
                ", ".join(others),
            )
        case _:
            pass


# fmt: off
ROWS: tuple[Row[FleetNode], ...] = (
    gauge("paceline_fleet_nodes", "Nodes in view, this one included.", lambda node: len(node.view().nodes)),
    gauge("paceline_fleet_revoked", "Nodes known to be revoked.", lambda node: len(node.view().revoked)),
    gauge("paceline_fleet_clashes", "Node ids that two running processes claim.", lambda node: len(node.view().clashes)),
    gauge("paceline_fleet_failing_addresses", "Addresses whose last call failed.", lambda node: len(node.book.failures)),
    counter("paceline_gossip_rounds", "Rounds of exchanges begun.", lambda node: node.meter.rounds),
    histogram("paceline_gossip_exchange_seconds", "Exchanges that this node began, until they were answered.", lambda node: node.meter.exchange),
    counter("paceline_gossip_exchanges_failed", "Exchanges that this node began and no node answered.", lambda node: node.meter.failed),
    counter("paceline_gossip_exchanges_answered", "Exchanges that peers began.", lambda node: node.meter.answered),
    counter("paceline_gossip_refused", "Requests, cards, stamps and revocations not taken.", lambda node: node.meter.refused),
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
