"""What a node notices beside gossip, and what it keeps: its addresses, its portrait, its join port, and whom a next run calls.

Law: a step that fails is a person's to mend. It is told once and tried again, and the others go on. What gossip learns goes to disk in
threads, one write at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from paceline.core.background import Background
from paceline.core.clock import Clock
from paceline.core.errors import FleetError, UserError
from paceline.fleet.card import Link, NodeCard
from paceline.net.discovery import own_hosts
from paceline.net.join_host import JoinHost
from paceline.net.member.gossip import GossipDriver
from paceline.net.trust.certificates import join_host
from paceline.net.trust.connections import Refusals
from paceline.net.trust.folder import FleetFolder

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

    async def begin(self, port: int) -> None:
        """Find the addresses at which `port` can be reached, and measure."""
        self._port = port
        self._look_at_addresses()
        await self._look_at_portrait()

    def start(self) -> None:
        """Look again and again."""
        self._spawn(self._watch, "fleet-watch")

    def look_again(self) -> None:
        """Now rather than in a second."""
        self._news.set()

    async def close(self) -> None:
        """Stop looking. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        told: set[str] = set()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            self._news.clear()
            troubles: set[str] = set()
            for step in (self.keep, self._keep_join_port, self._look_at_trust, self._look_around, self._gossip.refresh):
                try:
                    await step()
                except (UserError, FleetError, OSError) as error:
                    troubles.add(str(error))
            for trouble in sorted(troubles - told):
                logger.warning("this node goes on, but: %s", trouble)
            told = troubles

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
        if self.addresses not in {(), addresses}:
            logger.info("this machine is now at %s", ", ".join(addresses))
            self._moved(addresses)
        self.addresses = addresses

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._tasks.append(self._background.keep(work, name))
