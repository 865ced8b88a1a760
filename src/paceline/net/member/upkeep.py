"""The regular work of a node next to gossip. `Upkeep` watches its addresses and its portrait, keeps the join port, and writes to disk what the next run
needs. `TrustKeeper` watches the age of the known revocations, signs them as complete on the CA's node, and renews the node's certificate.

Law: a step that fails is logged once and tried again, and the other steps go on. Writes to disk run in threads, one at a time. The fleet works without
the CA's node: a person gets a warning when revocations or certificates grow old. Other nodes are refused for it only if a person configured that.
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
from paceline.net.member.state import ENDS_SOON_S, OLD_S
from paceline.net.trust.certificates import join_host, make_request
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import Issuer, renewal_is_due
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.seals import open_kept_list

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the node's addresses and its folder. Raising it: changes are noticed later; lowering it: more reads of the disk."""
PORTRAIT_S = 60.0
"""Seconds between two measurements of this machine for its card. Raising it: other nodes learn of free memory and new models later."""
MOST_ADDRESSES = 16
"""Maximum number of addresses in a card, because machines with containers have dozens of interfaces. Raising it: peers try more dead addresses."""


class OwnPortrait(Protocol):
    """The measurements of a machine, from which its card is made."""

    def look(self) -> bool:
        """Measure the machine, and return True if its card changed. Blocks, so it is called in a thread."""
        ...

    def card(self, addresses: tuple[str, ...], links: tuple[Link, ...]) -> NodeCard:
        """Return the card as of the last look, without blocking."""
        ...


class Upkeep:
    """The upkeep of one node. Call `begin` once the node listens, and `start` once it gossips.

    Args:
        host: address that the node listens on; empty: all addresses of this machine.
        moved: called with the node's addresses when they change.
        look_at_trust: called at each look (`TrustKeeper.look`).
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
        """Addresses (host:port) at which this node can be reached."""
        self._port = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._joining = False
        """True once this node keeps the join port, because the CA is on this machine."""
        self._news = asyncio.Event()
        self._kept: tuple[object, ...] = ()
        self._looked = float("-inf")
        self.troubles: set[str] = set()
        """Messages of the steps that failed at the last look."""

    async def begin(self, port: int) -> None:
        """Find the addresses at which `port` can be reached, and measure the machine."""
        self._port = port
        self._look_at_addresses()
        await self._look_at_portrait()

    def start(self) -> None:
        self._spawn(self._watch, "fleet-watch")

    def look_again(self) -> None:
        """Make the next look happen now rather than within `LOOK_S`."""
        self._news.set()

    async def close(self) -> None:
        """Stop looking. Idempotent."""
        await end_tasks(*self._tasks)

    async def keep(self) -> None:
        """Write to disk what the next run needs: addresses of members, and revocations.

        Raises:
            MembershipError: the folder can't be written.
        """
        view = self._gossip.view()
        members = sorted(address for live in view.nodes if live.card.node_id != view.own for address in live.card.addresses)
        revocations = tuple(sealed.sealed for sealed in self._gossip.revocations)
        if (members, revocations) == self._kept:
            return
        # Without any member in view the old addresses stay, because those members may come back.
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
        """Start to keep the join port once the CA is on this machine."""
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
"""Seconds between two signatures of the CA on the complete revocations. Raising it: other nodes show their age less exactly."""
FIRST_NEWS_S = 60.0
"""Seconds after a start before that warning, so that gossip can bring newer ones. Raising it: the warning comes later."""
TRY_EVERY_S = 600.0
"""Seconds between two attempts to renew the certificate. Raising it: a renewal that failed is made up for later."""


class TrustKeeper:
    """The keeper of one node's revocations and certificate.

    Args:
        issuer: returns the issuer if the CA is on this machine, else None.
        reach: returns a channel to the node with the CA; raises FleetError if it can't be called.
        max_age_s: age of the known revocations in seconds above which other nodes are refused; None: never.
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
        """True while a renewed certificate is not on disk yet."""
        self._has_signed = False
        """True once this node has signed a list in this run. It does so even if another node's list is recent, so that members learn that the CA is here too."""
        self._warned: set[str] = set()
        if (kept := open_kept_list(self._kept, identity.root, clock.wall())) is not None:
            gossip.complete(kept)

    @property
    def revocations_as_of(self) -> int:
        """Unix seconds up to which all revocations are known. It is never before this node's certificate, because a join brings all revocations."""
        said = self._gossip.revocation_list
        return max(said.said.signed_at if said is not None else 0, self._identity.member.issued_at)

    def check_age(self) -> None:
        """Check that the known revocations are recent enough to trust other nodes.

        Raises:
            NotTrusted: they are older than the configured age.
        """
        age_s = self._clock.wall() - self.revocations_as_of
        if self._max_age_s is not None and age_s > self._max_age_s:
            raise NotTrusted(
                f"{self._identity.node_id} got the list of revoked nodes {age_s / 86400:.1f} days ago, and trusts no node if the list is older than "
                f"{self._max_age_s / 86400:g} days",
                "Start paceline up on the machine with the fleet's CA",
                who=self._identity.node_id,
            )

    async def look(self) -> None:
        """Sign the list of revocations, write it to disk, warn, and renew the certificate, each if it is due.

        Raises:
            UserError: a file of this node can't be written.
        """
        issuer, now = self._issuer(), self._clock.wall()
        if issuer is not None:
            await self._sign(issuer, now)
        said = self._gossip.revocation_list
        if said is not None and said.sealed != self._kept:
            await asyncio.to_thread(self._folder.keep_list, said.sealed)
            self._kept = said.sealed
        if now - self.revocations_as_of > OLD_S and self._clock.monotonic() - self._began >= FIRST_NEWS_S:
            self._warn(
                "the list of revoked nodes on this machine is more than 30 days old: start paceline up on the machine with the fleet's CA"
            )
        if self._identity.member.begins_at > now:
            self._warn(
                f"no node can be reached for this machine's clock is wrong, or the CA's was: it says {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} "
                "UTC, and this node's certificate begins after that"
            )
        left_s = self._identity.member.expires_at - now
        if renewal_is_due(self._identity.member, now) and self._clock.monotonic() - self._tried >= TRY_EVERY_S:
            await self._renew(issuer, left_s)
        if self._to_keep:  # tried until it succeeds: a restart would show the old certificate
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
        """Log a warning once per process and kind. The kind leaves out the text that changes from day to day."""
        kind = text.partition(" for ")[0].partition(" ends ")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)
