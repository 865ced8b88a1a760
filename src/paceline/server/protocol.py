"""Uvicorn's HTTP protocol with the bounds it lacks: time for a request to arrive and to be read, and bytes beside its body.

Laws: every open connection has a timer, is being answered, or is kept alive on uvicorn's own timer. A connection is read while its
request is answered too, so that its end is noticed at once; what comes early waits, and little of it may. None of this costs
anything per token: timers are set when a request begins or a socket's buffer fills up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from paceline.server.faults import STOPPING, Fault, overloaded
from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

MAX_HEADER_BYTES = 64 << 10
"""Maximum bytes of one request outside its body. Also the limit for bytes that arrive while an earlier request is answered."""
LAST_REQUEST_S = 0.2
"""How long an idle connection is read once the server stops. Raising it: clients far away get an answer, and a stop takes longer."""
MOST_QUEUED = 64
"""Requests of one connection that wait for their answers. Raising it: a client may send more ahead, and each request looks through a longer queue."""
QUEUE_FULL = overloaded(f"More than {MOST_QUEUED} requests wait on this connection. Send the next one after an answer.", 1)
FRAMING_PER_BODY_BYTE = 8
"""Bytes of chunk sizes that a byte of a body excuses: a chunk for each byte takes five."""


def bounded_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """Return a protocol class with `settings` built in, because uvicorn makes its protocols itself."""

    class Bounded(BoundedProtocol):
        bounds = settings

    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        left: called once the connection is gone.
    """

    bounds: ServerSettings

    def __init__(self, *args: Any, left: Callable[[], None] = lambda: None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left = left
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._beside_body = 0
        """Bytes of the request that arrives, less its body and what the body excuses."""
        self._in_headers = False
        self._sizes: list[tuple[bytes, bytes]] = []
        """Headers of the request that say how long its body is."""
        self._is_repeated = False
        """The parser reads a head that stands for one that was read."""
        self._cycles: list[Any] = []
        """Uvicorn's cycles, one per request, in order. Cycles with complete answers are dropped when the next request comes."""
        self._early = b""
        """Bytes that arrived while a request was answered."""
        self._is_ending = False
        """The server stops: the next answer is the last."""
        self.is_connected = False
        """A transport has been given to it. Stays so after the end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer of the first request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self.is_connected = True
        self._arm_arriving()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the timers, and tell every request of this connection: uvicorn tells only the one that came last."""
        self._disarm_arriving()
        self.resume_writing()
        self._early = b""
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self._left()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a request that is complete stops the clock, one that has begun starts it."""
        if self.transport.is_closing():
            return
        if self.is_answering:
            self._early += data
            if len(self._early) > MAX_HEADER_BYTES:
                self.transport.abort()  # an answer has begun, so the reason can't be sent
            return
        self._beside_body += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except HttpParserError:
            is_full = len(self._unanswered()) >= MOST_QUEUED
            self._refuse(QUEUE_FULL if is_full else Fault(400, "Invalid HTTP request received.", code="invalid_http"))
        if self.transport.is_closing():
            return
        self._beside_body = max(0, self._beside_body)  # no credit: a long body excuses nothing that follows it
        if self._beside_body > MAX_HEADER_BYTES and self._is_answered_early():
            self.transport.close()
        elif self._beside_body > MAX_HEADER_BYTES:
            self._refuse(Fault(431, "The request's headers are too long", code="headers_too_large"))
        elif self.is_answering:
            self._disarm_arriving()
            self.flow.resume_reading()  # uvicorn stops reading when the next request is there already
        else:
            self._arm_arriving()

    def _parse(self, data: bytes) -> None:
        """Feed the parser, and ignore offers of another protocol (`Upgrade`), which the parser takes for accepted.

        It would end the request with its headers and read its body as the next request. No offer is accepted here, so another parser goes on behind the
        headers.

        Raises:
            HttpParserError: the bytes are not HTTP.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as offer:
                data = data[offer.args[0] :]
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self._is_repeated = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%s: %s\r\n" % size for size in self._sizes) + b"\r\n")
                self._is_repeated = False
            else:
                return

    def on_message_begin(self) -> None:
        """Begin a request.

        Raises:
            ValueError: the queue is full. The parser stops, and reports an error of its own.
        """
        if not self._is_repeated:
            if len(self._unanswered()) >= MOST_QUEUED:
                raise ValueError("the queue is full")
            self._in_headers, self._sizes = True, []
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request's path."""
        if not self._is_repeated:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers, which follow a chunked body, mean nothing here, and would add up."""
        if self._in_headers:
            super().on_header(name, value)
            if name.lower() in {b"content-length", b"transfer-encoding"}:
                self._sizes.append((name, value))

    def on_headers_complete(self) -> None:
        """Begin to answer the request."""
        if not self._is_repeated:
            self._in_headers = False
            super().on_headers_complete()
            if self.parser.get_http_version() == "1.0":
                self.cycle.__class__ = _UntilClose
                self.cycle.chunked_encoding = False
            self.cycle.keep_alive = self.cycle.keep_alive and not self._is_ending
            self._cycles = [*self._unanswered(), self.cycle]

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._beside_body -= len(body) * (1 + FRAMING_PER_BODY_BYTE)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Pass on a complete request, and reset the count of bytes for the next one."""
        if not self.parser.should_upgrade():
            self._beside_body = 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with what came while the request was answered."""
        super().on_response_complete()
        if self.is_answering:
            return
        if self._unanswered():  # the next request, begun already
            self._arm_arriving()
        if self._early:
            data, self._early = self._early, b""
            self.data_received(data)

    def shutdown(self) -> None:
        """Close once what is here was answered. An idle connection is read a moment longer: a request may be on its way, which a close would reset."""
        self._is_ending = True
        is_idle = self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]
        if is_idle:
            self.loop.call_later(LAST_REQUEST_S, self._close_idle)
        else:
            self.cycle.keep_alive = False

    def _close_idle(self) -> None:
        if self.transport.is_closing() or self._unanswered():
            return
        if self._in_headers:
            self._refuse(STOPPING)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """Start a timer: a client may read slower than its tokens come, for a while."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.bounds.slow_reader_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_slow(self) -> None:
        self._arriving = None
        if self._is_answered_early():
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(Fault(408, f"The request did not arrive within {self.bounds.request_timeout_s:g} s", code="request_timeout"))

    def _unanswered(self) -> list[Any]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    @property
    def is_answering(self) -> bool:
        """True while a complete request waits for the end of its answer."""
        unanswered = self._unanswered()
        return bool(unanswered) and not unanswered[0].more_body

    def _is_answered_early(self) -> bool:
        """Return whether the last request was refused before its end. The rest of it is read and dropped."""
        return bool(self._cycles) and self._cycles[-1].response_complete and self._cycles[-1].more_body

    def _arm_arriving(self) -> None:
        if self._arriving is None:
            self._arriving = self.loop.call_later(self.bounds.request_timeout_s, self._too_slow)

    def _disarm_arriving(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def _refuse(self, fault: Fault) -> None:
        """Answer without the application, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:  # pyright: ignore[reportUnnecessaryComparison]
            self.transport.write(whole_answer(fault))
        self.transport.close()


class _UntilClose(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: the end of the connection ends it (RFC 9112, 6.1 and 6.3)."""

    async def send(self, message: ASGISendEvent) -> None:
        """Write a part of the answer; no length was announced that it could miss."""
        if message["type"] == "http.response.body":
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def whole_answer(fault: Fault) -> bytes:
    """Return a refusal as HTTP. The connection is closed after it."""
    body = fault.body()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **fault.headers}
    lines = [f"HTTP/1.1 {fault.status} ", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("ascii") + body
