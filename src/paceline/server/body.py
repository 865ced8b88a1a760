"""Reads request bodies within bounds: each one's length, and the memory of all that are being read or parsed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from paceline.server.faults import Fault, Refusal, overloaded
from paceline.server.settings import ServerSettings

BUSY_RETRY_S = 1


class BodyReader:
    """Owns the budget of body bytes."""

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
