"""Calls that are begun, and whose request never comes whole: a member holds few of them, not for long, and nobody waits for them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from tests.adversarial.live import LiveNode, live_node
from tests.adversarial.test_revoked import UNFINISHED
from tests.adversarial.test_rpc_bounds import METHODS
from tests.fakes.fleets import TestFleet
from tests.unit.net.trust.joining import begun_calls, hold_calls, leave_answers
from tests.unit.net.trust.logs import logged
from tests.unit.net.trust.served import CARD, COUNT, ECHO, SOON_S, served

from paceline.net.trust import handlers
from paceline.net.trust.handlers import MOST_BEGUN, MOST_READS, MOST_UNREAD_BYTES
from paceline.net.wire import fleet_pb2
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceStub


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Generator[LiveNode, None, None]:
    with live_node(tmp_path_factory.mktemp("live")) as node:
        yield node


@pytest.mark.parametrize("path", [ECHO, COUNT, CARD])
def test_row_32_a_member_with_a_live_call_begins_only_so_many_that_it_does_not_finish(path: str) -> None:
    async def main() -> None:
        fleet = TestFleet()
        alice = fleet.member("alice-1")
        async with served(fleet) as server, server.channel(alice) as channel, server.channel(fleet.member("bob-1")) as other:
            live = channel.unary_stream(COUNT)(b"", timeout=SOON_S)
            assert await live.read() == b"1"
            # Over several connections, each with a call that lives: the share is the node's.
            hold = partial(begun_calls, server.port, caller=alice, path=path, part=UNFINISHED, live=COUNT)
            async with hold(MOST_READS - 1), hold(MOST_BEGUN - MOST_READS + 1):
                async with asyncio.timeout(SOON_S):
                    while server.begun("alice-1") < MOST_BEGUN:  # noqa: ASYNC110 - there is no event
                        await asyncio.sleep(0.01)
                with logged() as lines:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await channel.unary_unary(ECHO)(b"one more", timeout=SOON_S)
                    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    await lines.line("refused 127.0.0.1", f"More than {MOST_BEGUN} requests have begun to come")
                assert await other.unary_unary(ECHO)(b"", timeout=SOON_S) == b"bob-1:"
                assert await live.read() == b"2"
            # What it hung up on is forgotten.
            async with asyncio.timeout(SOON_S):
                while server.begun("alice-1"):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            assert await channel.unary_unary(ECHO)(b"", timeout=SOON_S) == b"alice-1:"

    asyncio.run(main())


def test_row_32_what_is_begun_and_not_finished_ends_though_its_member_has_a_live_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "WHOLE_S", 0.2)

    async def main() -> None:
        fleet = TestFleet()
        alice = fleet.member("alice-1")
        async with served(fleet) as server, server.channel(alice) as channel:
            live = channel.unary_stream(COUNT)(b"", timeout=SOON_S)
            assert await live.read() == b"1"
            with logged() as lines:
                async with begun_calls(server.port, 8, alice, ECHO, UNFINISHED, live=COUNT):
                    await lines.line("refused 127.0.0.1", "A request has not come whole within 0.2 s")
                    async with asyncio.timeout(SOON_S):
                        while server.begun("alice-1"):  # noqa: ASYNC110 - there is no event
                            await asyncio.sleep(0.01)
            assert await live.read() == b"2"

    asyncio.run(main())


MIB = 1 << 20


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", sorted(METHODS))
def test_a_guest_that_leaves_128_messages_unfinished_holds_little(live: LiveNode, path: str) -> None:
    live.run(check_memory(live, path, b""))


def test_a_guest_that_leaves_128_messages_unfinished_behind_whole_ones_holds_little(live: LiveNode) -> None:
    live.run(check_memory(live, "/paceline.v1.ProposerService/ProposeBlocks", bytes(5)))


async def check_memory(live: LiveNode, path: str, first: bytes) -> None:
    process, unfinished = psutil.Process(), struct.pack("!BI", 0, 2_100_064) + bytes(2_100_000)
    port = int(live.node.addresses[0].rpartition(":")[2])
    (await hold_calls(port, 1, live.guest.identity, path, unfinished)).transport.abort()  # what a first call takes is kept
    before = process.memory_info().rss
    writer = await hold_calls(port, 128, live.guest.identity, path, unfinished, first)
    held = process.memory_info().rss - before
    writer.transport.abort()
    assert held < 32 * MIB


def test_a_guest_that_takes_no_answers_makes_a_node_hold_few(live: LiveNode) -> None:
    async def main() -> None:
        process, asked = psutil.Process(), fleet_pb2.MeasureLinkRequest(response_bytes=MIB).SerializeToString()
        leave = partial(leave_answers, int(live.node.addresses[0].rpartition(":")[2]), caller=live.guest.identity, message=asked)
        before, refused, writers = process.memory_info().rss, live.node.refusals.total, list[asyncio.StreamWriter]()
        for _ in range(2):
            writers.append(await leave(120, path="/paceline.v1.CapabilityService/MeasureLink"))
        async with asyncio.timeout(SOON_S):
            while live.node.refusals.total < refused + 200:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.01)
        held = process.memory_info().rss - before
        for writer in writers:
            writer.transport.abort()
        assert held < 6 * MOST_UNREAD_BYTES
        ask: Any = CapabilityServiceStub(live.channel()).MeasureLink
        async with asyncio.timeout(SOON_S):
            while True:  # until the node knows that they are gone
                with suppress(grpc.aio.AioRpcError):
                    assert (await ask(fleet_pb2.MeasureLinkRequest(response_bytes=MIB))).payload == bytes(MIB)
                    return
                await asyncio.sleep(0.1)

    live.run(main())


def test_a_call_without_its_request_is_refused() -> None:
    async def main() -> None:
        fleet = TestFleet()
        async with served(fleet) as server, server.channel(fleet.member("alice-1")) as channel:
            call = channel.stream_unary(ECHO)(timeout=SOON_S)
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())
