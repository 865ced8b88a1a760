"""Strangers who take connections: so many, for so long, and no member is kept out by them."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio
import pytest
from tests.adversarial.handshakes import until_cut
from tests.fakes.fleets import TestFleet
from tests.unit.net.trust.served import ECHO, SOON_S, Services, connections, served

from paceline.core.ids import Trust
from paceline.fleet.eligibility import TrustPolicy
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.server import NodeServer, RpcMeter, Service
from paceline.net.trust.certificates import NODE_NAME
from paceline.net.trust.credentials import channel_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Limit
from paceline.net.trust.refusals import Refusals

MOST = 2000


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


@pytest.mark.skipif(sys.platform != "linux", reason="another host's address, on this machine")
def test_row_37_members_come_in_while_strangers_keep_silent_connections() -> None:
    async def main() -> None:
        fleet, refusals = TestFleet(), Refusals()
        guard = PeerGuard(fleet.authority.root, fleet.revocations.voids, fleet.clock, refusals)
        identity = fleet.member("server-1")
        server = NodeServer(identity, guard, RpcMeter(), TrustPolicy())
        services = Services(guard, identity)
        server.add(Service(lambda grpc_server: grpc_server.add_generic_rpc_handlers((services,)), {}))
        server._limits[ECHO] = Limit(1 << 10, 8, least=Trust.GUEST)
        port = await server.start("127.0.0.1", 0)
        try:
            with renewed_connections("127.0.0.2", port, MOST):
                async with asyncio.timeout(SOON_S):
                    while len(connections(port)) < MOST:  # noqa: ASYNC110 - sockets are looked at, there is no event
                        await asyncio.sleep(0.1)
                for name in ("alice-1", "bob-1", "carol-1"):
                    channel_options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NODE_NAME)]
                    credentials = channel_credentials(fleet.member(name))
                    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, channel_options) as channel:
                        answer = await channel.unary_unary(ECHO)(b"", timeout=SOON_S, wait_for_ready=True)
                        assert answer == name.encode() + b":"
        finally:
            await server.stop(0)

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
