"""One line for each request that was refused or failed, with the words that the client was told; at INFO, one for each other request too.

Lines are bounded in a time, so that a client in a loop fills no terminal.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.clock import Clock
from paceline.core.shown import printable

logger = logging.getLogger("paceline.requests")

MOST_LINES, IN_S = 20, 10.0
"""Lines about refusals in a time; of the rest, a number."""
_QUIET_PATHS = frozenset({"/health", "/metrics"})
"""Asked again and again by programs: no line at INFO."""
_FAILED = b'{"error"'
_LINE = re.compile(rb'^(?:data: )?({"error".*)', re.MULTILINE)
"""How the error of a stream begins: behind `data: ` in server-sent events, alone in Ollama's lines."""


class RequestLog:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app, self._clock = app, clock
        self._since_s, self._lines, self._unsaid = clock.monotonic(), 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = self._clock.monotonic()
        what = f"{scope['method']} {printable(scope['path'], 80)}"
        status, told = 0, ""

        def seen(message: Message) -> Awaitable[None]:
            nonlocal status, told
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not told and (body := message.get("body", b"")) and (status >= 400 or _FAILED in body):
                told = _words(body)
            return send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            if status >= 400 or told:
                self._refused(f"{what}: {status} {told.removeprefix(f'{what}: ')}".rstrip())
            elif status and scope["path"] not in _QUIET_PATHS:
                logger.info("%s: %d in %.2f s", what, status, self._clock.monotonic() - began_s)

    def _refused(self, line: str) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._since_s >= IN_S:
            if self._unsaid:
                logger.warning("%d more requests were refused in the %.0f s before", self._unsaid, now_s - self._since_s)
            self._since_s, self._lines, self._unsaid = now_s, 0, 0
        if self._lines < MOST_LINES:
            self._lines += 1
            logger.warning("%s", line)
        else:
            self._unsaid += 1


def _words(body: bytes) -> str:
    """The message of an error's JSON, alone or as an event of a stream."""
    line = _LINE.search(body)
    try:
        error = json.loads(body if line is None else line[1])["error"]
        return printable(error if isinstance(error, str) else str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return ""
