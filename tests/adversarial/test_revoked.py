"""A machine that was put out stays out: with its token, with its open connections, with what it began and never finished."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.net.trust.joining import IssuerNode, begun_calls
from tests.unit.net.trust.logs import logged
from tests.unit.net.trust.served import COUNT, ECHO, SOON_S, Served, served

from paceline.core.errors import ConfigError, JoinRefused
from paceline.core.ids import NodeId
from paceline.net.join_client import join
from paceline.net.trust.folder import FleetFolder
from paceline.node import enrolment


@pytest.fixture
def node(tmp_path: Path) -> IssuerNode:
    return IssuerNode.make(tmp_path / "fleet")


def test_row_10_a_token_is_void_once_any_node_is_revoked(node: IssuerNode) -> None:
    async def main() -> None:
        token = node.mint()
        async with node.hosted():
            await join(token, NodeId("visitor-1"), node.clock)
            node.issuer.revoke(NodeId("visitor-1"))
            node.mint()  # which keeps the port open
            for name in ("visitor-1", "visitor-2"):
                with logged() as lines:
                    with pytest.raises(JoinRefused, match="The token was voided") as caught:
                        await join(token, NodeId(name), node.clock)
                    assert "paceline token" in caught.value.hint
                    await lines.line("refused 127.0.0.1", "voided", name)
            assert node.issuer.issued() == ("visitor-1",)
            # A person may say that others still need it.
            kept = node.mint()
            node.issuer.revoke(NodeId("visitor-1"), keep_tokens=True)
            assert (await join(kept, NodeId("friend-1"), node.clock)).identity.node_id == "friend-1"

    asyncio.run(main())


def test_row_11_tokens_are_listed_and_voided(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path / "fleet")
    enrolment.start_fleet(folder, "first-1", None)
    assert enrolment.list_tokens(folder) == ()
    one, other = (enrolment.invite(folder, ttl_s=ttl_s, uses=uses, addresses=["127.0.0.1"]) for ttl_s, uses in ((60, 1), (600, 3)))
    listed = enrolment.list_tokens(folder)
    assert [(token.token_id, token.uses_left) for token in listed] == [(one.token_id.hex(), 1), (other.token_id.hex(), 3)]
    assert not any(token.secret.hex() in repr(listed) for token in (one, other))
    for wrong in ("", "x", "all-of-them"):
        with pytest.raises(ConfigError, match="no open token"):
            enrolment.void_tokens(folder, wrong)
    assert enrolment.void_tokens(folder, one.token_id.hex()[:10]) == 1
    assert [token.token_id for token in enrolment.list_tokens(folder)] == [other.token_id.hex()]
    assert enrolment.void_tokens(folder, "all") == 1
    assert enrolment.list_tokens(folder) == ()
    assert enrolment.void_tokens(folder, "all") == 0


def test_row_11_it_is_known_by_which_token_a_machine_came(node: IssuerNode) -> None:
    async def main() -> None:
        token = node.mint(uses=2)
        async with node.hosted():
            await join(token, NodeId("bob-1"), node.clock)
        (listed,) = node.issuer.open_tokens()
        assert (listed.joined, listed.uses_left) == (("bob-1",), 1)

    asyncio.run(main())


UNFINISHED = struct.pack("!BI", 0, 1000) + bytes(900)
"""A message of 1000 bytes without its last hundred."""


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not true():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)


def revoke(server: Served, name: str) -> None:
    sealed = server.fleet.revoke(name)
    server.guard.revoked(NodeId(name), sealed.revocation.not_after)


async def refused(call: Awaitable[object]) -> bool:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.PERMISSION_DENIED
    return False


def test_row_13_a_revocation_ends_streams_and_refuses_calls_on_connections_that_are_open() -> None:
    async def main() -> None:
        fleet = TestFleet()
        async with served(fleet) as server, server.channel(fleet.member("alice-1")) as idle:
            await idle.unary_unary(ECHO)(b"", timeout=SOON_S)
            async with server.channel(fleet.member("alice-1")) as streaming, server.channel(fleet.member("bob-1")) as other:
                call = streaming.unary_stream(COUNT)(b"", timeout=SOON_S)
                assert [await call.read() for _ in range(2)] == [b"1", b"2"]
                stays = other.unary_stream(COUNT)(b"", timeout=SOON_S)
                assert await stays.read() == b"1"
                revoke(server, "alice-1")
                assert await refused(call.read())
                assert await refused(idle.unary_unary(ECHO)(b"", timeout=SOON_S))
                assert await refused(streaming.unary_unary(ECHO)(b"", timeout=SOON_S))
                assert await stays.read() == b"2"

    asyncio.run(main())


def test_row_13_a_revocation_ends_what_was_begun_and_not_finished() -> None:
    async def main() -> None:
        fleet = TestFleet()
        async with served(fleet) as server:
            # Without any whole call, and beside calls of the same node.
            unfinished = begun_calls(server.port, 8, fleet.member("alice-1"), ECHO, UNFINISHED)
            async with unfinished, server.channel(fleet.member("alice-1")) as channel:
                await channel.unary_unary(ECHO)(b"", timeout=SOON_S)
                await until(lambda: server.begun("alice-1") == 8)
                revoke(server, "alice-1")
                await until(lambda: not server.begun("alice-1"))

    asyncio.run(main())


@pytest.mark.parametrize("part", [UNFINISHED, struct.pack("!BI", 0, 0)])
def test_row_13_one_that_was_revoked_before_has_no_call(part: bytes) -> None:
    async def main() -> None:
        fleet = TestFleet()
        alice = fleet.member("alice-1")
        fleet.revoke("alice-1")
        async with served(fleet) as server, begun_calls(server.port, 8, alice, ECHO, part):
            await until(lambda: server.guard.refusals.total == 8)
            assert not server.begun("alice-1")

    asyncio.run(main())
