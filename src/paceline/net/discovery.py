"""mDNS: this node tells the network where it is, and hears where others of its fleet are. What is heard is only an address to try.

A network without multicast is no error: `--peer` and the addresses remembered still lead to others.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from paceline.core.background import in_background
from paceline.core.ids import NodeId
from paceline.core.shown import printable
from paceline.net.trust.addresses import join_host

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

logger = logging.getLogger(__name__)

SERVICE = "_paceline._tcp.local."
RESOLVE_MS = 3000
MOST_RESOLVING = 32
"""Services looked at at once; of a flood of them the rest is not heard. Raising it: what a flood costs."""
CLOSE_S = 0.6
"""For the goodbye on the network. What is cut short here expires there by itself."""


class Discovery:
    """One node's part in mDNS, between `start` and `close`.

    Args:
        fleet_id: others are told apart by it.
        host: the address it listens on; empty: all of this machine's.
        found: told host:port where a node of the fleet may be.
    """

    def __init__(self, fleet_id: str, node_id: NodeId, host: str, found: Callable[[str], None]) -> None:
        self._fleet_id, self._node_id, self._host, self._found = fleet_id, node_id, host, found
        self._zeroconf: AsyncZeroconf | None = None
        self._info: AsyncServiceInfo | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._resolving = 0

    def start(self, addresses: Iterable[str]) -> None:
        """Begin, in the background."""
        self._spawn(self._start(tuple(addresses)))

    def moved(self, addresses: Iterable[str]) -> None:
        """This machine has other addresses now."""
        if self._zeroconf is not None:
            self._spawn(self._move(tuple(addresses)))

    async def close(self) -> None:
        """Say goodbye and stop. Bounded; idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await zeroconf.async_close()
        except (TimeoutError, OSError) as error:
            logger.debug("mDNS ended without a goodbye: %s", error)

    # ------------------------------------------------------------------------------------------------------------------ inside

    async def _start(self, addresses: tuple[str, ...]) -> None:
        from zeroconf import Error, InterfaceChoice, IPVersion, NonUniqueNameException
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        interfaces = [self._host] if self._host else InterfaceChoice.All
        problem: Exception | None = None
        for version in (IPVersion.All, IPVersion.V4Only):
            try:
                self._zeroconf = AsyncZeroconf(interfaces=interfaces, ip_version=version)
                break
            except (OSError, Error) as error:
                problem = error
        else:
            logger.warning("no mDNS on this machine (%s): give other nodes' addresses with --peer", problem)
            return
        try:
            AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._changed])
            self._info = self._service(addresses)
            await (await self._zeroconf.async_register_service(self._info, cooperating_responders=True))
        except NonUniqueNameException:
            logger.warning("another machine is called %s on this network's mDNS", self._node_id)
        except (OSError, Error) as error:
            logger.warning("this node can't be found by mDNS (%s): others reach it by --peer", error)

    async def _move(self, addresses: tuple[str, ...]) -> None:
        from zeroconf import Error

        zeroconf = self._zeroconf
        if zeroconf is None or self._info is None:
            return
        self._info = self._service(addresses)
        try:
            await (await zeroconf.async_update_service(self._info))
        except (OSError, Error) as error:
            logger.debug("mDNS did not take the new addresses: %s", error)

    def _service(self, addresses: tuple[str, ...]) -> AsyncServiceInfo:
        from zeroconf.asyncio import AsyncServiceInfo

        hosts = [address.rpartition(":")[0].strip("[]") for address in addresses]
        port = int(addresses[0].rpartition(":")[2]) if addresses else 0
        return AsyncServiceInfo(
            SERVICE,
            f"{self._node_id}.{SERVICE}",
            addresses=[ipaddress.ip_address(host).packed for host in hosts],
            port=port,
            properties={"fleet": self._fleet_id, "node": self._node_id},
            # A host's name has 63 letters at most, and a node's id may have as many.
            server=f"paceline-{hashlib.sha256(self._node_id.encode()).hexdigest()[:16]}.local.",
        )

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        from zeroconf import ServiceStateChange

        # A node that goes says so by gossip, and a silent one expires there.
        if state_change is not ServiceStateChange.Removed and self._resolving < MOST_RESOLVING:
            self._resolving += 1
            resolving = self._spawn(self._resolve(zeroconf, service_type, name))
            resolving.add_done_callback(self._resolved)

    def _resolved(self, task: asyncio.Task[None]) -> None:
        del task
        self._resolving -= 1

    async def _resolve(self, zeroconf: Zeroconf, service_type: str, name: str) -> None:
        from zeroconf import Error
        from zeroconf.asyncio import AsyncServiceInfo

        try:
            info = AsyncServiceInfo(service_type, name)
            if not await info.async_request(zeroconf, RESOLVE_MS):
                return
        except (OSError, Error) as error:
            logger.debug("%s can't be resolved: %s", printable(name), error)
            return
        said = info.decoded_properties
        if said.get("fleet") != self._fleet_id or said.get("node") == self._node_id or not info.port:
            return
        for host in info.parsed_addresses():
            ip = ipaddress.ip_address(host)
            if not ip.is_link_local and not ip.is_unspecified and not ip.is_multicast:
                self._found(join_host(host, info.port))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = in_background(work, "mDNS")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
