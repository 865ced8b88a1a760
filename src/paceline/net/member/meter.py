"""Counters and log lines of a node's part in its fleet. All runs on the event loop, so counting needs no lock."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from paceline.core.stats import Histogram
from paceline.fleet.messages import Appeared, Clashed, Effect, Expired, Left, Restarted, Revoked

EXCHANGE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


@dataclass(slots=True)
class FleetMeter:
    rounds: int = 0
    """Rounds of exchanges that this node began."""
    exchange: Histogram = field(default_factory=lambda: Histogram(EXCHANGE_BOUNDS_S))
    """Seconds of the exchanges that this node began and a peer answered."""
    failed: int = 0
    """Exchanges that this node began and that failed."""
    answered: int = 0
    """Exchanges that peers began and this node answered."""
    refused: int = 0
    """Requests, cards and revocations that were not taken."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """Bytes of exchanges, without TLS and framing."""
    forwarded: int = 0
    """Requests run by another node."""
    served: int = 0
    """Requests run for another node."""
    retried: int = 0
    """Moves of unfinished requests to another node, before or after their first token."""


logger = logging.getLogger(__name__)
SAME_ID_HINT = (
    "Both machines have copies of one home folder. Stop one, remove the folder `fleet` from its PACELINE_HOME, and join with a new token"
)


def log_news(effect: Effect) -> None:
    """Log a line for effects that a person should know of, and none for others."""
    match effect:
        case Appeared(card):
            logger.info("%s is here, at %s", card.node_id, ", ".join(card.addresses))
        case Restarted(card):
            logger.info("%s restarted", card.node_id)
        case Left(node_id):
            logger.info("%s left", node_id)
        case Expired(node_id):
            logger.warning("%s was not heard of any more", node_id)
        case Revoked(node_id):
            logger.warning("%s was revoked", node_id)
        case Clashed(node_id, addresses, others):
            logger.error(
                "%s runs elsewhere too: here at %s, there at %s. %s",
                node_id,
                ", ".join(addresses),
                ", ".join(others),
                SAME_ID_HINT,
            )
        case _:
            pass
