"""Ports of this machine that are reserved before they are served. Until then connections are refused, and no other program can take the port.

On Linux a bound socket that does not listen does not keep out a program that sets SO_REUSEADDR, as all servers do. So the socket listens for a moment, which
fails where another program listens, and then clears its own SO_REUSEADDR.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import sys
from typing import Any, Final

from paceline.core.errors import ConfigError

_SERVED: Final = range(20_000, 32_000)
"""Ports that no system gives to outgoing connections: Linux's begin at 32768, those of other systems at 49152."""
_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT}


def hold_port(host: str, port: int, purpose: str, options: str) -> socket.socket:
    """Reserve a port: return a bound socket for `listen_on`, or for the server to close when it listens itself.

    Args:
        host: a name or an address of this machine; empty: all of its addresses, IPv4 and IPv6.
        port: 0 for any free one.
        purpose: the use of the port, for messages.
        options: options of `paceline up` that choose another port, for messages.

    Raises:
        ConfigError: the port is taken or not permitted, or the address is not this machine's.
    """
    try:
        return _everywhere(port) if not host else _at(host, port)
    except OSError as error:
        shown = f"[{host}]" if ":" in host else host or "*"
        hint = f"Choose another {options}."
        if error.errno == errno.EADDRINUSE:
            look = f"ss -ltnp 'sport = :{port}'" if sys.platform == "linux" else f"lsof -nP -iTCP:{port} -sTCP:LISTEN"
            hint = f"This says which program has it: {look}. Stop that one, or choose another {options}."
        raise ConfigError(f"Cannot listen on {shown}:{port} for {purpose}: {error.strerror or error}", hint) from error


def find_port(host: str) -> int:
    """Return a port that nothing listens on, for another process to take. Unlike a port bound as 0, no outgoing connection can take it meanwhile.

    Raises:
        ConfigError: no port is free, or `host` is not this machine's.
    """
    for port in random.sample(_SERVED, k=100):
        with contextlib.suppress(OSError), _at(host, port):
            return port
    raise ConfigError(f"No free port of {host} was found from {_SERVED.start} to {_SERVED.stop - 1}", "Is it an address of this machine?")


def listen_on(held: socket.socket, backlog: int) -> None:
    """Let a reserved port accept connections."""
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.listen(backlog)


def _everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return _held(socket.AF_INET6, ("::", port), dual=True)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return _held(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104 - an empty host means all


def _at(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return _held(family, address)


def _held(family: socket.AddressFamily, address: tuple[Any, ...], *, dual: bool = False) -> socket.socket:
    with contextlib.ExitStack() as undo:
        held = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        if dual:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
        if sys.platform == "linux":
            if address[1]:  # a port chosen by the system would be released
                held.listen()
                held.shutdown(socket.SHUT_RDWR)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        undo.pop_all()
    return held
