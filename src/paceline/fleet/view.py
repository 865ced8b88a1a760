"""The fleet as one node sees it at one moment. Placement computes from this and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import NodeCard


@dataclass(frozen=True, slots=True)
class LiveCard:
    """A card that has not expired."""

    card: NodeCard
    age_s: float
    """Since its node last stamped it. 0 to the card's TTL; about 0 for this node's own."""
    beat: int = 0
    """Stamps since the card was signed."""
    trust: Trust = Trust.MEMBER
    """What the node's certificate says."""


@dataclass(frozen=True, slots=True)
class Clash:
    """Two running processes claim one id. The card in the view is the newer one's."""

    node_id: NodeId
    addresses: tuple[str, ...]
    """Of the newer card."""
    other_addresses: tuple[str, ...]
    """Of the other process."""
    seen_s_ago: float


@dataclass(frozen=True, slots=True)
class FleetView:
    """Live cards by id, and what is wrong with the fleet. Ids are in order, so equal views print alike."""

    own: NodeId
    nodes: tuple[LiveCard, ...]
    """Ordered by node id; this node's own card among them once it was announced."""
    clashes: tuple[Clash, ...] = ()
    revoked: tuple[NodeId, ...] = ()

    @property
    def ids(self) -> tuple[NodeId, ...]:
        return tuple(live.card.node_id for live in self.nodes)

    @property
    def cards(self) -> tuple[NodeCard, ...]:
        """What placement reads: equal on every node once gossip has converged (ages are not)."""
        return tuple(live.card for live in self.nodes)

    @property
    def trust(self) -> dict[NodeId, Trust]:
        """How far each is trusted."""
        return {live.card.node_id: live.trust for live in self.nodes}

    def get(self, node_id: NodeId) -> LiveCard | None:
        return next((live for live in self.nodes if live.card.node_id == node_id), None)
