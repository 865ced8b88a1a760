"""What the terminal of a server says of requests."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tests.fakes.clock import FakeClock

from paceline.server.metrics import IN_S, MOST_LINES, RequestLog


async def _asked(log: RequestLog, path: str = "/v1/models") -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(_: Message) -> None:
        pass

    await log({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)


def _answering(app: ASGIApp, clock: FakeClock) -> RequestLog:
    return RequestLog(app, clock)


def test_a_refusal_is_one_line_with_what_the_client_was_told(caplog: pytest.LogCaptureFixture) -> None:
    app = JSONResponse({"error": {"message": "no\x1b[2J such field"}}, 400)
    asyncio.run(_asked(_answering(app, FakeClock())))
    assert caplog.messages == ["POST /v1/models: 400 no?[2J such field"]


def test_what_was_asked_is_not_said_twice(caplog: pytest.LogCaptureFixture) -> None:
    app = JSONResponse({"error": {"message": "POST /v1/models: Method Not Allowed"}}, 405)
    asyncio.run(_asked(_answering(app, FakeClock())))
    assert caplog.messages == ["POST /v1/models: 405 Method Not Allowed"]


def test_a_stream_that_fails_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        parts = ['data: {"choices":[]}\n\n', 'data: {"error":{"message":"a machine is gone"}}\n\n']
        await StreamingResponse(iter(parts))(scope, receive, send)

    asyncio.run(_asked(_answering(app, FakeClock())))
    assert caplog.messages == ["POST /v1/models: 200 a machine is gone"]


def test_a_client_in_a_loop_fills_no_terminal(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = _answering(JSONResponse({"error": {"message": "busy"}}, 429), clock)
    for _ in range(MOST_LINES + 50):
        asyncio.run(_asked(log))
    assert len(caplog.messages) == MOST_LINES
    clock.advance(IN_S)
    asyncio.run(_asked(log))
    assert caplog.messages[MOST_LINES:] == ["50 more requests were refused in the 10 s before", "POST /v1/models: 429 busy"]


def test_what_is_answered_is_a_line_only_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    log = _answering(JSONResponse({}), FakeClock())
    asyncio.run(_asked(log))
    assert not caplog.messages
    with caplog.at_level(logging.INFO, "paceline.requests"):
        asyncio.run(_asked(log))
        asyncio.run(_asked(log, "/health"))
    assert caplog.messages == ["POST /v1/models: 200 in 0.00 s"]
