"""The driver of `fleet.gossip`. It passes time and messages to it, carries out its effects, and answers members.

Law: all runs on one event loop. Every call has a timeout and a task that `close` joins. Nothing that a peer sent reaches gossip before `exchange_codec`
checked it. The version of a card is on disk before any node gets the card, unless a later write fails.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.core.background import Background, TaskSet, came_within, end_tasks, in_background
from paceline.core.clock import Clock
from paceline.core.errors import FleetError, MembershipError, MessageTooLarge, OtherProtocol, PacelineError
from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import NodeCard, SealedList, SealedRevocation
from paceline.fleet.eligibility import FleetView
from paceline.fleet.gossip import Gossip
from paceline.fleet.intake import Shares
from paceline.fleet.messages import (
    Appeared,
    Changed,
    Clashed,
    Effect,
    Expired,
    GossipCall,
    Ignored,
    Left,
    Renew,
    Reseal,
    Restarted,
    Revoked,
)
from paceline.fleet.presets import Preset
from paceline.fleet.registry import next_version
from paceline.net.exchange import Exchanger
from paceline.net.exchange_codec import (
    MAX_EXCHANGE_BYTES,
    MAX_EXCHANGE_PARTS,
    MemberOpener,
    measure,
    read_request,
    write_passed,
    write_reply,
)
from paceline.net.member.meter import FleetMeter
from paceline.net.member.state import keep_version, read_version
from paceline.net.protocol import PROTOCOL_VERSION, OtherVersions, other_protocol
from paceline.net.server import KIB, Service
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Context, Limit
from paceline.net.trust.identity import Identity
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.seals import sign_card
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceServicer, add_CapabilityServiceServicer_to_server

logger = logging.getLogger(__name__)

MEASURES_PER_S = 8
"""Calls a second to measure a link that one peer may make, averaged over `MEASURE_PERIOD_S`. A full measurement takes about a dozen calls."""
MEASURE_PERIOD_S = 60.0


class GossipDriver:
    """The gossip of one node, which runs between `start` and `close`.

    Args:
        news: called with each effect that is news: all but `GossipCall`, `Reseal`, `Renew` and `Ignored`. It must not wait.
        card: returns this node's present card. Version and times are filled in here.
        seeds: addresses (host:port) to call at the start.
    """

    def __init__(
        self,
        identity: Identity,
        folder: FleetFolder,
        preset: Preset,
        news: Callable[[Effect], None],
        card: Callable[[], NodeCard],
        refusals: Refusals,
        meter: FleetMeter,
        clock: Clock,
        background: Background,
        seeds: tuple[str, ...],
        revocations: tuple[SealedRevocation, ...],
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        self._identity, self._folder, self._preset, self._news, self._card = identity, folder, preset, news, card
        self._refusals, self._meter, self._clock, self._background = refusals, meter, clock, background
        self._gossip = Gossip(identity.node_id, preset, random.Random(secrets.randbits(64)), seeds, revocations)
        self.opener = MemberOpener(identity.root, self._gossip.voids, self._gossip.lacks_certificate, self._gossip.held, clock)
        self.versions = OtherVersions(protocol, clock, self.lose)
        self._exchanger: Exchanger | None = None
        self._measures = Shares(int(MEASURES_PER_S * MEASURE_PERIOD_S), MEASURE_PERIOD_S, 2 * preset.bounds.max_nodes)
        self._instance = secrets.token_bytes(16)
        self._version = read_version(folder)
        self._sealing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks = TaskSet()
        self._ticker: asyncio.Task[None] | None = None
        self._said: NodeCard | None = None
        self._looked = asyncio.Event()
        """Set once a peer has answered, or as many calls have failed as there are addresses."""

    # --------------------------------------------------------------------------------------------------------------- its owner

    async def start(self, exchanger: Exchanger) -> None:
        """Announce this node, and gossip until `close`."""
        self._exchanger = exchanger
        await self.refresh()
        self._ticker = self._background.keep(self._tick, "fleet-gossip")

    async def refresh(self) -> None:
        """Announce a new card of this node if its contents have changed."""
        if self._card() != self._said:
            await self._seal(0)

    async def leave(self, bound_s: float) -> None:
        """Say goodbye to peers, for at most `bound_s` seconds. A node that never announced itself does nothing."""
        if self._gossip.own_card is None:
            return
        await self._seal(0, leaving=True)
        self._do(self._gossip.tick(self._clock.monotonic()))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=bound_s)

    async def close(self) -> None:
        """Stop. Idempotent."""
        await end_tasks(*self._tasks, self._ticker)

    async def first_look(self) -> None:
        """Wait until a peer has answered, or as many calls have failed as there are addresses."""
        if self.addresses:
            await self._looked.wait()

    def add_seed(self, address: str) -> None:
        """Add an address where a node may be, to be called soon."""
        self._gossip.add_seed(address, self._clock.monotonic())
        self._wake.set()

    def lose(self, node_id: NodeId) -> None:
        """Drop the card of a node that does not run any more."""
        self._do(self._gossip.lose(node_id, self._clock.monotonic()))

    def learn(self, revocations: tuple[SealedRevocation, ...]) -> None:
        """Take checked revocations that did not come by gossip."""
        self._do(self._gossip.learn(revocations, self._clock.monotonic()))
        self._wake.set()

    def complete(self, said: SealedList) -> None:
        """Take the CA's statement, made here or read from disk, that the known revocations are complete."""
        self._gossip.complete(said, self._clock.monotonic())
        self._wake.set()

    async def reseal(self) -> None:
        """Announce a new card of this node with its present certificate."""
        await self._seal(0)

    def voids(self, node_id: NodeId, issued_at: int) -> bool:
        return self._gossip.voids(node_id, issued_at)

    def view(self) -> FleetView:
        return self._gossip.view(self._clock.monotonic())

    def revocation_of(self, node_id: NodeId) -> bytes | None:
        """Return the signed revocation of a node with the latest `not_after`; None if it was not revoked."""
        known = (sealed for sealed in self.revocations if sealed.revocation.node_id == node_id)
        latest = max(known, key=lambda sealed: sealed.revocation.not_after, default=None)
        return None if latest is None else latest.sealed

    @property
    def node_id(self) -> NodeId:
        return self._identity.node_id

    @property
    def addresses(self) -> frozenset[str]:
        """Every address that this node may call."""
        return self._gossip.addresses

    @property
    def revocations(self) -> tuple[SealedRevocation, ...]:
        return self._gossip.revocations

    @property
    def revocation_list(self) -> SealedList | None:
        """The newest list by which the CA called the revocations complete; None before one came."""
        return self._gossip.revocation_list

    @property
    def revocations_digest(self) -> bytes:
        return self._gossip.revocations_digest

    # -------------------------------------------------------------------------------------------------------------- its server

    async def answer(self, request: wire.ExchangeCapabilitiesRequest, peer: NodeId) -> wire.ExchangeCapabilitiesResponse:
        """Answer an exchange that a peer began.

        Raises:
            FleetError: the peer asks too often or too much, speaks another version, or sent a malformed request.
        """
        try:
            self._gossip.admit(peer, measure(request), self._clock.monotonic())
            if (refusal := self.hear_version(peer, request.protocol)) is not None:
                raise refusal
            opened = await read_request(request, self.opener, self._refuse(peer))
        except FleetError as error:
            self._refusals.note(peer, error.message)
            self._meter.refused += 1
            raise
        answered = self._gossip.on_request(opened, peer, self._clock.monotonic())
        self._meter.answered += 1
        self._meter.received_bytes += request.ByteSize()
        self._do(answered.effects)
        reply = write_reply(answered.reply, self.versions.own)
        self._meter.sent_bytes += reply.ByteSize()
        return reply

    def hear_version(self, peer: NodeId, spoken: int) -> OtherProtocol | None:
        """Note which protocol version a caller speaks. Return the refusal to send if it is not this node's version."""
        try:
            self.versions.check(peer, spoken)
        except OtherProtocol:
            # For the caller, this node is the one that speaks another version.
            return other_protocol(self._identity.node_id, self.versions.own, spoken)
        return None

    def own_passed(self) -> wire.PassedCard | None:
        passed = self._gossip.own_passed(self._clock.monotonic())
        return None if passed is None else write_passed(passed)

    def count_measure(self, peer: NodeId) -> None:
        """Count a call by which a peer measures its link.

        Raises:
            PeerFloods: the peer measures too often.
        """
        self._measures.take(peer, self._clock.monotonic())

    # ------------------------------------------------------------------------------------------------------------------ inside

    async def _tick(self) -> None:
        while True:
            now = self._clock.monotonic()
            due = self._gossip.next_tick
            wait_s = None if due is None else max(0.0, due - now)
            self._wake.clear()
            if wait_s != 0:
                if await came_within(self._wake, wait_s):
                    continue
                now = self._clock.monotonic()
            effects = self._gossip.tick(now)
            self._meter.rounds += any(isinstance(effect, GossipCall) for effect in effects)
            self._do(effects)

    def _do(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case GossipCall():
                    self._spawn(self._call(effect))
                case Reseal(above, reason):
                    logger.info("announcing this node again: %s", reason)
                    self._spawn(self._seal(above))
                case Renew():
                    self._renew()
                case Ignored(peer, node_id, reason):
                    self._refusals.note(peer or "a peer", f"{node_id or 'a card'}: {reason}")
                    self._meter.refused += 1
                case Appeared() | Changed() | Restarted() | Left() | Expired() | Revoked() | Clashed():
                    self._news(effect)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.hold(in_background(work, "fleet-gossip-call"))

    async def _call(self, call: GossipCall) -> None:
        assert self._exchanger is not None, "calls are made after start"
        began = self._clock.monotonic()
        try:
            answer = await self._exchanger.call(call, self._refuse(call.node_id))
        except PacelineError as error:
            self._gossip.on_failure(call.id)
            self._meter.failed += 1
            if self._meter.failed >= len(self.addresses):
                self._looked.set()
            logger.debug("no exchange with %s: %s", call.node_id or ", ".join(call.addresses), error)
            return
        now = self._clock.monotonic()
        self._meter.exchange.observe(now - began)
        self._do(self._gossip.on_reply(call.id, answer.reply, answer.peer, now))
        if answer.peer != self._identity.node_id:
            self._looked.set()

    def _refuse(self, peer: NodeId | None) -> Callable[[FleetError], None]:
        def refuse(error: FleetError) -> None:
            self._meter.refused += 1
            self._refusals.note(peer or "a peer", error.message)

        return refuse

    def _renew(self) -> None:
        """Sign and announce this node's unchanged card again. The beat is not written to disk, because a restart makes a new version."""
        own = self._gossip.own_card
        if own is not None:
            self._gossip.announce(sign_card(self._identity, own.card, own.beat + 1), self._clock.monotonic())

    async def _seal(self, above: int, *, leaving: bool = False) -> None:
        """Sign and announce this node's present card as a new version, above every earlier one and above `above`."""
        async with self._sealing:
            own = self._gossip.own_card
            if own is not None and own.card.leaving:
                return
            said = self._card()
            self._version = next_version(self._version, self._clock.wall(), above)
            try:
                await asyncio.to_thread(keep_version, self._folder, self._version)
            except MembershipError as error:
                # If the disk fails, only the clock keeps versions rising over a restart. If it fell behind, members return the newer card.
                if own is None:
                    raise
                logger.warning("the version of this node's card is not kept: %s", error)
            card = replace(
                said,
                node_id=self._identity.node_id,
                version=self._version,
                instance=self._instance,
                ttl_s=self._preset.ttl_s,
                announced_at=int(self._clock.wall()),
                leaving=leaving,
            )
            sealed = sign_card(self._identity, card)
            self.opener.know(sealed)
            self._said = said
            self._gossip.announce(sealed, self._clock.monotonic())
            self._do((Changed(card),))
            self._wake.set()


MAX_MEASURE_BYTES = 1 << 20
"""Maximum number of bytes sent each way to measure a link (`fleet.links`). Raising it: one message can make a node hold more memory."""


class CapabilityServicer(CapabilityServiceServicer):
    def __init__(self, gossip: GossipDriver, guard: PeerGuard, facts: Callable[[], wire.NodeFacts]) -> None:
        self._gossip, self._guard, self._facts = gossip, guard, facts

    async def ExchangeCapabilities(self, request: wire.ExchangeCapabilitiesRequest, context: Context) -> wire.ExchangeCapabilitiesResponse:
        return await self._gossip.answer(request, self._guard.peer(context).node_id)

    async def GetNodeCapability(self, request: wire.GetNodeCapabilityRequest, context: Context) -> wire.GetNodeCapabilityResponse:
        peer = self._guard.peer(context).node_id
        # Every caller gets the card, because its certificate names the node to update. This machine's own commands are not another node.
        if request.protocol and peer != self._gossip.node_id:
            self._gossip.hear_version(peer, request.protocol)
        return wire.GetNodeCapabilityResponse(card=self._gossip.own_passed(), facts=self._facts(), protocol=self._gossip.versions.own)

    async def MeasureLink(self, request: wire.MeasureLinkRequest, context: Context) -> wire.MeasureLinkResponse:
        self._gossip.count_measure(self._guard.peer(context).node_id)
        if request.response_bytes > MAX_MEASURE_BYTES:
            raise MessageTooLarge(f"{request.response_bytes} bytes were asked for to measure a link; the bound is {MAX_MEASURE_BYTES}")
        return wire.MeasureLinkResponse(payload=bytes(request.response_bytes))


def capability_service(gossip: GossipDriver, guard: PeerGuard, facts: Callable[[], wire.NodeFacts]) -> Service:
    """Return the service that answers exchanges, requests for this node's card, and link measurements.

    Args:
        facts: returns the present setup of this node.
    """
    servicer = CapabilityServicer(gossip, guard, facts)
    limits = {
        "CapabilityService/ExchangeCapabilities": Limit(
            MAX_EXCHANGE_BYTES, MAX_EXCHANGE_PARTS, 128 * KIB, least=Trust.GUEST
        ),  # gossip has bounds of its own
        "CapabilityService/GetNodeCapability": Limit(KIB, 64, least=Trust.GUEST),
        "CapabilityService/MeasureLink": Limit(
            MAX_MEASURE_BYTES + KIB, 8, bulk=wire.MeasureLinkRequest.PAYLOAD_FIELD_NUMBER, least=Trust.GUEST
        ),
    }
    return Service(partial(add_CapabilityServiceServicer_to_server, servicer), limits)
