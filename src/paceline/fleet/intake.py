"""The intake of gossip: revocations are merged first, then cards, and every change is returned as an effect.

Each peer has a bucket of `burst` requests that refills over `period_s`; a request to an empty bucket raises `PeerFloods`.

The next peers of exchanges are some members, in turn and in random order, and one node that can't be a member yet or any more. Every member comes up once
before any comes up twice, so no pair waits longer than chance allows. Seeds (addresses from `--peer`, a join or mDNS) are called until a live card lists
them; nodes that expired are called so that a healed partition is noticed. Any machine on the network can announce itself by mDNS, so such addresses
take every second turn at most, and never the place of an address that was given.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.backoff import Recent
from paceline.core.errors import PeerFloods
from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedRevocation
from paceline.fleet.eligibility import Clash, Revocations
from paceline.fleet.messages import (
    Appeared,
    Changed,
    Clashed,
    Effect,
    Expired,
    Ignored,
    Left,
    PassedCard,
    Reseal,
    Restarted,
    Revoked,
)
from paceline.fleet.registry import CardRegistry, Merged

MAX_STRAYS = 64
"""Most given seeds, heard seeds and lost nodes that are remembered, each. Of heard seeds and lost nodes the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class ExchangePeer:
    addresses: tuple[str, ...]
    node_id: NodeId | None = None
    """None: only an address is known."""


class Peers:
    """The nodes and seeds to call, which take turns. All randomness comes from `rng`."""

    def __init__(self, own: NodeId, rng: random.Random, remember_lost_s: float) -> None:
        self._own = own
        self._rng, self._remember_lost_s = rng, remember_lost_s
        self._turn: list[NodeId] = []
        self._given: dict[str, None] = {}
        self._heard: dict[str, None] = {}
        self._owners: dict[str, NodeId] = {}
        """Node that answers at a seed, once that is known."""
        self._own_addresses: set[str] = set()
        self._lost: dict[NodeId, tuple[tuple[str, ...], float]] = {}
        self._turns = [0, 0]
        self._next_kind = 0

    def give_seed(self, address: str) -> None:
        """Remember an address that a person gave or that a member had. Addresses after the first `MAX_STRAYS` are ignored."""
        if len(self._given) < MAX_STRAYS:
            self._given[address] = None

    def hear_seed(self, address: str) -> bool:
        """Remember an address that any machine may have announced. Return True if it is new."""
        if address in self._given or address in self._heard or address in self._own_addresses:
            return False
        self._heard[address] = None
        if len(self._heard) > MAX_STRAYS:
            oldest = next(iter(self._heard))
            del self._heard[oldest]
            self._owners.pop(oldest, None)
        return True

    def is_at(self, node_id: NodeId, addresses: Iterable[str]) -> None:
        """Note that a node lists these addresses or answered there. A seed among them is not called while that node is a member or this node."""
        for address in addresses:
            if address in self._given or address in self._heard:
                self._owners[address] = node_id

    def move(self, addresses: Iterable[str]) -> None:
        """Take the present addresses of this node, so that it never calls itself."""
        self._own_addresses = set(addresses)
        self.is_at(self._own, self._own_addresses)

    def lost(self, card: NodeCard, now: float) -> None:
        """Remember a node that expired without a goodbye, so that it is called again for a while."""
        self._lost.pop(card.node_id, None)
        self._lost[card.node_id] = (card.addresses, now)
        if len(self._lost) > MAX_STRAYS:
            del self._lost[next(iter(self._lost))]

    def forget(self, node_id: NodeId) -> None:
        """Stop calling a lost node, because it is back, said goodbye or was revoked."""
        self._lost.pop(node_id, None)

    def addresses(self) -> frozenset[str]:
        """Return the addresses of seeds and lost nodes, which may be called in addition to members."""
        return frozenset([*self._given, *self._heard, *(address for addresses, _ in self._lost.values() for address in addresses)])

    def choose(self, members: dict[NodeId, tuple[str, ...]], count: int, now: float) -> tuple[ExchangePeer, ...]:
        """Return the next `count` members and one stray (a seed or a lost node); more strays if there are fewer members.

        Args:
            members: addresses by node id, without this node.
        """
        chosen: list[ExchangePeer] = []
        while len(chosen) < min(count, len(members)):
            if not self._turn:
                self._turn = sorted(members)
                self._rng.shuffle(self._turn)
            node_id = self._turn.pop()
            if node_id in members and all(peer.node_id != node_id for peer in chosen):
                chosen.append(ExchangePeer(members[node_id], node_id))
        return (*chosen, *self._take_strays(members, max(1, count - len(chosen)), now))

    def _take_strays(self, members: dict[NodeId, tuple[str, ...]], count: int, now: float) -> tuple[ExchangePeer, ...]:
        met = {*members, self._own}
        given, heard = (
            [ExchangePeer((address,)) for address in seeds if self._owners.get(address) not in met] for seeds in (self._given, self._heard)
        )
        given += [
            ExchangePeer(addresses, node_id) for node_id, (addresses, since) in self._lost.items() if now - since <= self._remember_lost_s
        ]
        taken: list[ExchangePeer] = []
        left = [len(given), len(heard)]
        while len(taken) < count and any(left):
            kind = self._next_kind if left[self._next_kind] else 1 - self._next_kind
            strays = (given, heard)[kind]
            taken.append(strays[self._turns[kind] % len(strays)])
            self._turns[kind] += 1
            left[kind] -= 1
            self._next_kind = 1 - kind
        return tuple(taken)


CONFLICT_RISES, CONFLICT_S = 3, 600.0
"""A node that rises above cards of its own id this often within this time says that its id runs elsewhere. Fewer rises: a machine that restarts with a
wrong clock may say it too. A longer time: the conflict is shown for longer after one machine was stopped."""


class OwnId:
    """The watch for cards of this node's own id that another process signed: an earlier run of this node, or a copy of its home folder elsewhere.

    The node answers with a card of a greater version (a rise), at most once a round. That ends the matter for an earlier run; a copy rises in turn.

    Args:
        round_s: seconds between two rises.
    """

    def __init__(self, round_s: float) -> None:
        self._round_s = round_s
        self._other: NodeCard | None = None
        """The card with the greatest version that another process signed."""
        self._rises = Recent(CONFLICT_RISES, CONFLICT_S)

    def see(self, card: NodeCard) -> None:
        """Note a card of this id that another process signed."""
        if self._other is None or self._other.version <= card.version:
            self._other = card

    def rise(self, own: NodeCard, now: float) -> tuple[Effect, ...]:
        """Ask for a card above the greatest one seen. The last of `CONFLICT_RISES` rises in `CONFLICT_S` says once that the id runs elsewhere."""
        if self._other is None or own.version > self._other.version or any(ago < self._round_s for ago in self._rises.ago(now)):
            return ()
        was_known = bool(self.conflicts(own, now))
        self._rises.add(now)
        reseal = Reseal(self._other.version, "others hold a newer card of this node, from an earlier life or another process")
        found = () if was_known else self.conflicts(own, now)
        return (reseal, *(Clashed(one.node_id, one.addresses, one.other_addresses) for one in found))

    def conflicts(self, own: NodeCard, now: float) -> tuple[Clash, ...]:
        """Return the conflict about this id, if there is one now."""
        if self._other is None or not self._rises.is_full(now):
            return ()
        return (Clash(own.node_id, own.addresses, self._other.addresses, self._rises.ago(now)[-1]),)


class Shares:
    """Rate limits by peer, for at most `max_peers` of them. The peer that asked longest ago is forgotten first.

    Args:
        burst: requests that a peer may send at once.
        period_s: seconds in which an empty bucket refills.
    """

    def __init__(self, burst: int, period_s: float, max_peers: int) -> None:
        self._burst, self._period_s, self._max_peers = burst, period_s, max_peers
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, peer: str, now: float) -> None:
        """Count one request of `peer`; raise `PeerFloods` if its bucket is empty."""
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
    Merged.FULL: "the fleet has as many nodes as this one may hold",
}


class FleetIntake:
    """The merge of news into the registry, the revocations, the watch over this node's own id, and the peers to call."""

    def __init__(self, registry: CardRegistry, revocations: Revocations, own_id: OwnId, peers: Peers) -> None:
        self._registry, self._revocations, self._own_id, self._peers = registry, revocations, own_id, peers
        self.news = True
        """True if a card, a goodbye or a revocation came since the last round, and not only renewed signatures."""
        self.revocation_news = False
        """True if a revocation came since the last round. The next round then sends all revocations at once."""

    def sweep(self, now: float) -> tuple[Effect, ...]:
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
        peer: NodeId,
        now: float,
    ) -> tuple[Effect, ...]:
        """Merge all revocations and cards in a message of `peer`, and return the changes. Call `sweep` first."""
        effects = list(self.revoke(revocations))
        refused: dict[str, list[NodeId]] = {}
        for passed in cards:
            merged = self._registry.merge(passed, now)
            if merged in REFUSED:
                refused.setdefault(REFUSED[merged], []).append(passed.sealed.card.node_id)
            else:
                effects += self._taken(merged, passed.sealed.card)
        effects += [Ignored(peer, ids[0], reason, len(ids)) for reason, ids in refused.items()]
        return tuple(effects)

    def revoke(self, revocations: Iterable[SealedRevocation]) -> tuple[Effect, ...]:
        """Take revocations, and drop the cards of certificates that they revoke. Return an effect for each new one."""
        new = self._revocations.merge(revocations)
        if new:
            self.news = self.revocation_news = True
            self._registry.drop_revoked()
        for sealed in new:
            self._peers.forget(sealed.revocation.node_id)
        return tuple(Revoked(sealed.revocation.node_id, sealed.revocation.not_after) for sealed in new)

    def _taken(self, merged: Merged, card: NodeCard) -> tuple[Effect, ...]:
        match merged:
            case Merged.OWN:
                own = self._registry.own_card
                if own is not None and own.card.instance != card.instance:
                    self._own_id.see(card)
                return ()
            case Merged.LEFT:
                self.news = True
                self._peers.forget(card.node_id)
                return (Left(card.node_id),)
            case Merged.NEW | Merged.NEWER | Merged.RESTARTED:
                self.news = True
                self._peers.forget(card.node_id)
                self._peers.is_at(card.node_id, card.addresses)
                return ({Merged.NEW: Appeared, Merged.NEWER: Changed, Merged.RESTARTED: Restarted}[merged](card),)
            case _:
                return ()
