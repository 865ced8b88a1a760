"""Under which addresses others may reach this machine, and which of another node's to use: the one that measured best, then those that worked, then
those not tried, then those that failed.

Failures are kept until the address works again, for callers that ask why a node can't be reached.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paceline.core.shown import printable

MAX_FAILURES = 256


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last call to an address failed, and since when none succeeded."""

    address: str
    error: str
    since: float
    """Monotonic seconds."""


class AddressBook:
    """What calls learned of addresses."""

    def __init__(self) -> None:
        self._failures: dict[str, Failure] = {}
        self._works: dict[str, None] = {}
        self._best: set[str] = set()

    def order(self, addresses: Iterable[str]) -> tuple[str, ...]:
        """The likeliest first; otherwise in the order given."""
        return tuple(sorted(dict.fromkeys(addresses), key=self._rank))

    def worked(self, address: str) -> None:
        """A call to it succeeded."""
        self._failures.pop(address, None)
        self._works[address] = None
        if len(self._works) > MAX_FAILURES:
            del self._works[next(iter(self._works))]

    def failed(self, address: str, error: str, now: float) -> None:
        """A call to it failed."""
        before = self._failures.pop(address, None)
        self._works.pop(address, None)
        self._failures[address] = Failure(address, printable(error, 500), now if before is None else before.since)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def is_failing(self, address: str) -> bool:
        """Whether the last call to it failed."""
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


def own_hosts() -> tuple[str, ...]:
    """Addresses of this machine's interfaces, the likeliest to be reached first; loopback only where there is nothing else."""
    import ifaddr

    every = [ip.ip for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    return rank(ip if isinstance(ip, str) else ip[0] for ip in every)


def rank(hosts: Iterable[str]) -> tuple[str, ...]:
    """Private IPv4 first, then other IPv4, then IPv6. Link-local ones are left out: they need the name of the caller's own interface."""
    addresses = [ipaddress.ip_address(host) for host in dict.fromkeys(hosts)]
    outside = [one for one in addresses if not one.is_loopback and not one.is_link_local and not one.is_unspecified]
    kept = outside or [one for one in addresses if one.is_loopback]
    return tuple(str(one) for one in sorted(kept, key=lambda one: (one.version, not one.is_private)))
