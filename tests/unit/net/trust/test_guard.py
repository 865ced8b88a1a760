"""Real sockets and real TLS: who gets in, who does not, and what is said of those who don't."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.fleets import TestFleet
from tests.unit.net.trust.logs import logged
from tests.unit.net.trust.served import CARD, CARDS, COUNT, ECHO, FLOOD, SINK, SOON_S, TALK, served

from paceline.core.errors import NotTrusted, RevokedNode
from paceline.core.ids import NodeId
from paceline.net.trust.certificates import NODE_NAME
from paceline.net.trust.credentials import ask_card, check_callable
from paceline.net.trust.refusals import Refusals


async def refused(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def read_on(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> None:
    while True:
        await call.read()


def test_a_member_is_known_by_its_certificate(fleet: TestFleet) -> None:
    async def main() -> None:
        async with served(fleet) as server, server.channel(fleet.member("alice-1")) as channel:
            assert await channel.unary_unary(ECHO)(b"hi", timeout=SOON_S) == b"alice-1:hi"
            talk = channel.stream_stream(TALK)(timeout=SOON_S)
            await talk.write(b"a")
            assert await talk.read() == b"a"
            await talk.done_writing()
            sink = channel.stream_unary(SINK)(timeout=SOON_S)
            await sink.write(b"123")
            await sink.done_writing()
            assert await sink == b"3"
            unknown = await refused(channel.unary_unary("/test/Nothing")(b"", timeout=SOON_S))
            assert unknown.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())


def test_only_the_node_meant_can_answer(fleet: TestFleet) -> None:
    async def main() -> None:
        async with served(fleet) as server:
            alice, other = fleet.member("alice-1"), fleet.member("other-1")
            async with server.channel(alice) as channel:
                card = await ask_card(channel, alice.root, fleet.revocations.voids, fleet.clock.wall(), SOON_S)
            met = alice.root.member(card.certificate, fleet.clock.wall())
            assert met.node_id == "server-1"
            assert met.certificate == server.identity.member.certificate
            async with server.channel(alice, met.tls_name) as channel:
                assert await channel.unary_unary(ECHO)(b"", timeout=SOON_S) == b"alice-1:"
            # Somebody else of the fleet sits at the address.
            async with server.channel(alice, other.member.tls_name) as channel:
                error = await refused(channel.unary_unary(ECHO)(b"", timeout=SOON_S))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "Hostname Verification" in str(error.details())

    asyncio.run(main())


def test_strangers_have_no_call(fleet: TestFleet) -> None:
    """Without a certificate; with another fleet's; with no TLS at all."""

    async def main() -> None:
        foreign = TestFleet().member("mallory-1")
        nothing = grpc.ssl_channel_credentials(fleet.authority.root.pem)
        forged = grpc.ssl_channel_credentials(fleet.authority.root.pem, foreign.key_pem, foreign.certificate_pem)
        options = [("grpc.ssl_target_name_override", NODE_NAME)]
        async with served(fleet) as server:
            for credentials in (nothing, forged):
                async with grpc.aio.secure_channel(server.address, credentials, options) as channel:
                    error = await refused(channel.unary_unary(ECHO)(b"", timeout=SOON_S))
                assert error.code() is grpc.StatusCode.UNAVAILABLE
            with socket.create_connection(("127.0.0.1", server.port)) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert b"HTTP" not in await asyncio.to_thread(plain.recv, 100)

    asyncio.run(main())


def test_a_server_of_another_fleet_is_not_believed(fleet: TestFleet) -> None:
    async def main() -> None:
        async with served(TestFleet()) as server:
            alice = fleet.member("alice-1")
            async with server.channel(alice) as channel:
                error = await refused(channel.unary_unary(ECHO)(b"secret", timeout=SOON_S))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "certificate" in str(error.details()).lower()

    asyncio.run(main())


@pytest.mark.parametrize("shape", ["unary", "stream", "talk", "sink"])
def test_an_open_rpc_of_a_revoked_node_is_cancelled(fleet: TestFleet, shape: str) -> None:
    async def main() -> None:
        async with served(fleet) as server:
            alice, bob = fleet.member("alice-1"), fleet.member("bob-1")
            async with server.channel(alice) as channel, server.channel(bob) as other:
                bobs = other.unary_stream(COUNT)(b"", timeout=SOON_S)
                assert await bobs.read() == b"1"
                match shape:
                    case "stream":
                        call = channel.unary_stream(COUNT)(b"", timeout=SOON_S)
                        assert [await call.read(), await call.read()] == [b"1", b"2"]
                    case "talk":
                        call = channel.stream_stream(TALK)(timeout=SOON_S)
                        await call.write(b"x")
                        assert await call.read() == b"x"
                    case "sink":
                        call = channel.stream_unary(SINK)(timeout=SOON_S)
                        await call.write(b"x")
                        await server.services.sinking.wait()
                    case _:
                        assert await channel.unary_unary(ECHO)(b"", timeout=SOON_S)
                        call = None
                with logged() as lines:
                    sealed = fleet.revoke("alice-1")
                    server.guard.revoked(NodeId("alice-1"), sealed.revocation.not_after)
                    if call is not None:
                        error = await refused(call.read() if shape != "sink" else call)
                        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
                        assert error.details() == "alice-1 was revoked"
                        await lines.line("refused alice-1", "127.0.0.1", "was revoked")
                    # And on the connection it still has, nothing new is answered.
                    later = await refused(channel.unary_unary(ECHO)(b"", timeout=SOON_S))
                    assert later.code() is grpc.StatusCode.PERMISSION_DENIED
                    await lines.line("refused alice-1", "was revoked", "[/test/Echo]")
                if shape == "stream":
                    async with asyncio.timeout(SOON_S):
                        await server.services.cancelled.wait()
                # Bob is none the worse.
                assert await bobs.read() == b"2"
                assert await other.unary_unary(ECHO)(b"", timeout=SOON_S) == b"bob-1:"

    asyncio.run(main())


def test_the_call_of_a_revoked_caller_that_takes_no_answers_ends(fleet: TestFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC can't answer an RPC while it waits to send on it."""
    monkeypatch.setattr("paceline.net.trust.guard.GRACE_S", 0.05)

    async def main() -> None:
        async with served(fleet) as server, server.channel(fleet.member("alice-1")) as channel:
            call = channel.unary_stream(FLOOD)(b"", timeout=SOON_S)
            assert len(await call.read()) == 1 << 20
            async with server.channel(fleet.member("bob-1")) as other:
                bobs = other.unary_stream(COUNT)(b"", timeout=SOON_S)
                assert await bobs.read() == b"1"
                sealed = fleet.revoke("alice-1")
                server.guard.revoked(NodeId("alice-1"), sealed.revocation.not_after)
                async with asyncio.timeout(SOON_S):
                    await server.services.cancelled.wait()
                assert await bobs.read() == b"2"
            again = await refused(channel.unary_unary(ECHO)(b"", timeout=SOON_S))
            assert again.code() is grpc.StatusCode.PERMISSION_DENIED
            call.cancel()

    asyncio.run(main())


def test_what_cant_be_read_is_a_refusal_not_an_accident(fleet: TestFleet) -> None:
    async def main() -> None:
        async with served(fleet) as server, server.channel(fleet.member("alice-1")) as channel:
            with logged() as lines:
                garbled = await refused(channel.unary_unary(CARD)(b"\xff", timeout=SOON_S))
                assert garbled.code() is grpc.StatusCode.INVALID_ARGUMENT
                await lines.line("refused 127.0.0.1 (port", "can't be read", CARD)
                large = await refused(channel.unary_unary(CARD)(bytes(1001), timeout=SOON_S))
                assert large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                await lines.line("refused 127.0.0.1 (port", "1001 bytes; the bound is 1000")
                stream = channel.stream_stream(CARDS)(timeout=SOON_S)
                await stream.write(b"")
                assert await stream.read() == b""
                await stream.write(b"\xff")
                assert (await refused(stream.read())).code() is grpc.StatusCode.INVALID_ARGUMENT
                await lines.line("refused 127.0.0.1 (port", CARDS)

    asyncio.run(main())


def test_one_who_joined_anew_after_being_revoked_belongs(fleet: TestFleet) -> None:
    async def main() -> None:
        async with served(fleet) as server:
            sealed = fleet.revoke("alice-1")
            again = fleet.member("alice-1", at=sealed.revocation.not_after + 1)
            async with server.channel(again) as channel:
                assert await channel.unary_unary(ECHO)(b"", timeout=SOON_S) == b"alice-1:"

    asyncio.run(main())


def test_a_revoked_node_is_not_called(fleet: TestFleet) -> None:
    async def main() -> None:
        async with served(fleet) as server:
            alice = fleet.member("alice-1")
            check_callable(server.identity.member, fleet.revocations.voids)
            fleet.revoke("server-1")
            with pytest.raises(RevokedNode, match="server-1 was revoked"):
                check_callable(server.identity.member, fleet.revocations.voids)
            async with server.channel(alice) as channel:
                with pytest.raises(RevokedNode, match="server-1 was revoked"):
                    await ask_card(channel, alice.root, fleet.revocations.voids, fleet.clock.wall(), SOON_S)

    asyncio.run(main())


def test_the_caller_of_an_expired_certificate_is_refused(fleet: TestFleet) -> None:
    """TLS would refuse it as well; this is for connections older than the certificate's end."""
    member = fleet.member("alice-1").member
    with pytest.raises(NotTrusted, match="expired"):
        fleet.authority.root.member(member.certificate, member.expires_at + 1)
    assert re.fullmatch(r"[0-9a-f]{32}\.node\.paceline\.internal", member.tls_name)
    assert replace(member, serial=255).tls_name == "ff.node.paceline.internal"


def test_a_flood_from_many_addresses_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    refusals = Refusals(clock)
    for number in range(10_000):
        refusals.note(f"fd00::{number:x}", "it showed no certificate of this fleet")
    assert refusals.total == 10_000
    assert len(caplog.records) == Refusals.MOST_LINES
    assert "no more of this for a minute" in caplog.records[-1].getMessage()
    clock.advance(Refusals.EVERY_S)
    refusals.note("fd00::1", "it showed no certificate of this fleet")
    assert len(caplog.records) == Refusals.MOST_LINES + 1
