"""Engines that run on this machine: listeners on loopback at the ports that engines have.

Only ports that have a listener are asked, with nothing but the GET requests that identify an engine. Paceline's own endpoint is left out, and so are servers that
only have OpenAI's API: nothing tells them from a program that is none of Paceline's business.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from paceline.core.errors import EngineGone
from paceline.engines.contract import Door, EngineIdentity
from paceline.engines.table import PORTS, identify

ANSWER_S: Final = 3.0
"""Seconds for each answer. Raising it: a program that listens and does not answer holds up the search for longer."""
_LISTENS: Final = "0A"
"""Linux's name of the state of a socket that listens."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP socket that accepts connections from this machine."""

    host: str
    """The loopback address that reaches it."""
    port: int
    uid: int
    """User id of the socket's owner."""
    is_wild: bool = False
    """It listens on all addresses. One that listens on this address alone comes before it."""

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine that answers on this machine."""

    url: str
    identity: EngineIdentity
    uid: int
    """User id of the process that listens."""

    @property
    def is_of_this_user(self) -> bool:
        return self.uid == os.getuid()


async def find_engines(
    except_ports: Collection[int] = (), ports: Collection[int] = tuple(PORTS), listening: Callable[[], Iterable[Listener]] | None = None
) -> tuple[FoundEngine, ...]:
    """Return the engines on this machine, by port.

    Args:
        except_ports: ports not to ask, such as this process's own.
        ports: ports to look at.
        listening: returns the listeners. None: those of the system.
    """
    sockets = await asyncio.to_thread(lambda: list((listening or listeners)()))
    wanted = {
        port: _answering(same) for port in ports if port not in except_ports and (same := [each for each in sockets if each.port == port])
    }
    found = await asyncio.gather(*(_ask(wanted[port]) for port in sorted(wanted)))
    return tuple(each for each in found if each is not None)


def _answering(same: list[Listener]) -> Listener:
    """Return what may answer at a port that has several listeners. If they are of several users, another user's may be the one that does."""
    found = min(same, key=lambda each: (each.is_wild, each.host))
    uid = next((each.uid for each in same if each.uid != os.getuid()), found.uid)
    return replace(found, uid=uid)


def working_folder(port: int) -> Path | None:
    """Return the working folder of this user's process that listens at a port, in which its relative paths lie. None: no process of this user listens there. Blocks."""
    import psutil

    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid() and any(
                socket.status == psutil.CONN_LISTEN and socket.laddr.port == port for socket in process.net_connections("tcp")
            ):
                return Path(process.cwd())
        except (psutil.Error, OSError):
            continue
    return None


async def _ask(listener: Listener) -> FoundEngine | None:
    from paceline.engines.http import Http
    from paceline.engines.openai import OpenAi
    from paceline.engines.patience import EnginePatience

    door, patience = Door(listener.url), EnginePatience(answer_s=ANSWER_S)
    http = Http(door, "the listener", patience)
    try:
        front = (await http.ask("GET", "/")).json
        if isinstance(front, dict) and front.get("name") == "paceline":
            return None
        engine, identity = await identify(door, patience)
    except EngineGone:
        return None
    finally:
        await http.close()
    await engine.close()
    return None if identity.name == OpenAi.name else FoundEngine(listener.url, identity, listener.uid)


def listeners() -> list[Listener]:
    """Return the sockets that listen on loopback. Where the system hides other users' sockets, those of this user."""
    if sys.platform == "linux":
        return [*_linux(Path("/proc/net/tcp")), *_linux(Path("/proc/net/tcp6"))]
    return [*_own_processes()]


def _linux(table: Path) -> Iterator[Listener]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if fields[3] == _LISTENS:
            address, _, port = fields[1].partition(":")
            host = _reached(_address(address))
            if host is not None:
                yield Listener(host, int(port, 16), int(fields[7]), ip_address(_address(address)).is_unspecified)


def _address(text: str) -> str:
    """Return an address of Linux's table: words of four bytes, each in the order of this machine."""
    words = [bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8)]
    return str(ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)))


def _reached(address: str) -> str | None:
    """Return the loopback address that reaches a socket. None: none does."""
    ip = ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    if mapped is not None:
        ip = mapped
    if ip.is_unspecified:
        return "127.0.0.1"
    return str(ip) if ip.is_loopback else None


def _own_processes() -> Iterator[Listener]:
    import psutil

    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid():
                continue
            sockets = process.net_connections("tcp")
        except psutil.Error:
            continue
        for each in sockets:
            if each.status == psutil.CONN_LISTEN and each.laddr and (host := _reached(each.laddr.ip)) is not None:
                yield Listener(host, each.laddr.port, os.getuid())
