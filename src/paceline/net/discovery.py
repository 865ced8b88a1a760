"""mDNS and the addresses of nodes. This node announces its address on the network and hears the addresses of other nodes of its fleet. A heard address
is only one to try.

A network without multicast is not an error: `--peer` and the remembered addresses still lead to other nodes.

`AddressBook` orders a node's addresses: the one that measured best, then those that worked, then untried ones, then those that failed. A failure is
kept until the address works again, so that callers can report why a node can't be reached.

The last functions list the addresses at which others may reach this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.background import Background, TaskSet, end_tasks, in_background
from paceline.core.ids import NodeId
from paceline.core.text import printable
from paceline.fleet.links import may_be_dialled, may_be_reached
from paceline.net.trust.certificates import join_host

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf


logger = logging.getLogger(__name__)

SERVICE = "_paceline._tcp.local."
RESOLVE_MS = 3000
MOST_RESOLVING = 32
"""Services that are resolved at the same time; further announcements are ignored meanwhile. Raising it: a flood of announcements costs more; lowering
it: more nodes wait for their next announcement."""
MOST_HEARD = 16
"""Addresses of one service that are tried. Raising it: one announcement takes more of the places of others; lowering it: a node with many addresses may
not be reached."""
AGAIN_S = 60.0
"""Seconds between two attempts to start mDNS, for instance before a network is up. Raising it: a node that started first is found later."""
CLOSE_S = 0.6
"""Seconds for the goodbye on the network. Raising it: a stop may take longer; lowering it: more goodbyes are cut short, and other nodes forget this one
only when the announcement expires."""


class Discovery:
    """One node's part in mDNS, between `start` and `close`.

    Args:
        fleet_id: announced; services of other fleets are ignored.
        host: the address that this node listens on; empty: all of this machine's.
        found: called with host:port where a node of the fleet may be.
        background: restarts a task that fails unexpectedly.
    """

    def __init__(self, fleet_id: str, node_id: NodeId, host: str, found: Callable[[str], None], background: Background) -> None:
        self._fleet_id, self._node_id, self._host, self._found = fleet_id, node_id, host, found
        self._background = background
        self._zeroconf: AsyncZeroconf | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_on = False
        self.trouble = ""
        """Reason why nodes can't find one another by mDNS from here; empty if they can."""
        self._tasks = TaskSet()
        self._resolving = 0

    def start(self, addresses: Iterable[str]) -> None:
        """Start mDNS in the background.

        Args:
            addresses: host:port of this node, to announce.
        """
        self._is_on = True
        self.moved(addresses)

    def moved(self, addresses: Iterable[str]) -> None:
        """Restart mDNS with new addresses of this machine. Old sockets are bound to the addresses that existed when they were made."""
        if self._is_on:
            begin = partial(self._start, tuple(addresses), self._starting)
            self._starting = self._tasks.hold(self._background.keep(begin, "mDNS"))

    async def close(self) -> None:
        """Send the goodbye and stop, within a bounded time. Idempotent."""
        self._is_on = False
        await end_tasks(*self._tasks)
        await self._leave()

    # ------------------------------------------------------------------------------------------------------------------ inside

    async def _start(self, addresses: tuple[str, ...], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await end_tasks(before)
        await self._leave()
        _hear_zeroconf()
        while trouble := await self._join(addresses):
            if trouble != self.trouble:
                logger.warning("%s", trouble)
            self.trouble = trouble
            await asyncio.sleep(AGAIN_S)
            await self._leave()
        self.trouble = ""

    async def _join(self, addresses: tuple[str, ...]) -> str:
        """Start mDNS. Returns: why it does not work now; empty if it works."""
        from zeroconf import Error, InterfaceChoice, IPVersion, NonUniqueNameException
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        interfaces = [self._host] if self._host else InterfaceChoice.All
        problem: Exception | None = None
        for version in (IPVersion.All, IPVersion.V4Only):
            try:
                self._zeroconf = AsyncZeroconf(interfaces=interfaces, ip_version=version)
                break
            except (OSError, RuntimeError, Error) as error:  # RuntimeError: the machine has no network card
                problem = error
        else:
            return f"no mDNS on this machine ({printable(str(problem))}): give other nodes' addresses with --peer"
        try:
            AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self._changed])
            service = self._service(addresses)
            await (await self._zeroconf.async_register_service(service, cooperating_responders=True))
        except NonUniqueNameException:
            return f"another machine is called {self._node_id} on this network's mDNS"
        except (OSError, Error) as error:
            return f"this node can't be found by mDNS ({printable(str(error))}): others reach it by --peer"
        return ""

    async def _leave(self) -> None:
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is None:
            return
        has_ended = False
        try:
            async with asyncio.timeout(CLOSE_S):
                await zeroconf.async_close()
            has_ended = True
        except (TimeoutError, OSError) as error:
            logger.debug("mDNS ended without a goodbye: %s", printable(str(error)))
        finally:
            if not has_ended:  # also after a cancellation: its sockets must be closed
                zeroconf.zeroconf.close()

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
            # A host name has at most 63 letters, and a node's id may have as many.
            server=f"paceline-{hashlib.sha256(self._node_id.encode()).hexdigest()[:16]}.local.",
        )

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        from zeroconf import ServiceStateChange

        # A node that leaves announces it by gossip, and gossip expires a silent one.
        if state_change is not ServiceStateChange.Removed and self._resolving < MOST_RESOLVING:
            self._resolving += 1
            resolving = self._tasks.hold(in_background(self._resolve(zeroconf, service_type, name), "mDNS"))
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
            logger.debug("%s can't be resolved: %s", printable(name), printable(str(error)))
            return
        said = info.decoded_properties
        if said.get("fleet") != self._fleet_id or said.get("node") == self._node_id or not info.port:
            return
        hosts = [self._host] if self._host else own_hosts()
        own = [ipaddress.ip_address(each) for each in own_hosts()]
        heard = [join_host(host, info.port) for host in info.parsed_addresses() if may_be_reached(ipaddress.ip_address(host), own)]
        for address in may_be_dialled([join_host(host, info.port) for host in hosts], heard)[:MOST_HEARD]:
            self._found(address)


class _Reworded(logging.Handler):
    """Handler that rewords zeroconf's log lines about sockets. A network card that can't send is not an error: nodes are found over the others."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            logger.info(
                "mDNS does not work on all networks of this machine (%s): give nodes there with --peer", printable(record.getMessage())
            )


def _hear_zeroconf() -> None:
    """Send zeroconf's log lines only to `_Reworded`, in the whole process."""
    theirs = logging.getLogger("zeroconf")
    if not any(isinstance(each, _Reworded) for each in theirs.handlers):
        theirs.addHandler(_Reworded())
        theirs.propagate = False


MAX_FAILURES = 256


@dataclass(frozen=True, slots=True)
class Failure:
    """Last error of an address that does not work, and the time since when no call succeeded."""

    address: str
    error: str
    since: float
    """Monotonic seconds of the first failure since the last success."""


class AddressBook:
    def __init__(self) -> None:
        self._failures: dict[str, Failure] = {}
        self._works: dict[str, None] = {}
        self._worked: dict[str, str] = {}
        """Addresses that ever worked, newest last, with the id of the node that answered there."""
        self._best: set[str] = set()

    def order(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """Sort addresses, the likeliest to work first; otherwise in the order given."""
        return tuple(sorted(dict.fromkeys(addresses), key=self._rank))

    def worked(self, address: str, node_id: str) -> None:
        """Record that a node answered at an address."""
        self._failures.pop(address, None)
        for known in (self._works, self._worked):
            known.pop(address, None)
            if len(known) >= MAX_FAILURES:
                del known[next(iter(known))]
        self._works[address], self._worked[address] = None, node_id

    def failed(self, address: str, error: str, now: float) -> None:
        """Record that a call failed. Add to the error the node that answered there before, since its card may be forgotten."""
        if (node_id := self._worked.get(address)) and node_id not in error:
            error = f"{node_id} was there: {error}"
        before = self._failures.pop(address, None)
        self._works.pop(address, None)
        self._failures[address] = Failure(address, printable(error, 500), now if before is None else before.since)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def has_worked(self, address: str) -> bool:
        return address in self._worked

    def is_failing(self, address: str) -> bool:
        return address in self._failures

    def prefer(self, addresses: Iterable[str]) -> None:
        """Set the addresses that measured best, one for each node."""
        self._best = set(addresses)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Addresses that do not work now, longest failing first."""
        return tuple(sorted(self._failures.values(), key=lambda failure: failure.since))

    def keep_to(self, addresses: Collection[str]) -> None:
        """Drop the failures of all addresses except these, which are the only ones still called."""
        for address in [address for address in self._failures if address not in addresses]:
            del self._failures[address]

    def _rank(self, address: str) -> int:
        if address in self._failures:
            return 3
        return 0 if address in self._best else 1 if address in self._works else 2


def own_interfaces() -> dict[str, str]:
    """Return the addresses of this machine, each with the name of its network card."""
    import ifaddr

    every = [(ip.ip, adapter.nice_name) for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    return {ip if isinstance(ip, str) else ip[0]: printable(name, 40) for ip, name in every}


def own_hosts() -> tuple[str, ...]:
    """Return the addresses of this machine's interfaces, the likeliest to be reached first. Loopback is included only where nothing else exists."""
    return rank(own_interfaces())


def rank(hosts: Iterable[str]) -> tuple[str, ...]:
    """Sort addresses: private IPv4 first, then other IPv4, IPv6, and last link-local IPv4 (a cable without DHCP), which only neighbours can reach.

    Link-local IPv6 is left out: a caller would have to add the name of its own interface.
    """
    addresses = [ipaddress.ip_address(host) for host in dict.fromkeys(hosts)]
    outside = [one for one in addresses if not one.is_loopback and may_be_reached(one, addresses)]
    kept = outside or [one for one in addresses if one.is_loopback]
    return tuple(str(one) for one in sorted(kept, key=lambda one: (one.is_link_local, one.version, not one.is_private)))
