"""Uvicorn's HTTP protocol with the bounds it lacks: time for a request to arrive and to be read, header size, connections.

Law: every open connection has a timer, is being answered, or is kept alive on uvicorn's own timer. None of this costs
anything per token: timers are set when a request begins or a socket's buffer fills up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paceline.server.faults import Fault, overloaded
from paceline.server.settings import ServerSettings

try:  # the fast parser where it is installed, else pure Python
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ImportError:
    if TYPE_CHECKING:
        raise
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol

MAX_HEADER_BYTES = 64 << 10
BUSY_RETRY_S = 2


def bounded_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """A protocol class with `settings` built in, as uvicorn makes its protocols itself."""

    class Bounded(BoundedProtocol):
        bounds = settings

    return Bounded


class BoundedProtocol(HttpProtocol):
    """One connection."""

    bounds: ServerSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse the connection that is one too many; give others their time."""
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.bounds.max_connections:
            self._refuse(overloaded("Too many connections. Try again in a moment.", BUSY_RETRY_S))
            return
        self._arriving = self.loop.call_later(self.bounds.request_timeout_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the timers."""
        self._disarm_arriving()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a request that is complete stops the clock, one that has begun starts it."""
        if self.transport.is_closing():
            return
        before = self.cycle
        super().data_received(data)
        cycle = self.cycle
        if cycle is None or (cycle is before and cycle.response_complete):  # pyright: ignore[reportUnnecessaryComparison] - uvicorn's types hide the None
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(Fault(431, "The request's headers are too long", code="headers_too_large"))
                return
        else:
            self._header_bytes = 0
            if not cycle.more_body and not cycle.response_complete:
                self._disarm_arriving()
                return
        if self._arriving is None:
            self._arriving = self.loop.call_later(self.bounds.request_timeout_s, self._too_slow)

    def pause_writing(self) -> None:
        """The client reads slower than its tokens come; it may do so for a while."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.bounds.slow_reader_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It caught up."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Bytes that are not HTTP get their answer in the API's shape too."""
        self._refuse(Fault(400, msg, code="invalid_http"))

    def _too_slow(self) -> None:
        self._arriving = None
        if not self.transport.is_closing():
            self._refuse(Fault(408, f"The request did not arrive within {self.bounds.request_timeout_s:g} s", code="request_timeout"))

    def _disarm_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _refuse(self, fault: Fault) -> None:
        """Answer without the application, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:  # pyright: ignore[reportUnnecessaryComparison]
            body = fault.body()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **fault.headers}
            lines = [f"HTTP/1.1 {fault.status} ", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
            self.transport.write("\r\n".join(lines).encode("ascii") + body)
        self.transport.close()
