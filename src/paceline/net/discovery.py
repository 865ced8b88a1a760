"""mDNS: this node tells the network where it is, and hears where others of its fleet are. What is heard is only an address to try.

A network without multicast is no error: `--peer` and the addresses remembered still lead to others.

Under which addresses others may reach this machine, and which of another node's to use: the one that measured best, then those that worked, then
those not tried, then those that failed.

Failures are kept until the address works again, for callers that ask why a node can't be reached.
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
"""Services looked at at once; of a flood of them the rest is not heard. Raising it: what a flood costs."""
MOST_HEARD = 16
"""Addresses of one service that are tried. Raising it: one announcement takes more of the places of others."""
AGAIN_S = 60.0
"""Between attempts where there is no mDNS, as before a network is up. Raising it: a node that started first is found later."""
CLOSE_S = 0.6
"""For the goodbye on the network. What is cut short here expires there by itself."""


class Discovery:
    """One node's part in mDNS, between `start` and `close`.

    Args:
        fleet_id: others are told apart by it.
        host: the address it listens on; empty: all of this machine's.
        found: told host:port where a node of the fleet may be.
        background: starts again what fails in a way that is not known here.
    """

    def __init__(self, fleet_id: str, node_id: NodeId, host: str, found: Callable[[str], None], background: Background) -> None:
        self._fleet_id, self._node_id, self._host, self._found = fleet_id, node_id, host, found
        self._background = background
        self._zeroconf: AsyncZeroconf | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_on = False
        self.trouble = ""
        """Why nodes can't find one another by it from here; empty where they can."""
        self._tasks = TaskSet()
        self._resolving = 0

    def start(self, addresses: Iterable[str]) -> None:
        """Begin, in the background."""
        self._is_on = True
        self.moved(addresses)

    def moved(self, addresses: Iterable[str]) -> None:
        """This machine has other addresses now, maybe on networks that it was not on: sockets are of the addresses that were there when they were made."""
        if self._is_on:
            begin = partial(self._start, tuple(addresses), self._starting)
            self._starting = self._tasks.hold(self._background.keep(begin, "mDNS"))

    async def close(self) -> None:
        """Say goodbye and stop. Bounded; idempotent."""
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
        """Why there is no mDNS here now; empty where there is."""
        from zeroconf import Error, InterfaceChoice, IPVersion, NonUniqueNameException
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        interfaces = [self._host] if self._host else InterfaceChoice.All
        problem: Exception | None = None
        for version in (IPVersion.All, IPVersion.V4Only):
            try:
                self._zeroconf = AsyncZeroconf(interfaces=interfaces, ip_version=version)
                break
            except (OSError, RuntimeError, Error) as error:  # RuntimeError: there is no network card
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
            if not has_ended:  # or was cancelled: its sockets are given back all the same
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
            # A host's name has 63 letters at most, and a node's id may have as many.
            server=f"paceline-{hashlib.sha256(self._node_id.encode()).hexdigest()[:16]}.local.",
        )

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        from zeroconf import ServiceStateChange

        # A node that goes says so by gossip, and a silent one expires there.
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
    """What zeroconf logs of sockets, in our words. A network card over which nothing can be sent is no error: others are found over the rest."""

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
    """Its own lines go nowhere else, for the whole process."""
    theirs = logging.getLogger("zeroconf")
    if not any(isinstance(each, _Reworded) for each in theirs.handlers):
        theirs.addHandler(_Reworded())
        theirs.propagate = False


MAX_FAILURES = 256


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last call to an address failed, and since when none succeeded."""

    address: str
    error: str
    since: float
    """Monotonic seconds."""


class AddressBook:
    def __init__(self) -> None:
        self._failures: dict[str, Failure] = {}
        self._works: dict[str, None] = {}
        self._worked: dict[str, str] = {}
        """Addresses that worked at some time, newest last, and the id of the node that answered there."""
        self._best: set[str] = set()

    def order(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """The likeliest first; otherwise in the order given."""
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
        """Record that a call failed. The error names the node that answered at the address before: its card may be forgotten."""
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
        """These measured best, each for its node."""
        self._best = set(addresses)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Addresses that do not work now, the longest first."""
        return tuple(sorted(self._failures.values(), key=lambda failure: failure.since))

    def keep_to(self, addresses: Collection[str]) -> None:
        """No others than these are called any more."""
        for address in [address for address in self._failures if address not in addresses]:
            del self._failures[address]

    def _rank(self, address: str) -> int:
        if address in self._failures:
            return 3
        return 0 if address in self._best else 1 if address in self._works else 2


def own_interfaces() -> dict[str, str]:
    """Addresses of this machine, and the network card that has each."""
    import ifaddr

    every = [(ip.ip, adapter.nice_name) for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    return {ip if isinstance(ip, str) else ip[0]: printable(name, 40) for ip, name in every}


def own_hosts() -> tuple[str, ...]:
    """Addresses of this machine's interfaces, the likeliest to be reached first; loopback only where there is nothing else."""
    return rank(own_interfaces())


def rank(hosts: Iterable[str]) -> tuple[str, ...]:
    """Sort addresses: private IPv4 first, then other IPv4, IPv6, and last link-local IPv4 (a cable without DHCP), which only neighbours can reach.

    Link-local IPv6 is left out: a caller would have to add the name of its own interface.
    """
    addresses = [ipaddress.ip_address(host) for host in dict.fromkeys(hosts)]
    outside = [one for one in addresses if not one.is_loopback and may_be_reached(one, addresses)]
    kept = outside or [one for one in addresses if one.is_loopback]
    return tuple(str(one) for one in sorted(kept, key=lambda one: (one.is_link_local, one.version, not one.is_private)))
