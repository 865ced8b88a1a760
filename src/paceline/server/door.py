"""Accepts a server's connections, and has them shared by those who come.

Law: no more than `max_connections` are open, those of unfinished TLS handshakes among them. Where they are all taken, a newcomer gets the place of a
connection that waits for no answer, of the network that has the most; only a newcomer of that network itself is refused. So a client that holds
them all keeps no other out.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from paceline.server.admission import network_of
from paceline.server.faults import overloaded
from paceline.server.protocol import BoundedProtocol, whole_answer
from paceline.server.settings import ServerSettings

logger = logging.getLogger(__name__)

BUSY_RETRY_S = 2
AGAIN_S = 1.0
"""After the system had no connection to give: this process has too many files open. Raising it: clients wait longer once some are closed."""


class _Guest:
    """One connection."""

    def __init__(self, network: str) -> None:
        self.network = network
        self.opening: asyncio.Task[None] | None = None
        self.protocol: BoundedProtocol | None = None
        """Of whom a transport owns the socket."""
        self.is_open = False
        """Its handshake is over."""

    def hang_up(self) -> None:
        if self.opening is not None and not self.is_open:
            self.opening.cancel()
        elif self.protocol is not None:
            self.protocol.transport.abort()


class Door:
    """Of one listening socket.

    Args:
        make: a protocol for each connection.
        context: None: connections are plain.
    """

    def __init__(
        self, listening: socket.socket, make: Callable[[], BoundedProtocol], bounds: ServerSettings, context: ssl.SSLContext | None
    ) -> None:
        self._listening, self._make, self._bounds, self._context = listening, make, bounds, context
        self._guests: dict[_Guest, None] = {}
        """As they came."""
        self._of_network: Counter[str] = Counter()
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Accept from now on. On the event loop."""
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="accept")

    async def close(self) -> None:
        """Accept no more, and end what is no HTTP yet."""
        tasks = [task for task in (self._accepting, *(guest.opening for guest in self._guests)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError as error:
                logger.warning("no connection could be accepted: %s", error.strerror)
                await asyncio.sleep(AGAIN_S)
                continue
            self._admit(connection, network_of(address[0]))

    def _admit(self, connection: socket.socket, network: str) -> None:
        if len(self._guests) >= self._bounds.max_connections and not self._make_room(network):
            self._refuse(connection)
            return
        guest = _Guest(network)
        self._guests[guest] = None
        self._of_network[network] += 1
        guest.opening = asyncio.create_task(self._open(guest, connection))
        guest.opening.add_done_callback(lambda _: self._opened(guest, connection))

    def _make_room(self, network: str) -> bool:
        """Hang up one of the network that has the most; False where that is the newcomer's own, or all of its are being answered."""
        largest, most = self._of_network.most_common(1)[0]
        if self._of_network[network] >= most:
            return False
        guest = next(
            (guest for guest in self._guests if guest.network == largest and not (guest.protocol and guest.protocol.is_answering)), None
        )
        if guest is None:
            return False
        self._leave(guest)
        guest.hang_up()
        return True

    def _refuse(self, connection: socket.socket) -> None:
        if self._context is None:
            with suppress(OSError):  # it is gone
                connection.send(whole_answer(overloaded("Too many connections. Try again in a moment.", BUSY_RETRY_S)))
        connection.close()

    async def _open(self, guest: _Guest, connection: socket.socket) -> None:
        def made() -> BoundedProtocol:
            guest.protocol = self._make()
            guest.protocol.left = lambda: self._leave(guest)
            return guest.protocol

        timeout_s = None if self._context is None else self._bounds.request_timeout_s
        with suppress(OSError):  # TLS refuses what is no handshake
            await asyncio.get_running_loop().connect_accepted_socket(made, connection, ssl=self._context, ssl_handshake_timeout=timeout_s)
            guest.is_open = True

    def _opened(self, guest: _Guest, connection: socket.socket) -> None:
        if guest.protocol is None:  # told to end before it began
            connection.close()
        if not guest.is_open:
            self._leave(guest)

    def _leave(self, guest: _Guest) -> None:
        """It has no place any more. Idempotent."""
        if guest in self._guests:
            del self._guests[guest]
            self._of_network[guest.network] -= 1
            if not self._of_network[guest.network]:
                del self._of_network[guest.network]
