"""The outermost layer, plain ASGI: who may ask, how many at once, and what was answered.

/health needs no key: it says whether work advances and nothing else, and probes have no key. All else does, /metrics too
(Prometheus can send one).
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.faults import BAD_KEY, Fault, Refusal, overloaded
from paceline.server.metrics import Meter
from paceline.server.settings import ServerSettings

OPEN_PATHS = frozenset({"/health"})
KNOWN_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"})
BUSY_RETRY_S = 1


class Guard:
    """ASGI middleware: key, concurrency, counts."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, meter: Meter) -> None:
        self._app = app
        self._meter = meter
        self._max_requests = settings.max_requests
        self._expected = None if settings.api_key is None else b"Bearer " + settings.api_key.encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        label = path if path in KNOWN_PATHS else "other"
        meter = self._meter
        begun = False

        def counted(message: Message) -> Awaitable[None]:
            nonlocal begun
            if not begun:
                begun = True
                meter.answers[label, message["status"]] += 1
            return send(message)

        meter.in_flight += 1
        try:
            if path not in OPEN_PATHS and not self._knows(scope):
                await BAD_KEY.response()(scope, receive, counted)
            elif path not in OPEN_PATHS and meter.in_flight > self._max_requests:
                fault = overloaded(f"More than {self._max_requests} requests are in flight. Try again in a moment.", BUSY_RETRY_S)
                await fault.response()(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except Exception:
            if not begun:
                meter.answers[label, 500] += 1
            raise
        finally:
            meter.in_flight -= 1

    def _knows(self, scope: Scope) -> bool:
        """Whether the request carries the key, compared in constant time."""
        if self._expected is None:
            return True
        sent: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        return hmac.compare_digest(scheme.title() + b" " + key.strip(), self._expected)


class BodyReader:
    """Reads request bodies within bounds: each one's length, and the memory of all that are being read or parsed."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.pending_bytes = 0
        """Held right now."""

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive) -> AsyncGenerator[bytes, None]:
        """The request's body, charged to the budget while the context is open.

        Raises:
            Refusal: 413 for a body that is too long, 429 when all bodies together are.
            ClientDisconnect: the client went away before its end.
        """
        longest = self._settings.max_body_bytes
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if declared.isdigit() and int(declared) > longest:
            raise Refusal(_too_long(longest))
        held = 0
        parts: list[bytes] = []
        try:
            while True:
                message: Message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                part: bytes = message.get("body", b"")
                held += len(part)
                self.pending_bytes += len(part)
                if held > longest:
                    raise Refusal(_too_long(longest))
                if self.pending_bytes > self._settings.max_pending_body_bytes:
                    raise Refusal(overloaded("Too many large requests are arriving at once. Try again in a moment.", BUSY_RETRY_S))
                parts.append(part)
                if not message.get("more_body", False):
                    break
            yield parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            self.pending_bytes -= held


def _too_long(longest: int) -> Fault:
    return Fault(413, f"The request body is longer than {longest} bytes. Send less.", code="request_too_large")
