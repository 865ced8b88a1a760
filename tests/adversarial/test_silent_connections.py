"""Strangers who take connections: so many, for so long, and no member is kept out by them."""

from __future__ import annotations

import asyncio
import ssl
import sys

import pytest
from tests.adversarial.handshakes import until_cut
from tests.fakes.fleets import TestFleet
from tests.unit.net.trust.served import ECHO, SOON_S, dial, node_server, served, silent_connections, until_connected

MOST = 2000


@pytest.mark.skipif(sys.platform != "linux", reason="another host's address, on this machine")
def test_row_37_members_come_in_while_strangers_keep_silent_connections() -> None:
    async def main() -> None:
        fleet = TestFleet()
        async with node_server(fleet) as (_, port):
            with silent_connections("127.0.0.1", port, MOST, source="127.0.0.2"):
                await until_connected(port, MOST)
                for name in ("alice-1", "bob-1", "carol-1"):
                    async with dial(fleet, name, f"127.0.0.1:{port}") as channel:
                        answer = await channel.unary_unary(ECHO)(b"", timeout=SOON_S, wait_for_ready=True)
                        assert answer == name.encode() + b":"

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
