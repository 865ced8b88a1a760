"""Whom to exchange with next: some members, in turn and in random order, and one of those who can't be members yet or any more.

Every member comes up once before any comes up twice, so no pair waits longer than chance allows. Seeds (addresses from `--peer`, a join or
mDNS) are called until a live card lists them; nodes that expired are called so that a healed partition is noticed. Any machine on the network can
say something by mDNS, so what was heard there takes every second turn at most, and the place of nothing that was given.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard

MAX_STRAYS = 64
"""Seeds of a kind, and lost nodes, remembered. Of what was heard and of the lost the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class ExchangePeer:
    """A node to call."""

    addresses: tuple[str, ...]
    node_id: NodeId | None = None
    """None: only an address is known."""


class Peers:
    """Takes turns through the members and the strays. All randomness is `rng`'s."""

    def __init__(self, own: NodeId, rng: random.Random, remember_lost_s: float) -> None:
        self._own = own
        self._rng, self._remember_lost_s = rng, remember_lost_s
        self._turn: list[NodeId] = []
        self._given: dict[str, None] = {}
        self._heard: dict[str, None] = {}
        self._owners: dict[str, NodeId] = {}
        """Who answers at a seed, once that is known."""
        self._own_addresses: set[str] = set()
        self._lost: dict[NodeId, tuple[tuple[str, ...], float]] = {}
        self._turns = [0, 0]
        self._next_kind = 0

    def give_seed(self, address: str) -> None:
        """Remember an address that a person gave, or that a member was at: the first so many."""
        if len(self._given) < MAX_STRAYS:
            self._given[address] = None

    def hear_seed(self, address: str) -> bool:
        """Remember an address that any machine may have announced; True where it is new."""
        if address in self._given or address in self._heard or address in self._own_addresses:
            return False
        self._heard[address] = None
        if len(self._heard) > MAX_STRAYS:
            oldest = next(iter(self._heard))
            del self._heard[oldest]
            self._owners.pop(oldest, None)
        return True

    def is_at(self, node_id: NodeId, addresses: Iterable[str]) -> None:
        """A node lists these addresses, or answered there: a seed among them is not called while that node is a member (or this one)."""
        for address in addresses:
            if address in self._given or address in self._heard:
                self._owners[address] = node_id

    def move(self, addresses: Iterable[str]) -> None:
        """This very node is at these addresses now."""
        self._own_addresses = set(addresses)
        self.is_at(self._own, self._own_addresses)

    def lost(self, card: NodeCard, now: float) -> None:
        """A node expired without a goodbye."""
        self._lost.pop(card.node_id, None)
        self._lost[card.node_id] = (card.addresses, now)
        if len(self._lost) > MAX_STRAYS:
            del self._lost[next(iter(self._lost))]

    def forget(self, node_id: NodeId) -> None:
        """A node is back, said goodbye or was revoked: it is not lost."""
        self._lost.pop(node_id, None)

    def addresses(self) -> frozenset[str]:
        """Of all that may be called beside the members."""
        return frozenset([*self._given, *self._heard, *(address for addresses, _ in self._lost.values() for address in addresses)])

    def choose(self, members: dict[NodeId, tuple[str, ...]], count: int, now: float) -> tuple[ExchangePeer, ...]:
        """The next `count` members (addresses by id, without this node), and a stray; more strays where there are fewer members."""
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
