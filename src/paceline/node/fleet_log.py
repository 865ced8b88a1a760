"""A fleet's news, as lines of a node's log."""

from __future__ import annotations

import logging

from paceline.fleet.effects import Appeared, Clashed, Effect, Expired, Left, Restarted, Revoked

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
