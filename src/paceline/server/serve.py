"""Runs an application on a socket until told to stop, and then ends within two seconds, whatever its clients do.

The caller owns signals: uvicorn's handlers are left out, `stop` is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from paceline.core.ports import hold_port, listen_on
from paceline.server.app import service_of
from paceline.server.door import Door
from paceline.server.protocol import BoundedProtocol, bounded_protocol
from paceline.server.settings import ServerSettings, TlsFiles, check_bind

BACKLOG = 2048
GRACE_S = 1
"""For clients to take the end of their streams at a stop."""


def bind(host: str, port: int) -> socket.socket:
    """Take the API's port, as `hold_port` does."""
    return hold_port(host or "0.0.0.0", port, "the API", "--port or --host")  # noqa: S104 - an empty host means all of IPv4


class _Server(uvicorn.Server):
    """Behind a door of ours: uvicorn's bounds no handshake and shares no connections."""

    def __init__(self, config: uvicorn.Config, held: socket.socket, settings: ServerSettings, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._door = Door(held, self._protocol, settings, config.ssl)

    def _protocol(self) -> BoundedProtocol:
        return cast("Any", self.config.http_protocol_class)(self.config, self.server_state, self.lifespan.state)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._door.open()
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._door.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    app: FastAPI,
    host: str,
    held: socket.socket,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None] | None = None,
    tls: TlsFiles | None = None,
) -> None:
    """Serve `app` (made by `create_app`) until `stop` is set.

    Args:
        host: an address of this machine.
        held: what `bind` took there.
        stop: set it on this event loop; every stream then ends with an error event, and `serve` returns in under 2 s.
        on_ready: called with the base URL once requests are accepted.
        tls: serve HTTPS with these; None: plain HTTP.

    Raises:
        ConfigError: the address is open to a network without an API key.
    """
    service = service_of(app)
    settings = service.settings
    check_bind(host, settings.api_key)
    context = None if tls is None else tls.context()
    listen_on(held, BACKLOG)
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host or "0.0.0.0"  # noqa: S104 - shown, not bound
    url = f"{'http' if tls is None else 'https'}://{shown}:{held.getsockname()[1]}"
    config = uvicorn.Config(
        app,
        http=bounded_protocol(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",  # what clients do wrong is told to them: a terminal is no place for it
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # else who asks from this machine could say that it asks from elsewhere
        backlog=BACKLOG,
        timeout_keep_alive=int(settings.idle_timeout_s),
        timeout_graceful_shutdown=GRACE_S,
    )
    config.load()
    config.ssl = context
    server = _Server(config, held, settings, lambda: on_ready(url) if on_ready is not None else None)

    async def end() -> None:
        await stop.wait()
        service.stop()
        server.should_exit = True

    ending = asyncio.create_task(end())
    try:
        await server.serve(sockets=[])
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # a client that does not read would hold it open
        held.close()
