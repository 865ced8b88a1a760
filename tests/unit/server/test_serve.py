"""Connections that come while a server stops."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from paceline.server.protocol import BoundedProtocol
from paceline.server.serve import Acceptor
from paceline.server.settings import ServerSettings


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    del scope, receive
    await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def test_a_request_on_a_connection_that_has_just_opened_is_answered_though_no_more_are_accepted() -> None:
    """The acceptor closes in the moment in which the connection is made, and its opening is not over."""

    async def talk() -> bytes:
        closing: list[asyncio.Task[None]] = []

        class Closes(BoundedProtocol):
            bounds = ServerSettings()

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                closing.append(asyncio.create_task(acceptor.close()))

        config = uvicorn.Config(cast("Any", refuse), http=Closes, log_config=None, lifespan="off")
        config.load()
        listening = socket.create_server(("127.0.0.1", 0))
        acceptor = Acceptor(listening, lambda: Closes(config, ServerState(), {}), Closes.bounds, None)
        acceptor.open()
        reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        said = await asyncio.wait_for(reader.read(), 30)
        await asyncio.gather(*closing)
        writer.close()
        listening.close()
        return said

    assert uvloop.run(talk()).startswith(b"HTTP/1.1 503 ")
