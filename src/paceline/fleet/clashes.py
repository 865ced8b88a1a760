"""Two running processes under one id. A process that was superseded by another and comes back with a newer card is alive beside it.

One return may be a stale card of an earlier life, met late; the second is a clash. Two cards of one version prove it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard
from paceline.fleet.view import Clash

MAX_EARLIER = 4
"""Superseded processes remembered of one id."""


@dataclass(slots=True)
class _Lives:
    """The processes seen under one id."""

    current: NodeCard
    earlier: dict[bytes, tuple[str, ...]] = field(default_factory=dict[bytes, tuple[str, ...]])
    """Superseded: addresses by instance."""
    returns: int = 0
    other_addresses: tuple[str, ...] = ()
    clashed_at: float | None = None

    def clash(self, now: float) -> Clash:
        ago = now - (now if self.clashed_at is None else self.clashed_at)
        return Clash(self.current.node_id, self.current.addresses, self.other_addresses, ago)


class ClashWatch:
    """Sees every card that is taken, in order.

    Args:
        memory_s: a clash is reported for so long after its last evidence.
        max_nodes: ids watched; the one seen first is forgotten first.
    """

    def __init__(self, memory_s: float, max_nodes: int) -> None:
        self._memory_s, self._max_nodes = memory_s, max_nodes
        self._lives: dict[NodeId, _Lives] = {}

    def see(self, card: NodeCard, now: float) -> Clash | None:
        """Note a card; a clash it is evidence of, unless that was known."""
        lives = self._lives.get(card.node_id)
        if lives is None:
            self._lives[card.node_id] = _Lives(card)
            if len(self._lives) > self._max_nodes:
                del self._lives[next(iter(self._lives))]
            return None
        before, lives.current = lives.current, card
        if card.instance == before.instance:
            return None
        returned = lives.earlier.pop(card.instance, None) is not None
        lives.earlier[before.instance] = before.addresses
        if len(lives.earlier) > MAX_EARLIER:
            del lives.earlier[next(iter(lives.earlier))]
        lives.returns += returned
        if card.version != before.version and not (returned and lives.returns >= 2):
            return None
        known = lives.clashed_at is not None and now - lives.clashed_at <= self._memory_s
        lives.other_addresses, lives.clashed_at = before.addresses, now
        return None if known else lives.clash(now)

    def clashes(self, now: float) -> tuple[Clash, ...]:
        """What was seen of late, by id."""
        return tuple(
            lives.clash(now)
            for _, lives in sorted(self._lives.items())
            if lives.clashed_at is not None and now - lives.clashed_at <= self._memory_s
        )
