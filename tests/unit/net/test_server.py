"""What a node's server does with connections whose other end is gone without a word."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Self

import grpc.aio
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.net.trust.served import connections

from paceline.fleet.eligibility import TrustPolicy
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.server import SERVER_OPTIONS, NodeServer, RpcMeter
from paceline.net.trust.certificates import NODE_NAME
from paceline.net.trust.credentials import channel_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.refusals import Refusals

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
    fleet, refusals = TestFleet(), Refusals()
    identity, caller = fleet.member("server-1"), fleet.member("alice-1")
    guard = PeerGuard(fleet.authority.root, fleet.revocations.voids, fleet.clock, refusals)
    server = NodeServer(identity, guard, RpcMeter(), TrustPolicy(), [(name, IMPATIENT.get(name, value)) for name, value in SERVER_OPTIONS])
    port = await server.start("127.0.0.1", 0)
    try:
        async with Cable(port) as cable:
            options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NODE_NAME)]
            async with grpc.aio.secure_channel(f"127.0.0.1:{cable.port}", channel_credentials(caller), options) as channel:
                await channel.channel_ready()
                await cable.cut()
                await until(lambda: not connections(port))
    finally:
        await server.stop(0)
