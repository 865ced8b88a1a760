"""Under which addresses others on the network may reach this machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable


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
