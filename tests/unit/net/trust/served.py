"""A real gRPC server with a node's credentials and guard, and callers of several kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import psutil
from tests.fakes.fleets import TestFleet, sealed_card

from paceline.core.ids import Trust
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.trust.certificates import NODE_NAME
from paceline.net.trust.credentials import channel_credentials, server_credentials
from paceline.net.trust.guard import Context, PeerGuard
from paceline.net.trust.handlers import Limit, WellFormed
from paceline.net.trust.identity import Identity
from paceline.net.trust.refusals import Refusals
from paceline.net.wire import fleet_pb2 as wire

ECHO, COUNT, TALK, SINK, FLOOD, CARDS = "/test/Echo", "/test/Count", "/test/Talk", "/test/Sink", "/test/Flood", "/test/Cards"
CARD = "/paceline.v1.CapabilityService/GetNodeCapability"
SOON_S = 100.0


def connections(port: int) -> list[tuple[str, int]]:
    """The far ends of the connections to a port of this process."""
    held = psutil.Process().net_connections("tcp")
    return [
        (one.raddr.ip, one.raddr.port) for one in held if one.raddr and one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
    ]


class Services(grpc.GenericRpcHandler):
    """One method of each shape, and GetNodeCapability."""

    def __init__(self, guard: PeerGuard, identity: Identity) -> None:
        self.guard, self.identity = guard, identity
        self.cancelled = asyncio.Event()
        self.sinking = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        match details.method:
            case "/test/Echo":
                return grpc.unary_unary_rpc_method_handler(self.echo)
            case "/test/Count":
                return grpc.unary_stream_rpc_method_handler(self.count)
            case "/test/Talk":
                return grpc.stream_stream_rpc_method_handler(self.talk)
            case "/test/Sink":
                return grpc.stream_unary_rpc_method_handler(self.sink)
            case "/test/Flood":
                return grpc.unary_stream_rpc_method_handler(self.flood)
            case "/test/Cards":
                return grpc.stream_stream_rpc_method_handler(self.cards, wire.SignedCard.FromString, wire.SignedCard.SerializeToString)
            case "/paceline.v1.CapabilityService/GetNodeCapability":
                return grpc.unary_unary_rpc_method_handler(
                    self.card, wire.GetNodeCapabilityRequest.FromString, wire.GetNodeCapabilityResponse.SerializeToString
                )
        return None

    async def echo(self, request: bytes, context: Context) -> bytes:
        return self.guard.peer(context).node_id.encode() + b":" + request

    async def count(self, request: bytes, context: Context) -> None:
        """Two messages at once, then silence."""
        try:
            await context.write(b"1")
            await context.write(b"2")
            await asyncio.Event().wait()
        finally:  # cancelled in its wait, or after a write: a message may be read before its sending is over
            self.cancelled.set()

    async def flood(self, request: bytes, context: Context) -> None:
        """More than anybody takes who does not read."""
        try:
            while True:
                await context.write(bytes(1 << 20))
        finally:
            self.cancelled.set()

    async def cards(self, requests: AsyncIterator[wire.SignedCard], context: Context) -> None:
        async for request in requests:
            await context.write(request)

    async def talk(self, requests: AsyncIterator[bytes], context: Context) -> None:
        async for request in requests:
            await context.write(request)

    async def sink(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        total = 0
        async for request in requests:
            total += len(request)
            self.sinking.set()
        return str(total).encode()

    async def card(self, request: wire.GetNodeCapabilityRequest, context: Context) -> wire.GetNodeCapabilityResponse:
        sealed = sealed_card(self.identity)
        signed = wire.SignedCard.FromString(sealed.sealed)
        signed.certificate = sealed.certificate
        return wire.GetNodeCapabilityResponse(card=wire.PassedCard(card=signed), protocol=PROTOCOL_VERSION)


@dataclass(slots=True)
class Served:
    """The server of one node."""

    fleet: TestFleet
    identity: Identity
    guard: PeerGuard
    services: Services
    port: int
    well_formed: WellFormed

    def begun(self, caller: str) -> int:
        """Requests of a caller that are on their way."""
        return self.well_formed._callers[caller].begun if caller in self.well_formed._callers else 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def channel(self, caller: Identity, name: str = NODE_NAME) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(self.address, channel_credentials(caller), [("grpc.ssl_target_name_override", name)])


@asynccontextmanager
async def served(fleet: TestFleet, name: str = "server-1") -> AsyncIterator[Served]:
    """A server of a node."""
    identity = fleet.member(name)
    refusals = Refusals()
    guard = PeerGuard(fleet.authority.root, fleet.revocations.voids, fleet.clock, refusals)
    well_formed = WellFormed(refusals, {CARD: Limit(1000, 64, least=Trust.GUEST)})
    server = grpc.aio.server(interceptors=[guard, well_formed])
    services = Services(guard, identity)
    server.add_generic_rpc_handlers((services,))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(identity))
    await server.start()
    try:
        yield Served(fleet, identity, guard, services, port, well_formed)
    finally:
        await server.stop(None)
