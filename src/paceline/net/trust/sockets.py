"""This process's connections, seen past gRPC, which keeps them to itself: they are file descriptors like any other."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Generator
from urllib.parse import unquote

Remote = tuple[str, int]
"""The far end of a connection: host and port."""


def remote_of(peer: str) -> Remote:
    """The far end that gRPC calls ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return _plain(host.strip("[]")), int(port) if port.isdigit() else 0


def connections(port: int) -> set[Remote]:
    """The far ends of the connections to a port that this process serves."""
    found: set[Remote] = set()
    for end in _sockets():
        try:
            if end.getsockname()[1] == port:
                host, remote = end.getpeername()[:2]
                found.add((_plain(host), remote))
        except OSError:
            continue  # listening, or closed meanwhile
    return found


def hang_up(remotes: Collection[Remote]) -> None:
    """End the connections from `remotes`, whatever is still on its way."""
    if not remotes:
        return
    for end in _sockets():
        try:
            host, port = end.getpeername()[:2]
            if (_plain(host), port) in remotes:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # listening, or closed meanwhile


def _sockets() -> Generator[socket.socket]:
    """Every internet socket of this process, each for the time of one step only. A copy, so that a number given to another file can't mislead."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - numbers are wanted, not paths
        try:
            copy = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            end = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)  # no socket
            continue
        with end:
            if end.family in {socket.AF_INET, socket.AF_INET6}:
                yield end


def _plain(host: str) -> str:
    return host.partition("%")[0].removeprefix("::ffff:")
