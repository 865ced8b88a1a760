"""A real gRPC server with a node's credentials and guard, and callers of several kinds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from tests.fakes.fleets import TestFleet, sealed_card
from tests.fleet.open_files import open_files

from paceline.core.ids import Trust
from paceline.fleet.eligibility import TrustPolicy
from paceline.net.channels import CHANNEL_OPTIONS, Options
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.server import SERVER_OPTIONS, NodeServer, RpcMeter, Service
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
FLOOD_CONNECTIONS = """
import os, selectors, socket, sys
os.nice(15)  # strangers come from elsewhere: their processor is not ours
host, port, source, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
looking, held = selectors.DefaultSelector(), 0
print("begun", flush=True)
while True:
    while held < count:
        try:
            one = socket.create_connection((host, port), source_address=(source, 0))
        except OSError:
            break
        looking.register(one, selectors.EVENT_READ)
        held += 1
    for key, _ in looking.select(0.5):
        looking.unregister(key.fileobj)
        key.fileobj.close()
        held -= 1
"""


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


@asynccontextmanager
async def node_server(fleet: TestFleet, host: str = "127.0.0.1", options: Options = SERVER_OPTIONS) -> AsyncIterator[tuple[PeerGuard, int]]:
    """Serve `Services` with the server that nodes use. Yields its guard and its port."""
    identity = fleet.member("server-1")
    guard = PeerGuard(fleet.authority.root, fleet.revocations.voids, fleet.clock, Refusals())
    server, services = NodeServer(identity, guard, RpcMeter(), TrustPolicy(), options), Services(guard, identity)
    server.add(Service(lambda grpc_server: grpc_server.add_generic_rpc_handlers((services,)), {}))
    server._limits |= dict.fromkeys((ECHO, COUNT), Limit(1 << 10, 8, least=Trust.GUEST))
    port = await server.start(host, 0)
    try:
        yield guard, port
    finally:
        await server.stop(0)


def dial(fleet: TestFleet, caller: str, address: str) -> grpc.aio.Channel:
    """Return a channel to `address`, with the options and the credentials of a member."""
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NODE_NAME)]
    return grpc.aio.secure_channel(address, channel_credentials(fleet.member(caller)), options)


@contextmanager
def silent_connections(host: str, port: int, count: int, source: str = "", inside: Sequence[str] = ()) -> Iterator[None]:
    """Keep `count` silent connections to a port. Each is opened again as soon as it is closed.

    Args:
        source: the address they come from; empty: any.
        inside: the command before the flood's own, such as `ip netns exec NAME`.
    """
    command = [*inside, sys.executable, "-c", FLOOD_CONNECTIONS, host, str(port), source, str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline() == "begun\n"
            yield
        finally:
            flood.kill()


async def until_connected(port: int, count: int) -> None:
    """Wait until this process has `count` connections to a port of its own."""
    async with asyncio.timeout(SOON_S):
        while open_files(os.getpid()).connected_to(port) < count:  # noqa: ASYNC110 - sockets are looked at, there is no event
            await asyncio.sleep(0.1)
