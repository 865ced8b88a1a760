"""Push-pull gossip as a state machine: `tick`, `on_request`, `on_reply` and `on_failure` take the time and return effects that their caller carries out.

In a round a node sends a few others digests of the cards it holds, 17 bytes a node. Each answers with the cards it has newer and names those it wants;
these follow in a second call. So the cost of a round depends on what changed, not on the size of the fleet's cards. The owner signs cards (`Reseal`,
`Renew` -> `announce`), makes calls (`GossipCall` -> `on_reply` or `on_failure`), checks signatures before anything enters, and calls `tick` at `next_tick`.
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
    """The reply to a request, and the effects to carry out."""

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
        """Take this node's own card: a new one (version above every one before), or the same signed again (beat above the last).

        A new card goes out soon, a goodbye at once, and a card that was signed again with the round that asked for it.

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
        """Remember an address that mDNS announced. If it is new, the next round is brought forward to call it."""
        if self._peers.hear_seed(address) and self._next_round is not None:
            self._next_round = min(self._next_round, max(now, self._last_round + self._preset.exchange_s / 10))

    def learn(self, revocations: Iterable[SealedRevocation], now: float) -> tuple[Effect, ...]:
        """Take checked revocations that did not come by gossip but by a join or from the CA on this node. They are passed on at once."""
        effects = self._intake.revoke(revocations)
        if effects and self._next_round is not None:
            self._next_round = now
        return effects

    def complete(self, said: SealedList, now: float) -> None:
        """Take the CA's checked statement that the revocations known here are complete. It is passed on at once if it is new."""
        if self._revocations.complete(said) and self._next_round is not None:
            self._next_round = now

    # -------------------------------------------------------------------------------------------------------------------- time

    @property
    def next_tick(self) -> float | None:
        """Monotonic seconds at which `tick` next has work; None before the first `announce`."""
        return None if self._next_round is None else min(self._next_round, self._registry.soonest)

    def tick(self, now: float) -> tuple[Effect, ...]:
        """Drop expired cards, ask for this node's card to be signed again, and start exchanges when a round is due. Missed rounds are not made up for."""
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
        """Count a request against its peer's rate and check its size, before it is decoded and its signatures are checked.

        Raises:
            PeerFloods: the peer sends requests too often.
            MessageTooLarge: the request exceeds a bound.
        """
        self._shares.take(peer, now)
        self._preset.bounds.check(measures)

    def on_request(self, request: ExchangeRequest, peer: NodeId, now: float) -> Answered:
        """Answer a peer after its request was admitted and its signatures were checked."""
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
        """Take the reply to a call from `peer`, the node that answered. The effects may include a further call."""
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
        """Drop a call that failed or was refused. The peer is called again when its turn comes; its card is left to expire."""
        self._exchanges.pop(call, None)

    def lose(self, node_id: NodeId, now: float) -> tuple[Effect, ...]:
        """Drop the card of a node that certainly does not run any more."""
        self._registry.end(node_id, now)
        return self._intake.sweep(now)

    def lacks_certificate(self, node_id: NodeId) -> None:
        """Note that a card of this node came without its certificate, which is not known here. The next exchange asks for both."""
        self._registry.lacks_certificate(node_id)

    # ------------------------------------------------------------------------------------------------------------------ reading

    def view(self, now: float) -> FleetView:
        own = self._registry.own_card
        clashes = () if own is None else self._own_id.conflicts(own.card, now)
        return FleetView(self.own, self._registry.snapshot(now), clashes, self._revocations.ids)

    @property
    def members(self) -> Mapping[NodeId, tuple[str, ...]]:
        """Addresses of the other live nodes, by node id."""
        return self._registry.members

    @property
    def addresses(self) -> frozenset[str]:
        """Every address that this node may call: those of members, seeds and lost nodes."""
        return self._peers.addresses().union(*self._registry.members.values())

    def voids(self, node_id: NodeId, issued_at: int) -> bool:
        """Return True if a certificate of `node_id`, issued at `issued_at` (Unix seconds), is revoked. Every RPC and open stream asks this."""
        return self._revocations.voids(node_id, issued_at)

    def held(self, key: int, version: int) -> SealedCard | None:
        """Return the card of this key and version, or None if it is not held. A peer may send a newer signature of it without the card."""
        return self._registry.held(key, version)

    @property
    def own_card(self) -> SealedCard | None:
        return self._registry.own_card

    def own_passed(self, now: float) -> PassedCard | None:
        """Return this node's own card as GetNodeCapability hands it out; None before the first `announce`."""
        return self._registry.own_passed(now)

    @property
    def revocations(self) -> tuple[SealedRevocation, ...]:
        """All known revocations, to be kept on disk and handed to nodes that join."""
        return self._revocations.all()

    @property
    def revocation_list(self) -> SealedList | None:
        """The newest list by which the CA called the revocations complete; None before one came."""
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
        """Ask for a new card with a version above the cards that another process signed under this node's id."""
        own = self._registry.own_card
        return () if own is None else self._own_id.rise(own.card, now)
