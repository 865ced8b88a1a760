"""A node of a fleet, assembled: identity, gossip, the mTLS port, and the state kept on disk.

Law: `start` returns once members get answers, or raises and leaves nothing behind. `stop` says goodbye, lets running calls finish, and ends within its
bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import grpc.aio

from paceline.core.background import Background
from paceline.core.backoff import LeftOut
from paceline.core.clock import Clock, SteadyClock
from paceline.core.errors import FleetError, MembershipError, NodeUnreachable, StreamClosed, UserError
from paceline.core.ids import NodeId
from paceline.core.stats import DraftUse
from paceline.fleet.card import Link, NodeCard
from paceline.fleet.eligibility import WRONG_S, Eligible, FleetView, TrustPolicy, U_co, Use
from paceline.fleet.links import may_be_dialled
from paceline.fleet.messages import Changed, Effect, Expired, Left, Restarted, Revoked
from paceline.fleet.presets import FleetSettings
from paceline.net.channels import ChannelPool, Purpose
from paceline.net.discovery import AddressBook, Discovery
from paceline.net.exchange import Exchanger
from paceline.net.join_client import renewal_service
from paceline.net.member.gossip import GossipDriver, capability_service
from paceline.net.member.links import LinkDriver
from paceline.net.member.meter import FleetMeter, log_news
from paceline.net.member.presence import Presence
from paceline.net.member.reach import own_facts
from paceline.net.member.state import Claim, RunningNode, Sight, control_service, fleet_id, forget_running, keep_running
from paceline.net.member.upkeep import OwnPortrait, TrustKeeper, Upkeep
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.server import NodeServer, RpcMeter, Service
from paceline.net.tensor.dialling import tensor_addresses
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.certificates import Member, join_host
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.issuer import Issuer
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.seals import open_revocations, revocation_told

logger = logging.getLogger(__name__)

GOODBYE_S = 0.4
DRAIN_S = 0.8
"""Seconds of a stop: first to say goodbye to peers, then to let their calls finish. Raising either: Ctrl-C takes longer; lowering it: more calls break off."""


class FleetNode:
    """This machine as a node of its fleet.

    Raises:
        MembershipError: this machine is in no fleet, or was revoked.
        IdentityError: its identity can't be used.
    """

    def __init__(
        self, settings: FleetSettings, folder: FleetFolder, portrait: OwnPortrait, clock: Clock, protocol: int = PROTOCOL_VERSION
    ) -> None:
        self._settings, self._folder, self._portrait, self._clock = settings, folder, portrait, clock
        self.identity = folder.identity()
        revocations = open_revocations(folder.sealed_revocations(), self.identity.root)
        self.trust = settings.trust
        """Least trust that other nodes need for each use."""
        self.background = Background(clock)
        """Tasks that run as long as the node does."""
        self.meter = FleetMeter()
        self.rpcs = RpcMeter()
        self.book = AddressBook()
        self.refusals = Refusals(clock)
        steady = SteadyClock(clock)  # upkeep looks at it every second
        self.gossip = GossipDriver(
            self.identity,
            folder,
            settings.preset,
            self.news,
            self.card,
            self.refusals,
            self.meter,
            steady,
            self.background,
            seeds=(*settings.peers, *folder.peers()),
            revocations=revocations,
            protocol=protocol,
        )
        if self.gossip.voids(self.identity.node_id, self.identity.member.issued_at):
            raise MembershipError(
                f"This machine ({self.identity.node_id}) was revoked from its fleet",
                self._anew,
            )
        self.trust_keeper = TrustKeeper(
            self.identity, folder, self.gossip, clock, self._issuer, self._at_issuer, settings.max_revocation_age_s
        )
        self.pool = ChannelPool(self.identity, self.gossip.voids, clock, self._refused, self.trust_keeper.check_age)
        self._links = LinkDriver(self.pool, self.gossip.opener, clock, self.background, self._measured)
        self._presence = Presence(self.pool, self.gossip.opener, self.book, clock, self.gossip.lose)
        self._discovery = Discovery(fleet_id(self.identity), self.identity.node_id, settings.host, self.gossip.add_seed, self.background)
        self._upkeep = Upkeep(
            settings.host,
            folder,
            portrait,
            self.gossip,
            self.refusals,
            steady,
            self.background,
            self._discovery.moved,
            self.trust_keeper.look,
        )
        self._server: NodeServer | None = None
        self._tensors: TensorListener | None = None
        self._claim: Claim | None = None
        self._listeners: list[Callable[[Effect], None]] = []
        self._wrong: LeftOut[NodeId, str] = LeftOut()
        self._draft_use: Callable[[], tuple[DraftUse, ...]] = tuple
        self.troubles: tuple[str, ...] = ()
        """Problems reported by the owner of this node, in addition to its own."""
        self.plans: dict[str, str] = {}
        """Descriptions of the plans that run here, by model, shown in `sight`."""

    # --------------------------------------------------------------------------------------------------------------- its owner

    async def start(self, *services: Callable[[PeerGuard], Service], claim: Claim | None = None) -> None:
        """Listen, announce this node, and begin to look for others.

        Args:
            claim: a claim that was taken before; None takes one now. `stop` closes it.

        Raises:
            ConfigError: the port can't be used.
            MembershipError: this machine's node runs already, or its folder can't be written.
        """
        self._claim = claim or await asyncio.to_thread(Claim, self._folder, self._settings)
        try:
            await self._start(services, self._claim)
        except BaseException:
            await self.stop()
            raise

    async def _start(self, services: tuple[Callable[[PeerGuard], Service], ...], claim: Claim) -> None:
        guard = self._guard = PeerGuard(
            *(self.identity.root, self.gossip.voids, self._clock, self.refusals),
            *(self.gossip.revocation_of, self.trust_keeper.check_age),
        )
        server = NodeServer(self.identity, guard, self.rpcs, self.trust)
        server.add(
            capability_service(self.gossip, guard, lambda: own_facts(self._clock, self._tensors.port if self._tensors is not None else 0)),
            control_service(self.identity, guard, self.look),
            renewal_service(self._issuer, guard),
            *(service(guard) for service in services),
        )
        claim.fleet.close()
        port = await server.start(self._settings.host, self._settings.port)
        self._server = server
        self._tensors = TensorListener(self.identity, self.gossip.voids, self._clock, self.refusals)
        self._tensors.serve_on(claim.tensors)
        await self._upkeep.begin(port)
        local = join_host(self._settings.host or "127.0.0.1", port)
        await asyncio.to_thread(keep_running, self._folder, RunningNode(os.getpid(), local))
        bounds = self._settings.preset.bounds
        await self.gossip.start(
            Exchanger(
                *(self.node_id, self.pool, self.gossip.opener, self.book, bounds, self._clock, self._settings.peers),
                versions=self.gossip.versions,
            )
        )
        self._upkeep.start()
        self._links.start()
        if self._settings.mdns:
            self._discovery.start(self.addresses)

    async def stop(self) -> None:
        """Say goodbye, let running calls finish, and stop. It ends within its bound. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await self._stop(server)
        tensors, self._tensors = self._tensors, None
        if tensors is not None:
            await asyncio.to_thread(tensors.close)
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    async def _stop(self, server: NodeServer) -> None:
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.gossip.leave(GOODBYE_S)
        except TimeoutError:
            logger.info("not every peer heard that this node leaves; its card expires by itself")
        await asyncio.gather(server.stop(DRAIN_S), self._discovery.close(), self._links.close())
        await self._upkeep.close()
        await self.gossip.close()
        await self.pool.close()
        try:
            await self._upkeep.keep()
        except UserError as error:
            logger.warning("what this node learned of its fleet is not kept: %s", error)
        await asyncio.to_thread(forget_running, self._folder)

    # -------------------------------------------------------------------------------------------------------------------- state

    @property
    def node_id(self) -> NodeId:
        return self.identity.node_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._upkeep.addresses

    @property
    def tensors(self) -> TensorListener:
        """The listener for activations. It raises `StreamClosed` unless the node was started and not stopped."""
        if self._tensors is None:
            raise StreamClosed("This node takes no activations: it has not started, or was stopped")
        return self._tensors

    @property
    def links(self) -> tuple[Link, ...]:
        """The best measured link to each node."""
        return self._links.links

    def view(self) -> FleetView:
        return self.gossip.view()

    async def look(self) -> Sight:
        """Ask every node in view for a sign of life, then return `sight`."""
        await self._presence.look([card for card in self.view().cards if card.node_id != self.node_id])
        return self.sight()

    def sight(self) -> Sight:
        """Return the fleet as this node sees it now, with failing addresses, plans and the use of drafts."""
        now = self._clock.monotonic()
        # Addresses of nodes that left or moved do not count as failing any more.
        self.book.keep_to(self.gossip.addresses)
        failures = tuple(replace(failure, since=failure.since - now) for failure in self.book.failures)
        trust = self.trust_keeper.revocations_as_of, self.identity.member.expires_at
        plans, others = tuple(sorted(self.plans.items())), self.gossip.versions.known
        return Sight(self.view(), failures, self.meter.rounds, self._draft_use(), *trust, plans, others)

    @property
    def failing(self) -> tuple[str, ...]:
        """Present problems of this node, in words for a person. The node runs on in spite of them."""
        return (*self.background.failing, *sorted(self._upkeep.troubles), *filter(None, (self._discovery.trouble,)), *self.troubles)

    def listen(self, listener: Callable[[Effect], None]) -> None:
        """Call `listener` with all news of the fleet from now on. It must not wait."""
        self._listeners.append(listener)

    def show_drafts(self, use: Callable[[], tuple[DraftUse, ...]]) -> None:
        """Set the function from which `sight` takes the use of drafts on this node."""
        self._draft_use = use

    def look_again(self) -> None:
        """Announce a changed portrait now rather than at the next look."""
        self._upkeep.look_again()

    def member(self, node_id: NodeId) -> Member | None:
        """Return the member with a node's certificate, also for this node; None if the certificate is not known.

        Raises:
            NotTrusted: the certificate has expired.
        """
        return self.identity.member if node_id == self.node_id else self.gossip.opener.member(node_id)

    def tensor_addresses_of(self, node_id: NodeId, port: int) -> tuple[str, ...]:
        """Return the addresses of a node's tensor streams. Hosts come only from its card. Loopback is dialled only by a node that is on loopback itself.

        Args:
            port: the port that the node or a caller named. It is ignored for this node, which knows its own.

        Raises:
            NodeUnreachable: the node is not in view.
        """
        live = self.view().get(node_id)
        if live is None:
            raise NodeUnreachable(f"{node_id} is not in this node's view of the fleet")
        if node_id == self.node_id:
            return tensor_addresses(self.addresses, self.tensors.port)
        return tensor_addresses(self.book.order(may_be_dialled(self.addresses, live.card.addresses)), port)

    def eligible(self, use: U_co) -> Eligible[U_co]:
        """Return the nodes that may be put to a use now."""
        return self.trust.eligible(self.view(), use, self.wrong)

    @property
    def wrong(self) -> Collection[NodeId]:
        """Nodes with work that gave another result when it was computed again within the last `WRONG_S`."""
        return self._wrong.now(self._clock.monotonic()).keys()

    def found_wrong(self, node_id: NodeId, why: str) -> None:
        """Give a node no work that decides answers of this node, for `WRONG_S` seconds. Call it on the event loop."""
        logger.error("%s: it computes nothing for this machine for %.0f minutes", why, WRONG_S / 60)
        self._wrong.add(node_id, self._clock.monotonic() + WRONG_S, why)
        asyncio.get_running_loop().call_later(WRONG_S + 0.1, self._look_again, node_id)
        self._look_again(node_id)

    def _look_again(self, node_id: NodeId) -> None:
        """Tell all listeners that a node changed, so that they ask `eligible` again."""
        if (live := self.view().get(node_id)) is not None:
            for listener in self._listeners:
                listener(Changed(live.card))

    def channel(
        self, node_id: NodeId, addresses: Sequence[str], use: Use, purpose: Purpose = Purpose.STREAM, trust: TrustPolicy | None = None
    ) -> grpc.aio.Channel:
        """Return a channel to a node, over the best of its addresses.

        Args:
            use: the use that the node is called for.
            trust: a policy in place of this node's own.

        Raises:
            NotTrusted: the node may not be put to that use, was revoked, or its certificate has expired.
            FleetError: the node's certificate is not known.
        """
        if node_id == self.node_id:
            member = self.identity.member
        else:
            member = self.gossip.opener.proven(node_id)
            (trust or self.trust).check(member, use, self.gossip.voids)
        return self.pool.get(purpose, self.book.order(addresses)[0], member)

    # --------------------------------------------------------------------------------------------------------------- for gossip

    def card(self) -> NodeCard:
        """Return this node's present card, without version and times."""
        return self._portrait.card(self.addresses, self._links.links)

    def news(self, effect: Effect) -> None:
        """Log an effect of gossip, close connections that it ends, and pass it to the listeners."""
        log_news(effect)
        match effect:
            case Restarted(card):
                self.pool.drop(card.node_id)
            case Left(node_id):
                self.pool.drop(node_id)
            case Expired():
                pass  # only its gossip may be late, so its calls go on; those of a machine that is gone end by their keepalive
            case Revoked(node_id, not_after):
                self._guard.revoked(node_id, not_after)
                if self._tensors is not None:
                    self._tensors.cut(node_id, not_after)
                self.pool.drop(node_id, issued_to=not_after)
            case _:
                pass
        view = self.view()
        if (own := view.get(self.node_id)) is not None:
            self._links.see(own.card, view.cards)
        self._upkeep.look_again()
        for listener in self._listeners:
            listener(effect)

    # ------------------------------------------------------------------------------------------------------------------ inside

    def _issuer(self) -> Issuer | None:
        """Return the issuer if the CA is on this machine, else None."""
        return Issuer(self._folder.served_authority(self.identity.root), self._folder, self._clock) if self._folder.has_authority else None

    def _at_issuer(self, node_id: NodeId) -> grpc.aio.Channel:
        """Return a channel to the node with the CA. It is a channel of exchanges, which works even if the known revocations are too old."""
        live = self.view().get(node_id)
        if live is None:
            raise FleetError(f"{node_id}, which has the fleet's CA, is not here")
        return self.pool.get(Purpose.EXCHANGE, self.book.order(live.card.addresses)[0], self.gossip.opener.proven(node_id))

    @property
    def _anew(self) -> str:
        """Hint for the owner of a revoked machine: how to join again."""
        if self._folder.has_authority:
            return (
                "It holds the fleet's CA, and maybe the only copy of its key: first paceline ca export FILE, and paceline ca import FILE on another "
                f"member. Then stop paceline up, remove {self._folder.root}, and paceline join with a new token"
            )
        return f"To join again: stop paceline up, remove {self._folder.root}, then paceline join with a new token"

    def _refused(self, failed: grpc.aio.AioRpcError) -> None:
        """Take the revocation of this node that came with a refusal, if there is one."""
        told, own = revocation_told(failed, self.identity.root), (self.node_id, self.identity.member.issued_at)
        if told is not None and not self.gossip.voids(*own):
            self.gossip.learn((told,))
            if self.gossip.voids(*own):
                logger.error("this machine (%s) was revoked: no member of its fleet answers it any more. %s", self.node_id, self._anew)

    def _measured(self, links: tuple[Link, ...]) -> None:
        self.book.prefer(link.address for link in links)
        self._upkeep.look_again()
