"""What a node notices beside gossip, and what it keeps: its addresses, its portrait, its join port, whom a next run calls; and its trust: the age of
what it knows of revocations, the CA's word on that, and its certificate, which it renews.

Law: a step that fails is a person's to mend. It is told once and tried again, and the others go on. What gossip learns goes to disk in
threads, one write at a time. The fleet works without the CA's node: what grows old is shown and warned of; only where a person asked for it are others
refused by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Protocol

import grpc.aio

from paceline.core.background import Background, came_within, end_tasks
from paceline.core.clock import Clock
from paceline.core.errors import FleetError, NotTrusted, UserError
from paceline.core.ids import NodeId
from paceline.fleet.card import Link, NodeCard
from paceline.net.discovery import own_hosts
from paceline.net.join_client import ask_to_renew
from paceline.net.join_host import JoinHost
from paceline.net.member.gossip import GossipDriver
from paceline.net.trust.certificates import join_host, make_request
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import Issuer, renewal_is_due
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.seals import open_kept_list

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often a node looks whether its addresses or its folder have changed."""
PORTRAIT_S = 60.0
"""How often it measures itself anew. Raising it: free memory and new models are known later."""
MOST_ADDRESSES = 16
"""Machines with containers have dozens of interfaces; a card lists so many."""


class OwnPortrait(Protocol):
    """What a machine says of itself, measured."""

    def look(self) -> bool:
        """Measure. Blocks: it is called in a thread. True where the card changed."""
        ...

    def card(self, addresses: tuple[str, ...], links: tuple[Link, ...]) -> NodeCard:
        """As of the last look, at once."""
        ...


class Upkeep:
    """Of one node: `begin` once it listens, `start` once it gossips.

    Args:
        host: the address it listens at; empty: all of this machine's.
        moved: told its addresses when they change.
        look_at_trust: called as often as the rest (`TrustKeeper.look`).
    """

    def __init__(
        self,
        host: str,
        folder: FleetFolder,
        portrait: OwnPortrait,
        gossip: GossipDriver,
        refusals: Refusals,
        clock: Clock,
        background: Background,
        moved: Callable[[tuple[str, ...]], None],
        look_at_trust: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._host, self._folder, self._portrait, self._gossip = host, folder, portrait, gossip
        self._refusals, self._clock, self._background, self._moved = refusals, clock, background, moved
        self._look_at_trust = look_at_trust
        self.addresses: tuple[str, ...] = ()
        """Where this node can be reached."""
        self._port = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._joining = False
        """The join port is open, or waited for: the CA is on this machine."""
        self._news = asyncio.Event()
        self._kept: tuple[object, ...] = ()
        self._looked = float("-inf")
        self.troubles: set[str] = set()
        """What could not be done at the last look."""

    async def begin(self, port: int) -> None:
        """Find the addresses at which `port` can be reached, and measure."""
        self._port = port
        self._look_at_addresses()
        await self._look_at_portrait()

    def start(self) -> None:
        self._spawn(self._watch, "fleet-watch")

    def look_again(self) -> None:
        """Now rather than in a second."""
        self._news.set()

    async def close(self) -> None:
        """Stop looking. Idempotent."""
        await end_tasks(*self._tasks)

    async def keep(self) -> None:
        """Write what a next run needs: whom to call, and who is revoked.

        Raises:
            MembershipError: the folder can't be written.
        """
        view = self._gossip.view()
        members = sorted(address for live in view.nodes if live.card.node_id != view.own for address in live.card.addresses)
        revocations = tuple(sealed.sealed for sealed in self._gossip.revocations)
        if (members, revocations) == self._kept:
            return
        # Members that are all gone may be back: an address book is never emptied.
        if members:
            await asyncio.to_thread(self._folder.keep_peers, members)
        await asyncio.to_thread(self._folder.keep_revocations, revocations)
        self._kept = (members, revocations)

    async def _watch(self) -> None:
        while True:
            await came_within(self._news, LOOK_S)
            self._news.clear()
            troubles: set[str] = set()
            for step in (self.keep, self._keep_join_port, self._look_at_trust, self._look_around, self._gossip.refresh):
                try:
                    await step()
                except (UserError, FleetError, OSError) as error:
                    troubles.add(str(error))
            for trouble in sorted(troubles - self.troubles):
                logger.warning("this node goes on, but: %s", trouble)
            self.troubles = troubles

    async def _keep_join_port(self) -> None:
        """From when the CA is on this machine."""
        if self._joining or not self._folder.has_authority:
            return
        self._joining = True
        port = JoinHost(
            self._folder,
            self._clock,
            self._refusals,
            peers=lambda: (*self.addresses, *self._folder.peers()),
            host=self._host,
            on_revocations=self._gossip.learn,
            here=lambda: self._gossip.view().ids,
        )
        self._spawn(port.run, "fleet-join-port")

    async def _look_around(self) -> None:
        if self._clock.monotonic() - self._looked >= PORTRAIT_S:
            await self._look_at_portrait()
        self._look_at_addresses()

    async def _look_at_portrait(self) -> None:
        self._looked = self._clock.monotonic()
        await asyncio.to_thread(self._portrait.look)

    def _look_at_addresses(self) -> None:
        hosts = (self._host,) if self._host else own_hosts()[:MOST_ADDRESSES]
        addresses = tuple(join_host(host, self._port) for host in hosts)
        if self.addresses != addresses:
            if self.addresses:
                logger.info("this machine is now at %s", ", ".join(addresses))
            self._moved(addresses)
        self.addresses = addresses

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._tasks.append(self._background.keep(work, name))


SIGN_EVERY_S = 3600.0
"""How often the CA says that the revocations are all. Raising it: what others show as their age is coarser."""
OLD_S = 30 * 86400.0
"""An age of which a person is warned."""
FIRST_NEWS_S = 60.0
"""After a start, until it is said that none came."""
TRY_EVERY_S = 600.0
"""Between attempts to renew."""
ENDS_SOON_S = 60 * 86400.0


class TrustKeeper:
    """Of one node.

    Args:
        issuer: the CA at work, where it is on this machine.
        reach: calls the node with the CA; raises FleetError where it can't be called.
        max_age_s: refuse others where what is known of revocations is older; None: never.
    """

    def __init__(
        self,
        identity: Identity,
        folder: FleetFolder,
        gossip: GossipDriver,
        clock: Clock,
        issuer: Callable[[], Issuer | None],
        reach: Callable[[NodeId], grpc.aio.Channel],
        max_age_s: float | None,
    ) -> None:
        self._identity, self._folder, self._gossip, self._clock = identity, folder, gossip, clock
        self._issuer, self._reach, self._max_age_s = issuer, reach, max_age_s
        self._began, self._tried = clock.monotonic(), float("-inf")
        self._kept = folder.sealed_list()
        self._to_keep = False
        """The certificate was renewed, and is not on disk yet."""
        self._has_signed = False
        """Once, though another node's word is new: this one has the CA now, too."""
        self._warned: set[str] = set()
        if (kept := open_kept_list(self._kept, identity.root, clock.wall())) is not None:
            gossip.complete(kept)

    @property
    def revocations_as_of(self) -> int:
        """Unix seconds: all revocations from before then are known. Those who join are told them, so it is not before that."""
        said = self._gossip.revocation_list
        return max(said.said.signed_at if said is not None else 0, self._identity.member.issued_at)

    def check_age(self) -> None:
        """That what is known of revocations is new enough to trust others by.

        Raises:
            NotTrusted: it is older than a person said.
        """
        age_s = self._clock.wall() - self.revocations_as_of
        if self._max_age_s is not None and age_s > self._max_age_s:
            raise NotTrusted(
                f"{self._identity.node_id} last heard {age_s / 86400:.1f} days ago who was revoked, and trusts no node for longer than "
                f"{self._max_age_s / 86400:g} days by that",
                "Start paceline up on the machine with the fleet's CA",
                who=self._identity.node_id,
            )

    async def look(self) -> None:
        """Sign, keep, warn and renew what is due.

        Raises:
            UserError: something can't be written here.
        """
        issuer, now = self._issuer(), self._clock.wall()
        if issuer is not None:
            await self._sign(issuer, now)
        said = self._gossip.revocation_list
        if said is not None and said.sealed != self._kept:
            await asyncio.to_thread(self._folder.keep_list, said.sealed)
            self._kept = said.sealed
        if now - self.revocations_as_of > OLD_S and self._clock.monotonic() - self._began >= FIRST_NEWS_S:
            self._warn("this node has not heard for 30 days who was revoked: start paceline up on the machine with the fleet's CA")
        if self._identity.member.begins_at > now:
            self._warn(
                f"no node can be reached for this machine's clock is wrong, or the CA's was: it says {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} "
                "UTC, and this node's certificate begins after that"
            )
        left_s = self._identity.member.expires_at - now
        if renewal_is_due(self._identity.member, now) and self._clock.monotonic() - self._tried >= TRY_EVERY_S:
            await self._renew(issuer, left_s)
        if self._to_keep:  # until it is there: without it a restart would show the one before
            await asyncio.to_thread(self._folder.write_secret, self._folder.identity_file, self._identity.to_pem())
            self._to_keep = False

    async def _sign(self, issuer: Issuer, now: float) -> None:
        said, digest = self._gossip.revocation_list, self._gossip.revocations_digest
        if said is None or said.said.digest != digest or not self._has_signed or now - said.said.signed_at >= SIGN_EVERY_S:
            self._gossip.complete(await asyncio.to_thread(issuer.sign_list, digest, self._identity.node_id))
            self._has_signed = True

    async def _renew(self, issuer: Issuer | None, left_s: float) -> None:
        try:
            certificate = await self._ask(issuer)
            self._identity.renewed(certificate, self._clock.wall())
        except FleetError as error:
            if left_s < ENDS_SOON_S:
                self._warn(
                    f"this node's certificate ends in {left_s // 86400:.0f} days and was not renewed ({error.message}): "
                    "start paceline up on the machine with the fleet's CA"
                )
            return
        self._to_keep = True
        await self._gossip.reseal()
        logger.info("this node's certificate was renewed")

    async def _ask(self, issuer: Issuer | None) -> bytes:
        said = self._gossip.revocation_list
        if issuer is not None:
            self._tried = self._clock.monotonic()
            request = await asyncio.to_thread(make_request, self._identity.key, self._identity.node_id)
            return await asyncio.to_thread(issuer.renew, request, self._identity.member)
        if said is None:
            raise FleetError("no member has told yet which machine has the fleet's CA")
        channel = self._reach(said.said.issuer)
        self._tried = self._clock.monotonic()
        return await ask_to_renew(channel, self._identity, said.said.issuer)

    def _warn(self, text: str) -> None:
        """Once a process: what is said changes with each day."""
        kind = text.partition(" for ")[0].partition(" ends ")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)
