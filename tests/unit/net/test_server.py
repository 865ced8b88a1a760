"""What a node's server does with connections whose other end is gone without a word."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import Self

from tests.fakes.fleets import TestFleet
from tests.fleet.open_files import open_files
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.net.trust.served import dial, node_server

from paceline.net.server import SERVER_OPTIONS

IMPATIENT = {"grpc.keepalive_time_ms": 100, "grpc.http2.ping_timeout_ms": 500}


class Cable:
    """Carries connections to a port, until it is cut: both ends stay open, and hear nothing of each other any more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stack = AsyncExitStack()
        self._carried: list[asyncio.Task[None]] = []
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()
        await self._stack.aclose()

    async def cut(self) -> None:
        self._server.close()
        for task in self._carried:
            task.cancel()
        await asyncio.gather(*self._carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        self._stack.callback(writer.close)
        self._stack.callback(there[1].close)
        self._carried += [asyncio.create_task(pass_on(reader, there[1])), asyncio.create_task(pass_on(there[0], writer))]


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


@in_loop
async def test_a_machine_that_vanished_keeps_no_connection() -> None:
    fleet = TestFleet()
    impatient = [(name, IMPATIENT.get(name, value)) for name, value in SERVER_OPTIONS]
    async with (
        node_server(fleet, options=impatient) as (_, port),
        Cable(port) as cable,
        dial(fleet, "alice-1", f"127.0.0.1:{cable.port}") as channel,
    ):
        await channel.channel_ready()
        await cable.cut()
        await until(lambda: not open_files(os.getpid()).connected_to(port))
