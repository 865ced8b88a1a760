"""Connections that come while a server stops."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from paceline.server.protocol import MAX_HEADER_BYTES, MOST_QUEUED, BoundedProtocol
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
        acceptor = Acceptor(listening, lambda left: Closes(config, ServerState(), {}, left=left), Closes.bounds, None)
        acceptor.open()
        reader, writer = await asyncio.open_connection(*listening.getsockname()[:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        said = await asyncio.wait_for(reader.read(), 30)
        await asyncio.gather(*closing)
        writer.close()
        listening.close()
        return said

    assert uvloop.run(talk()).startswith(b"HTTP/1.1 503 ")


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("state", ["not accepted", "just opened", "kept alive", "half sent"])
@pytest.mark.parametrize("n_clients", [1, 5])
def test_a_server_that_stops_answers_each_request_that_came(state: str, n_clients: int) -> None:
    """The bytes lie in the system's buffers, and the server has not looked at them when it stops."""

    async def talk() -> list[bytes]:
        class Bounded(BoundedProtocol):
            bounds = ServerSettings()

        loop, config, server = (
            asyncio.get_running_loop(),
            uvicorn.Config(cast("Any", refuse), http=Bounded, log_config=None, lifespan="off"),
            ServerState(),
        )
        config.load()
        listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        address = listening.getsockname()
        acceptor = Acceptor(listening, lambda left: Bounded(config, server, {}, left=left), Bounded.bounds, None)
        acceptor.open()
        clients = [socket.create_connection(address, 10) for _ in range(n_clients)]
        if state != "not accepted":
            while len(server.connections) < n_clients:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0)
        if state == "kept alive":
            for client in clients:
                client.sendall(GET)
                client.setblocking(False)
                assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 503 ")
                client.settimeout(10)
        for client in clients:
            client.sendall(GET[:9] if state == "half sent" else GET)
        for connection in list(server.connections):
            connection.shutdown()
        await acceptor.close()
        for connection in list(server.connections):
            connection.shutdown()
        said = await asyncio.gather(*(asyncio.to_thread(client.recv, 4096) for client in clients))
        for client in clients:
            client.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        return said

    assert all(said.startswith(b"HTTP/1.1 503 ") for said in uvloop.run(talk()))


@pytest.mark.parametrize(
    ("n_sent", "n_answered"),
    [(1, 1), (MOST_QUEUED, MOST_QUEUED), (MOST_QUEUED + 1, 0), (50 * MOST_QUEUED, 0)],
    ids=["one", "most", "more", "flood"],
)
@pytest.mark.parametrize(
    "begins",
    [
        GET,
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n-",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    ],
    ids=["get", "post", "upgrade"],
)
def test_a_connection_queues_only_so_many_requests(n_sent: int, n_answered: int, begins: bytes) -> None:
    async def talk() -> bytes:
        class Bounded(BoundedProtocol):
            bounds = ServerSettings()

        config = uvicorn.Config(cast("Any", refuse), http=Bounded, log_config=None, lifespan="off")
        config.load()
        sent, protocol = bytearray(), Bounded(config, ServerState(), {})
        protocol.connection_made(cast("Any", Kept(sent)))
        protocol.data_received(begins * n_sent)
        assert len(protocol.pipeline) < MOST_QUEUED
        while not protocol.transport.is_closing() and sent.count(b"HTTP/1.1 503") < n_sent:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        return bytes(sent)

    answers = uvloop.run(talk())
    assert answers.count(b"HTTP/1.1 503") == n_answered
    assert answers.count(b"HTTP/1.1 4") == (n_answered == 0)


CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "unanswered"])
@pytest.mark.parametrize("body", [0, 4 << 20])
@pytest.mark.parametrize("behind", [b"0\r\nX: ", b"1;"], ids=["trailer", "extension"])
def test_what_is_not_body_is_bounded_behind_a_long_body_too(is_answered: bool, body: int, behind: bytes) -> None:
    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def talk() -> int:
        class Bounded(BoundedProtocol):
            bounds = ServerSettings()

        config = uvicorn.Config(cast("Any", refuse if is_answered else wait), http=Bounded, log_config=None, lifespan="off")
        config.load()
        sent, protocol, taken = bytearray(), Bounded(config, ServerState(), {}), 0
        protocol.connection_made(cast("Any", Kept(sent)))
        protocol.data_received(CHUNKED)
        while is_answered and not sent:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        protocol.data_received(b"%x\r\n%s\r\n" % (body, b"a" * body) if body else b"")
        assert not protocol.transport.is_closing()
        protocol.data_received(behind)
        while not protocol.transport.is_closing() and taken < 1 << 20:
            protocol.data_received(b"a" * 4096)
            taken += 4096
        protocol.connection_lost(None)
        for task in protocol.tasks:
            task.cancel()
        return taken

    assert uvloop.run(talk()) <= MAX_HEADER_BYTES + 4096


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_small_chunks_of_a_long_body_are_taken(size: int) -> None:
    class Bounded(BoundedProtocol):
        bounds = ServerSettings()

    async def talk() -> bool:
        config = uvicorn.Config(cast("Any", refuse), http=Bounded, log_config=None, lifespan="off")
        config.load()
        protocol = Bounded(config, ServerState(), {})
        protocol.connection_made(cast("Any", Kept(bytearray())))
        protocol.data_received(CHUNKED)
        for _ in range(8):
            protocol.data_received((b"%x\r\n" % size + b"a" * size + b"\r\n") * (40_000 // size))
        is_open = not protocol.transport.is_closing()
        protocol.connection_lost(None)
        return is_open

    assert uvloop.run(talk())


class Kept(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self, sent: bytearray) -> None:
        super().__init__()
        self._sent, self._is_closing = sent, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._sent += data

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass
