"""The outermost layer, plain ASGI: who may ask, how many at once, and what was answered.

/health needs no key: it says whether work advances and nothing else, and probes have no key; nor does the page at /, which asks for it.
All else does, /metrics too (Prometheus can send one); what only the machine's owner may do asks for the owner's. No path answers a web page that was not allowed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.clock import Clock
from paceline.server.admission import Headers, Keys, Pages, headers_of, is_owner
from paceline.server.anthropic import routes as anthropic_routes
from paceline.server.faults import BAD_KEY, Fault, Refusal, api_of, overloaded
from paceline.server.metrics import Meter
from paceline.server.ollama.routes import PATHS as OLLAMA_PATHS
from paceline.server.settings import ServerSettings

OPEN_PATHS = frozenset({"/", "/health"})
OWNER_PATHS = "/owner/"
"""Beginning of those that ask for the owner's key, whatever other key a client has."""
KNOWN_PATHS = (
    frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models", "/health", "/metrics"})
    | OLLAMA_PATHS
    | anthropic_routes.PATHS
    | frozenset({"/tokenize", "/detokenize"})
)
BUSY_RETRY_S = 1


class Guard:
    """ASGI middleware: pages, key, concurrency, counts."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, meter: Meter, clock: Clock) -> None:
        self._app = app
        self._meter = meter
        self._max_requests = settings.max_requests
        self._pages, self._keys = Pages(settings), Keys(settings, clock)
        self._owner_key = settings.owner_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        label = path if path in KNOWN_PATHS else "other"
        meter, headers = self._meter, headers_of(scope)
        shared = self._pages.sharing(headers)
        begun = False

        def counted(message: Message) -> Awaitable[None]:
            nonlocal begun
            if not begun:
                begun = True
                meter.answers[label, message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), *shared, *anthropic_routes.own_headers(path)]
            return send(message)

        meter.in_flight += 1
        try:
            answer = self._answer(scope, headers, path)
            if answer is not None:
                await answer(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except Exception:
            if not begun:
                meter.answers[label, 500] += 1
            raise
        finally:
            meter.in_flight -= 1

    def _answer(self, scope: Scope, headers: Headers, path: str) -> Response | None:
        """What is answered here; None: the application answers."""
        fault = self._pages.refusal(scope, headers)
        if fault is None and (told := self._pages.preflight(scope, headers)) is not None:
            answer = Response(status_code=204)
            answer.raw_headers += told
            return answer
        if fault is None and path.startswith(OWNER_PATHS):
            fault = None if is_owner(headers, self._owner_key) else BAD_KEY
        elif fault is None and path not in OPEN_PATHS:
            fault = self._keys.refusal(scope, headers)
            if fault is None and self._meter.in_flight > self._max_requests:
                fault = overloaded(f"More than {self._max_requests} requests are in flight. Try again in a moment.", BUSY_RETRY_S)
        return None if fault is None else fault.response(api_of(path))


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
