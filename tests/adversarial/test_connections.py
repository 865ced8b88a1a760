"""Strangers who take connections: so many, for so long, and no member is kept out by them."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import pytest
from tests.adversarial.handshakes import until_cut
from tests.fakes.clock import FakeClock
from tests.fakes.fleets import TestFleet
from tests.unit.net.trust.joining import IssuerNode, begun_calls
from tests.unit.net.trust.logs import logged
from tests.unit.net.trust.served import ECHO, SOON_S, Services, served

from paceline.core.ids import Trust
from paceline.fleet.eligibility import TrustPolicy
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.server import SERVER_OPTIONS, NodeServer, RpcMeter, Service
from paceline.net.trust.certificates import NODE_NAME
from paceline.net.trust.connections import MAX_OF_NODE, SILENT_S, ConnectionWatch, Refusals, connections
from paceline.net.trust.credentials import channel_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Limit

MOST = 400


FLOOD = """
import os, selectors, socket, sys
os.nice(15)  # strangers come from elsewhere: their processor is not ours
host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
looking, held = selectors.DefaultSelector(), 0
print("begun", flush=True)
while True:
    while held < count:
        try:
            one = socket.create_connection(("127.0.0.1", port), source_address=(host, 0))
        except OSError:
            break
        looking.register(one, selectors.EVENT_READ)
        held += 1
    for key, _ in looking.select():
        looking.unregister(key.fileobj)
        key.fileobj.close()
        held -= 1
"""
"""Keeps so many silent connections, each opened anew as soon as it is closed."""


@contextmanager
def renewed_connections(host: str, port: int, count: int) -> Iterator[None]:
    command = [sys.executable, "-c", FLOOD, host, str(port), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline() == "begun\n"
            yield
        finally:
            flood.kill()


async def called(channel: grpc.aio.Channel) -> bytes:
    """What a call brings, made again where its connection went for strangers that came at the same moment."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                return await channel.unary_unary(ECHO)(b"", wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 - anything else is no matter of connections


@pytest.mark.skipif(sys.platform != "linux", reason="another host's address, on this machine")
def test_row_37_a_member_comes_in_while_strangers_renew_all_connections() -> None:
    async def main() -> None:
        fleet, refusals = TestFleet(), Refusals()
        watch = ConnectionWatch(refusals, fleet.clock, max_silent=MOST // 8)
        guard = PeerGuard(fleet.authority.root, fleet.revocations.voids, fleet.clock, refusals, watch)
        options = [*(one for one in SERVER_OPTIONS if one[0] != "grpc.max_allowed_incoming_connections")]
        options.append(("grpc.max_allowed_incoming_connections", MOST))
        identity = fleet.member("server-1")
        server = NodeServer(identity, guard, watch, RpcMeter(), TrustPolicy(), options)
        services = Services(guard, identity)
        server.add(Service(lambda grpc_server: grpc_server.add_generic_rpc_handlers((services,)), {}))
        server._limits[ECHO] = Limit(1 << 10, 8, least=Trust.GUEST)
        port = await server.start("127.0.0.1", 0)
        try:
            with renewed_connections("127.0.0.2", port, 2 * MOST):
                for name in ("alice-1", "bob-1", "carol-1"):
                    channel_options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NODE_NAME)]
                    credentials = channel_credentials(fleet.member(name))
                    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, channel_options) as channel:
                        assert await called(channel) == name.encode() + b":"
        finally:
            await server.stop(0)

    asyncio.run(main())


def test_row_37_who_says_nothing_is_hung_up_and_named() -> None:
    async def main() -> None:
        fleet, clock = TestFleet(), FakeClock()
        async with served(fleet, clock=clock) as server:
            silent = socket.create_connection(("127.0.0.1", server.port))
            with silent, logged() as lines:
                async with asyncio.timeout(SOON_S):
                    while not connections(server.port):  # noqa: ASYNC110 - sockets are looked at, there is no event
                        await asyncio.sleep(0.01)
                    while not server.guard._watch._open:  # type: ignore[union-attr]  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                clock.advance(SILENT_S)
                await lines.line(f"refused 127.0.0.1 (port {silent.getsockname()[1]})", "10 s without a call")
                assert await asyncio.to_thread(silent.recv, 100) == b""

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say who has hung up")
def test_callers_that_gave_up_while_this_process_stood_still_are_no_strangers() -> None:
    """Connections wait in the system meanwhile; these are answered once their callers are gone."""

    async def main() -> None:
        refusals, clock = Refusals(), FakeClock()
        with socket.create_server(("127.0.0.1", 0)) as server, logged() as lines:
            port = server.getsockname()[1]
            watch = ConnectionWatch(refusals, clock, look_s=0.01)
            watch.watch(port)
            gone, there = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
            gone.close()
            there_port = there.getsockname()[1]
            with server.accept()[0], server.accept()[0], there:
                assert sorted(connections(port).values()) == [False, True]
                watch._arrived(connections(port))
            async with asyncio.timeout(SOON_S):
                while watch._open:  # noqa: ASYNC110 - sockets are looked at, there is no event
                    await asyncio.sleep(0.01)
            assert refusals.total == 1
            await lines.line(f"port {there_port}")
            watch.close()

    asyncio.run(main())


def test_row_37_strangers_without_a_certificate_are_as_silent() -> None:
    """TLS 1.3 lets a caller believe it is in before its certificate was looked at."""

    async def main() -> None:
        fleet = TestFleet()
        async with served(fleet) as server:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
            await until_cut(reader)
            writer.transport.abort()

    asyncio.run(main())


def test_one_member_has_its_share_of_connections() -> None:
    async def main() -> None:
        fleet, clock = TestFleet(), FakeClock()
        watch = ConnectionWatch(Refusals(clock), clock)
        watch.watch(1)
        hung: list[int] = []
        member = fleet.member("greedy-1").member
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("paceline.net.trust.connections.hang_up", lambda remotes: hung.extend(port for _, port in remotes))
            for port in range(1, MAX_OF_NODE + 3):
                watch.began(f"ipv4:10.0.0.9:{port}", member)
                if port != 1:
                    watch.ended(f"ipv4:10.0.0.9:{port}")
                clock.advance(1)
            watch.began("ipv4:10.0.0.8:7", fleet.member("other-1").member)
        # The one that has been idle for longest goes, not the one that works.
        assert hung[:1] == [2]
        assert 1 not in hung
        assert 7 not in hung
        watch.close()

    asyncio.run(main())


def test_row_8_calls_that_are_begun_at_the_join_port_are_hung_up(tmp_path: Path) -> None:
    async def main() -> None:
        node = IssuerNode.make(tmp_path / "fleet")
        node.mint()
        async with node.hosted(), begun_calls(node.port, 2) as reader:
            node.clock.advance(SILENT_S)
            await until_cut(reader)

    asyncio.run(main())
