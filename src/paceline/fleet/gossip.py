"""Push-pull gossip as a state machine: `tick`, `on_request`, `on_reply`, `on_failure` take the time and return effects; nothing is done here.

A round: a node tells a few others what it holds, in 17 bytes a node; each hands over what it has newer and names what it wants; what was
wanted follows in a second call. A round costs what changed, not the fleet's cards. The owner signs cards (`Reseal`, `Renew` -> `announce`), makes
calls (`GossipCall` -> `on_reply` or `on_failure`), checks signatures before anything enters, and calls `tick` at `next_tick`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.core.ids import NodeId
from paceline.fleet.card import SealedCard, SealedList, SealedRevocation
from paceline.fleet.eligibility import FleetView, Revocations
from paceline.fleet.intake import ExchangePeer, FleetIntake, OwnId, Peers, Shares
from paceline.fleet.messages import Effect, ExchangeRequest, GossipCall, PassedCard, Renew, Reply
from paceline.fleet.presets import Measures, Preset
from paceline.fleet.registry import CardRegistry


@dataclass(frozen=True, slots=True)
class Answered:
    """The reply to send, and what else came of a request."""

    reply: Reply
    effects: tuple[Effect, ...]


@dataclass(slots=True)
class _Exchange:
    """An exchange under way with one peer."""

    peer: ExchangePeer
    calls: int
    until: float


class Gossip:
    """One node's part in its fleet's gossip.

    Args:
        seeds: addresses (host:port) that were given, to call until a live card lists them.

    Nothing is called before the first `announce`.
    """

    def __init__(
        self, own: NodeId, preset: Preset, rng: random.Random, seeds: Iterable[str] = (), revocations: Iterable[SealedRevocation] = ()
    ) -> None:
        self.own = own
        self._preset, self._rng = preset, rng
        self._revocations = Revocations(revocations)
        self._registry = CardRegistry(own, self._revocations, preset.bounds.max_nodes)
        self._own_id = OwnId(preset.exchange_s)
        self._shares = Shares(preset.bounds.burst, preset.exchange_s, 2 * preset.bounds.max_nodes)
        self._peers = Peers(own, rng, preset.remember_lost_s)
        self._intake = FleetIntake(self._registry, self._revocations, self._own_id, self._peers)
        for seed in seeds:
            self._peers.give_seed(seed)
        self._exchanges: dict[int, _Exchange] = {}
        self._last_call = 0
        self._next_round: float | None = None
        self._last_round = float("-inf")
        self._next_renewal = 0.0

    # ---------------------------------------------------------------------------------------------------------------- own card

    def announce(self, sealed: SealedCard, now: float) -> None:
        """Take this node's own card, new (version above every one before) or signed again (beat above the last), and tell others soon.

        A goodbye goes out at once, and a card that was signed again with the round that asked for it.

        Args:
            sealed: the card. Without `leaving` it starts the node's gossip; with it, call `tick` until its calls are done, then stop.
        """
        self._registry.announce(sealed, now)
        self._next_renewal = now + self._preset.restamp_s
        if sealed.beat:
            return
        self._peers.move(sealed.card.addresses)
        # News goes out at once, but a node that changes all the time still leaves a tenth of a round between.
        self._next_round = max(now, self._last_round + self._preset.exchange_s / 10)
        if sealed.card.leaving:
            self._next_round = now

    def add_seed(self, address: str, now: float) -> None:
        """An address where a node may be, heard on the network (mDNS): it is called soon, in a round that is brought forward."""
        if self._peers.hear_seed(address) and self._next_round is not None:
            self._next_round = min(self._next_round, max(now, self._last_round + self._preset.exchange_s / 10))

    def learn(self, revocations: Iterable[SealedRevocation], now: float) -> tuple[Effect, ...]:
        """Take revocations (checked) from elsewhere than gossip: a join, the CA on this node. They are told at once."""
        effects = self._intake.revoke(revocations)
        if effects and self._next_round is not None:
            self._next_round = now
        return effects

    def complete(self, said: SealedList, now: float) -> None:
        """Take the CA's word (checked) that the revocations known here are all."""
        if self._revocations.complete(said) and self._next_round is not None:
            self._next_round = now

    # -------------------------------------------------------------------------------------------------------------------- time

    @property
    def next_tick(self) -> float | None:
        """When `tick` has something to do, in monotonic seconds; None before the first `announce`."""
        return None if self._next_round is None else min(self._next_round, self._registry.soonest)

    def tick(self, now: float) -> tuple[Effect, ...]:
        """Drop what expired, have this node's card signed again, start exchanges. Early calls do little; late ones make up for nothing."""
        effects = self._intake.sweep(now)
        own = self._registry.own_card
        if own is None or self._next_round is None or now < self._next_round:
            return effects
        effects += self._rise(now)
        if now >= self._next_renewal - self._preset.exchange_s / 2 and not own.card.leaving:
            self._next_renewal = now + self._preset.restamp_s
            return (*effects, Renew())
        self._exchanges = {id_: exchange for id_, exchange in self._exchanges.items() if now < exchange.until}
        for peer in self._peers.choose(self._registry.members, self._fanout(), now):
            effects += (self._call(peer, 1, self._opening(now), now),)
        self._intake.news = self._intake.revocation_news = False
        spread = self._preset.exchange_s * self._preset.jitter
        self._last_round = now
        self._next_round = now + self._preset.exchange_s + self._rng.uniform(-spread, spread)
        return effects

    # ----------------------------------------------------------------------------------------------------------------- messages

    def admit(self, peer: NodeId, measures: Measures, now: float) -> None:
        """Before a request is decoded and its signatures are checked: raise `PeerFloods` or `MessageTooLarge`, and change nothing."""
        self._shares.take(peer, now)
        self._preset.bounds.check(measures)

    def on_request(self, request: ExchangeRequest, peer: NodeId, now: float) -> Answered:
        """Answer a peer; its request was admitted and its signatures hold."""
        self._registry.heard(peer)
        effects = self._intake.sweep(now)
        effects += self._intake.take(request.revocations, request.cards, peer, now)
        self._revocations.complete(request.revocation_list)
        effects += self._rise(now)
        revocations = () if request.revocations_digest == self._revocations.digest else self._revocations.all()
        if request.digests is None:
            reply = Reply(revocations=revocations, revocations_digest=self._revocations.digest, revocation_list=self.revocation_list)
            return Answered(reply, effects)
        apart = self._registry.compare(request.digests, now, complete=True, bounds=self._preset.bounds)
        reply = Reply(apart.cards, apart.wanted, revocations, self._revocations.digest, apart.more, self.revocation_list)
        return Answered(reply, effects)

    def on_reply(self, call: int, reply: Reply, peer: NodeId, now: float) -> tuple[Effect, ...]:
        """What a call brought; `peer` is who answered. May ask for a further call."""
        exchange = self._exchanges.pop(call, None)
        if exchange is None:
            return ()
        if exchange.peer.node_id is None:
            self._peers.is_at(peer, exchange.peer.addresses)
        if peer == self.own:
            return ()
        self._registry.heard(peer)
        effects = self._intake.sweep(now)
        effects += self._intake.take(reply.revocations, reply.cards, peer, now)
        self._revocations.complete(reply.revocation_list)
        effects += self._rise(now)
        apart = self._registry.compare(reply.wanted, now, complete=False, bounds=self._preset.bounds)
        again = reply.more or apart.more
        behind = reply.revocations_digest != self._revocations.digest
        if (again or behind or apart.cards) and exchange.calls < self._preset.max_calls:
            request = ExchangeRequest(
                digests=self._registry.digests() if again else None,
                cards=apart.cards,
                revocations=self._revocations.all() if behind else (),
                revocations_digest=self._revocations.digest,
                revocation_list=self.revocation_list,
            )
            effects += (self._call(exchange.peer, exchange.calls + 1, request, now),)
        return effects

    def on_failure(self, call: int) -> None:
        """A call did not come back, or was refused. The peer is called again when its turn comes; its card expires by itself."""
        self._exchanges.pop(call, None)

    def lose(self, node_id: NodeId, now: float) -> tuple[Effect, ...]:
        """Drop the card of a node that is proven not to run any more."""
        self._registry.end(node_id, now)
        return self._intake.sweep(now)

    def lacks_certificate(self, node_id: NodeId) -> None:
        """A card of this node came without a certificate that is not known here: the next exchange asks for both."""
        self._registry.lacks_certificate(node_id)

    # ------------------------------------------------------------------------------------------------------------------ reading

    def view(self, now: float) -> FleetView:
        own = self._registry.own_card
        clashes = () if own is None else self._own_id.conflicts(own.card, now)
        return FleetView(self.own, self._registry.snapshot(now), clashes, self._revocations.ids)

    @property
    def members(self) -> Mapping[NodeId, tuple[str, ...]]:
        """Addresses of the other nodes that are here, as of the last `tick`."""
        return self._registry.members

    @property
    def addresses(self) -> frozenset[str]:
        """Everywhere this node may call."""
        return self._peers.addresses().union(*self._registry.members.values())

    def voids(self, node_id: NodeId, issued_at: int) -> bool:
        """Whether a certificate is revoked: for every RPC and open stream."""
        return self._revocations.voids(node_id, issued_at)

    def held(self, key: int, version: int) -> SealedCard | None:
        """The card of this key and version, if it is held: a peer may send a newer signature of it alone."""
        return self._registry.held(key, version)

    @property
    def own_card(self) -> SealedCard | None:
        return self._registry.own_card

    def own_passed(self, now: float) -> PassedCard | None:
        """This node's own card as GetNodeCapability hands it out."""
        return self._registry.own_passed(now)

    @property
    def revocations(self) -> tuple[SealedRevocation, ...]:
        """All that are known, to be kept on disk and handed to those who join."""
        return self._revocations.all()

    @property
    def revocation_list(self) -> SealedList | None:
        """The CA's newest word that nothing was missing; None before any came."""
        return self._revocations.completed

    @property
    def revocations_digest(self) -> bytes:
        return self._revocations.digest

    # ------------------------------------------------------------------------------------------------------------------ private

    def _fanout(self) -> int:
        own = self._registry.own_card
        if own is not None and own.card.leaving:
            return self._preset.fanout_goodbye
        return self._preset.fanout_news if self._intake.news else self._preset.fanout

    def _opening(self, now: float) -> ExchangeRequest:
        revocations, digest = self._revocations.all() if self._intake.revocation_news else (), self._revocations.digest
        said = self.revocation_list
        own = self._registry.own_passed(now)
        if own is not None and own.sealed.card.leaving:
            return ExchangeRequest(cards=(own,), revocations=revocations, revocations_digest=digest, revocation_list=said)
        return ExchangeRequest(self._registry.digests(), revocations=revocations, revocations_digest=digest, revocation_list=said)

    def _call(self, peer: ExchangePeer, calls: int, request: ExchangeRequest, now: float) -> GossipCall:
        self._last_call += 1
        # The owner reports each call within its timeout; one that is never reported is forgotten after twice that.
        self._exchanges[self._last_call] = _Exchange(peer, calls, now + 2 * self._preset.rpc_timeout_s)
        return GossipCall(self._last_call, peer.addresses, peer.node_id, request, self._preset.rpc_timeout_s)

    def _rise(self, now: float) -> tuple[Effect, ...]:
        """Ask for a card above those of this node's own id that another process signed."""
        own = self._registry.own_card
        return () if own is None else self._own_id.rise(own.card, now)
