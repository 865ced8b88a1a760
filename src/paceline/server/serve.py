"""Runs an application on a socket until told to stop, and then ends within two seconds, whatever its clients do.

The caller owns signals: uvicorn's handlers are left out, `stop` is an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Generator

import uvicorn
from fastapi import FastAPI

from paceline.core.errors import ConfigError
from paceline.server.app import service_of
from paceline.server.protocol import bounded_protocol
from paceline.server.settings import TlsFiles, check_bind

BACKLOG = 2048
GRACE_S = 1
"""For clients to take the end of their streams at a stop."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket's address, taken (port 0: any free one).

    Raises:
        ConfigError: the address is taken, not this machine's, or not permitted.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"Cannot listen on {host}: {error.strerror or error}", "Use an address of this machine.") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        hint = (
            "Stop what listens there, or choose another --port." if error.errno == errno.EADDRINUSE else "Choose another --host or --port."
        )
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror}", hint) from error
    return bound


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    app: FastAPI,
    host: str,
    port: int,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[str], None] | None = None,
    tls: TlsFiles | None = None,
) -> None:
    """Serve `app` (made by `create_app`) until `stop` is set.

    Args:
        host: an address of this machine.
        port: 0 for any free one.
        stop: set it on this event loop; every stream then ends with an error event, and `serve` returns in under 2 s.
        on_ready: called with the base URL once requests are accepted.
        tls: serve HTTPS with these; None: plain HTTP.

    Raises:
        ConfigError: the address can't be used, or is open to a network without an API key.
    """
    service = service_of(app)
    settings = service.settings
    check_bind(host, settings.api_key)
    context = None if tls is None else tls.context()
    listening = bind(host, port)
    shown = f"[{host}]" if ":" in host and not host.startswith("[") else host or "0.0.0.0"  # noqa: S104 - shown, not bound
    url = f"{'http' if tls is None else 'https'}://{shown}:{listening.getsockname()[1]}"
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
    server = _Server(config, lambda: on_ready(url) if on_ready is not None else None)

    async def end() -> None:
        await stop.wait()
        service.stop()
        server.should_exit = True

    ending = asyncio.create_task(end())
    try:
        await server.serve(sockets=[listening])
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # a client that does not read would hold it open
        listening.close()
