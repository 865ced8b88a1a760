"""Addresses of the home network."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

HOME: Final[tuple[IPv4Network | IPv6Network, ...]] = tuple(
    map(ip_network, ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "::1/128", "fc00::/7", "fe80::/10"))
)
"""Networks that no router passes on to the internet: private ones, those of a cable between two machines, and this machine."""
METADATA: Final = ip_address("169.254.169.254")
"""Address at which clouds give keys to machines. No engine has it."""


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address means this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def are_at_home(addresses: Iterable[str]) -> bool:
    """Return whether there are addresses, and all are in the home network."""
    found = [_plain(address) for address in addresses]
    return bool(found) and all(any(one in network for network in HOME) and one != METADATA for one in found)


def is_at_home(host: str) -> bool:
    """Return whether all addresses of a host are in the home network. Blocks. A name that means nothing now may mean anything later, so it is not."""
    try:
        return are_at_home(str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, ValueError):
        return False


def _plain(address: str) -> IPv4Address | IPv6Address:
    found = ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found
