"""What a node learns: revocations first, then cards, then stamps, merged into what it knows, and told as effects.

How often a peer may ask is bounded: each has a bucket of `burst` requests that refills over `period_s`; an empty one is a typed refusal.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.errors import PeerFloods
from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedRevocation
from paceline.fleet.clashes import ClashWatch
from paceline.fleet.effects import Appeared, Changed, Clashed, Effect, Expired, Ignored, Left, Restarted, Revoked
from paceline.fleet.entry import Merged
from paceline.fleet.messages import PassedCard, Stamp
from paceline.fleet.peers import Peers
from paceline.fleet.registry import CardRegistry
from paceline.fleet.revocations import Revocations


class Shares:
    """Buckets by peer, for at most `max_peers` of them: the one that asked longest ago is forgotten, with a bucket that is full by then."""

    def __init__(self, burst: int, period_s: float, max_peers: int) -> None:
        self._burst, self._period_s, self._max_peers = burst, period_s, max_peers
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, peer: str, now: float) -> None:
        """Count one request of `peer`; raise `PeerFloods` where it has none left."""
        left, since = self._left.pop(peer, (float(self._burst), now))
        left = min(float(self._burst), left + (now - since) * self._burst / self._period_s)
        refused = left < 1
        self._left[peer] = (left if refused else left - 1, now)
        if len(self._left) > self._max_peers:
            del self._left[next(iter(self._left))]
        if refused:
            raise PeerFloods(
                f"{peer} asked more than {self._burst} times in {self._period_s:g} s",
                "Look for a second process on that machine, or one with another preset",
                retry_after_s=(1 - left) * self._period_s / self._burst,
            )

    def __len__(self) -> int:
        return len(self._left)


REFUSED = {
    Merged.REVOKED: "its node is revoked",
    Merged.FORGED: "a stamp that its card disowns",
    Merged.FULL: "the fleet has as many nodes as this one may hold",
}


class Intake:
    """Merges into a registry, a set of revocations, a watch for clashes and the peers to call."""

    def __init__(self, registry: CardRegistry, revocations: Revocations, clashes: ClashWatch, peers: Peers) -> None:
        self._registry, self._revocations, self._clashes, self._peers = registry, revocations, clashes, peers
        self.news = True
        """Whether something but stamps was learnt since the last round."""
        self.revocation_news = False
        """The same of revocations: until the next round is over they go out ahead of everything."""
        self.above = 0
        """Greatest version others hold of this node's own id, made by another life or process."""

    def sweep(self, now: float) -> tuple[Effect, ...]:
        """Drop what expired."""
        effects: list[Effect] = []
        for card in self._registry.sweep(now):
            if not card.leaving:
                self._peers.lost(card, now)
                effects.append(Expired(card.node_id))
        return tuple(effects)

    def take(
        self,
        revocations: Iterable[SealedRevocation],
        cards: Iterable[PassedCard],
        stamps: Iterable[Stamp],
        peer: NodeId,
        now: float,
    ) -> tuple[Effect, ...]:
        """Everything in a message of `peer`. Call `sweep` first."""
        effects = list(self.revoke(revocations))
        refused: dict[str, list[NodeId]] = {}
        for passed in cards:
            merged = self._registry.merge(passed, now)
            if merged in REFUSED:
                refused.setdefault(REFUSED[merged], []).append(passed.sealed.card.node_id)
            else:
                effects += self._taken(merged, passed.sealed.card, now)
        effects += [Ignored(peer, ids[0], reason, len(ids)) for reason, ids in refused.items()]
        forged = sum(self._registry.merge_stamp(stamp, now) is Merged.FORGED for stamp in stamps)
        if forged:
            effects.append(Ignored(peer, None, REFUSED[Merged.FORGED], forged))
        return tuple(effects)

    def revoke(self, revocations: Iterable[SealedRevocation]) -> tuple[Effect, ...]:
        """Take revocations, and drop the cards they void."""
        new = self._revocations.merge(revocations)
        if new:
            self.news = self.revocation_news = True
            self._registry.drop_revoked()
        for sealed in new:
            self._peers.forget(sealed.revocation.node_id)
        return tuple(Revoked(sealed.revocation.node_id, sealed.revocation.not_after) for sealed in new)

    def own(self, card: NodeCard, now: float) -> tuple[Effect, ...]:
        """Note this node's own new card."""
        return self._watch(card, now)

    def _taken(self, merged: Merged, card: NodeCard, now: float) -> tuple[Effect, ...]:
        match merged:
            case Merged.RIVAL:
                return self._watch(card, now)
            case Merged.OWN_AHEAD:
                self.above = max(self.above, card.version)
                return self._watch(card, now)
            case Merged.LEFT:
                self.news = True
                self._peers.forget(card.node_id)
                return (Left(card.node_id),)
            case Merged.NEW | Merged.NEWER | Merged.RESTARTED:
                self.news = True
                self._peers.forget(card.node_id)
                self._peers.is_at(card.node_id, card.addresses)
                told: Effect = {Merged.NEW: Appeared, Merged.NEWER: Changed, Merged.RESTARTED: Restarted}[merged](card)
                return (told, *self._watch(card, now))
            case _:
                return ()

    def _watch(self, card: NodeCard, now: float) -> tuple[Effect, ...]:
        clash = self._clashes.see(card, now)
        return () if clash is None else (Clashed(clash.node_id, clash.addresses, clash.other_addresses),)
