"""What a node is called and where it is, as text: host:port is all that a card or a token says of the latter."""

from __future__ import annotations

import re

NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def is_node_id(text: str) -> bool:
    """Whether `text` may name a node: a host's name in lower case, at most 63 characters, so that it is safe in a log, a file and a certificate."""
    return NODE_ID.fullmatch(text) is not None


MAX_ADDRESS = 255
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([1-9][0-9]{0,4})")


def is_address(text: str) -> bool:
    """Whether `text` is name:port, IPv4:port or [IPv6]:port."""
    match = _ADDRESS.fullmatch(text) if len(text) <= MAX_ADDRESS else None
    return match is not None and int(match[1]) <= 65535


def join_host(host: str, port: int) -> str:
    """An address of a host's name or number."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
