"""Names those whom TLS turned away.

gRPC refuses a handshake inside its core, and tells Python neither that it did nor whom. What Python does learn is that a handshake begins,
which connections a port has at that moment (they are file descriptors of this process), and whose call arrives. A connection that ends
without a call was refused, or left by itself: a member calls as soon as it is connected. Its address goes into the log.
"""

from __future__ import annotations

import asyncio
import time

from paceline.transport.trust.refusals import Refusals
from paceline.transport.trust.sockets import Remote, connections, remote_of

MAX_WATCHED = 1024
LOOKS_A_SECOND = 50
"""Of a flood of connections, not each is named."""


class StrangerWatch:
    """Watches one port. Made and used on the event loop; only `connection` comes from gRPC's threads.

    Args:
        look_s: how often connections without a call are looked at, while there are any.
    """

    def __init__(self, refusals: Refusals, look_s: float = 1.0) -> None:
        self._refusals, self._look_s = refusals, look_s
        self._loop = asyncio.get_running_loop()
        self._port: int | None = None
        self._silent: set[Remote] = set()
        self._known: set[Remote] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._second, self._looks = 0.0, 0

    def watch(self, port: int) -> None:
        """Start, once the port is known."""
        self._port = port

    def connection(self) -> None:
        """A handshake begins. Called in a thread of gRPC's."""
        now = time.monotonic()
        if now - self._second >= 1:
            self._second, self._looks = now, 0
        self._looks += 1
        if self._port is None or self._looks > LOOKS_A_SECOND:
            return
        remotes = connections(self._port)
        try:
            self._loop.call_soon_threadsafe(self._arrived, remotes)
        except RuntimeError:
            return  # the loop has ended: no caller is served any more

    def caller(self, peer: str) -> None:
        """A call came from `peer` (ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5)."""
        remote = remote_of(peer)
        self._silent.discard(remote)
        if len(self._known) < MAX_WATCHED:
            self._known.add(remote)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._port = None

    def _arrived(self, remotes: set[Remote]) -> None:
        for remote in remotes - self._known:
            if len(self._silent) < MAX_WATCHED:
                self._silent.add(remote)
        if self._silent and self._timer is None:
            self._timer = self._loop.call_later(self._look_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._port is None:
            return
        open_now = connections(self._port)
        self._known &= open_now  # not by what was open when a handshake began: a caller since then would be taken for a stranger
        gone = self._silent - open_now
        for host, port in sorted(gone):
            self._silent.discard((host, port))
            self._refusals.note(
                host, "it showed no certificate of this fleet, or left without a call (as a member does that is stopped)", at=f"port {port}"
            )
        if self._silent:
            self._timer = self._loop.call_later(self._look_s, self._look)
