"""What goes over ShardService: nothing that makes no sense reaches a host, and a caller's end is the session's end."""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from tests.fakes.clock import FakeClock
from tests.fakes.fleets import TestFleet

from paceline.core.clock import PREPARE_S
from paceline.core.errors import (
    BadPipelineRequest,
    FleetError,
    NotTrusted,
    PacelineError,
    PipelineStalled,
    WeightsMismatch,
)
from paceline.core.ids import NodeId
from paceline.core.model import ActivationDtype, LayerRange, WeightsFormat
from paceline.net.tensor.dialling import tensor_addresses
from paceline.net.trust.certificates import NODE_NAME, Member
from paceline.net.trust.credentials import channel_credentials, server_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import WellFormed
from paceline.net.trust.refusals import Refusals
from paceline.net.wire import shard_pb2 as wire
from paceline.net.wire.shard_pb2_grpc import ShardServiceStub, add_ShardServiceServicer_to_server
from paceline.ways.pipeline import client as shard_client
from paceline.ways.pipeline.client import open_stage, warm_layers
from paceline.ways.pipeline.codec import read_connect, read_event, read_open, write_connect, write_event, write_open
from paceline.ways.pipeline.executor.route import (
    NextStage,
    PipelineFault,
    StageEvent,
    StageLoading,
    StageOpened,
    StageReport,
    StageRequest,
)
from paceline.ways.pipeline.host.host import ShardServicer

REQUEST = StageRequest(bytes(16), "m", "ab" * 32, WeightsFormat.INT4, LayerRange(2, 5), 8, 2, 64, ActivationDtype.BF16, 0.02)
OPENED = StageOpened(1234, bytes(32), 4, 16, "numerics", one_path=True, holds_identity=False)
NEXT = NextStage(NodeId("b"), ("127.0.0.1:5",), bytes(32))
SOON_S = 100.0


class ScriptedHost:
    """A `NodeShardHost` that says what it is told to, then reports for ever."""

    def __init__(self) -> None:
        self.script: list[StageEvent | PacelineError] = [OPENED]
        self.asked: list[StageRequest] = []
        self.connected: list[tuple[bytes, NodeId, NextStage]] = []
        self.refused: set[str] = set()
        self.ended = asyncio.Event()
        self.fault = asyncio.Event()
        self.silent = False

    def admit(self, caller: Member) -> None:
        if caller.node_id in self.refused:
            raise NotTrusted(f"{caller.node_id} is a guest", who=caller.node_id)

    async def open(self, request: StageRequest, caller: Member) -> AsyncGenerator[StageEvent]:
        self.asked.append(request)
        try:
            for event in self.script:
                if isinstance(event, PacelineError):
                    raise event
                yield event
            at = 0
            while True:
                await asyncio.sleep(3600 if self.silent else 0.005)
                at += 1
                yield StageReport(at, at, at, 0, 1.5)
                if self.fault.is_set():
                    yield PipelineFault(NodeId("b"), "pipeline_stalled", "b takes nothing")
                    return
        finally:
            self.ended.set()

    def warm_layers(self, request: StageRequest) -> StageLoading | None:
        self.asked.append(request)
        return StageLoading(41, 100) if len(self.asked) == 1 else None

    async def connect(self, session_id: bytes, caller: Member, to: NextStage) -> None:
        self.connected.append((session_id, caller.node_id, to))


@asynccontextmanager
async def served() -> AsyncIterator[tuple[ScriptedHost, grpc.aio.Channel]]:
    """A host behind a guard, and a member's channel to it."""
    fleet, host = TestFleet(), ScriptedHost()
    refusals = Refusals()
    guard = PeerGuard(fleet.authority.root, fleet.revocations.voids, fleet.clock, refusals)
    server = grpc.aio.server(interceptors=[guard, WellFormed(refusals)])
    add_ShardServiceServicer_to_server(ShardServicer(host, guard.peer), server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(fleet.member("a")))
    await server.start()
    credentials = channel_credentials(fleet.member("user"))
    try:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, [("grpc.ssl_target_name_override", NODE_NAME)]) as channel:
            yield host, channel
    finally:
        await server.stop(None)


def test_requests_and_events_survive_the_wire() -> None:
    assert read_open(write_open(REQUEST)) == REQUEST
    assert read_connect(write_connect(bytes(16), NEXT)) == NEXT
    for event in (
        StageLoading(1, 2),
        OPENED,
        StageReport(5, 4, 3, 1, 0.5, 2),
        PipelineFault(NodeId("b"), "c", "m"),
        PipelineFault(None, "c", "m"),
    ):
        assert read_event(write_event(event), REQUEST) == event


ABSURD: list[dict[str, Any]] = [
    {"session_id": b""},
    {"session_id": bytes(17)},
    {"model_id": ""},
    {"model_id": "m" * 201},
    {"digest": "AB" * 32},
    {"digest": "../" * 20},
    {"quantization": "int3"},
    {"quantization": ""},
    {"first_layer": 5},
    {"first_layer": 6},
    {"stop_layer": 0},
    {"stop_layer": 4_000_000_000},
    {"n_blocks": 0},
    {"n_blocks": 4_000_000_000},
    {"n_blocks": 1},
    {"least_blocks": 0},
    {"least_blocks": 9},
    {"max_rows": 0},
    {"max_rows": 4_000_000_000},
    {"activation_dtype": "fp8"},
    {"report_ms": 0},
    {"report_ms": 4_000_000_000},
]


@pytest.mark.parametrize("change", ABSURD, ids=str)
def test_requests_that_no_stage_could_do_are_refused(change: dict[str, Any]) -> None:
    message = write_open(REQUEST)
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(BadPipelineRequest):
        read_open(message)


@pytest.mark.parametrize(
    "message",
    [
        wire.ConnectStageRequest(node_id="", tensor_addresses=["h:1"], ticket=bytes(32)),
        wire.ConnectStageRequest(node_id="B/../", tensor_addresses=["h:1"], ticket=bytes(32)),
        wire.ConnectStageRequest(node_id="b", tensor_addresses=[], ticket=bytes(32)),
        wire.ConnectStageRequest(node_id="b", tensor_addresses=["h:1"] * 33, ticket=bytes(32)),
        wire.ConnectStageRequest(node_id="b", tensor_addresses=["h:0"], ticket=bytes(32)),
        wire.ConnectStageRequest(node_id="b", tensor_addresses=["http://h:1/"], ticket=bytes(32)),
        wire.ConnectStageRequest(node_id="b", tensor_addresses=["h:1"], ticket=bytes(31)),
    ],
)
def test_nowhere_is_refused(message: wire.ConnectStageRequest) -> None:
    with pytest.raises(BadPipelineRequest):
        read_connect(message)


@pytest.mark.parametrize(
    "event",
    [
        replace(OPENED, tensor_port=0),
        replace(OPENED, ticket=b""),
        replace(OPENED, n_blocks=1),
        replace(OPENED, n_blocks=9),
        replace(OPENED, block_size=0),
        replace(OPENED, numerics_id="n" * 300),
        StageReport(p95_latency_ms=float("nan")),
        StageReport(busy_s=float("inf")),
    ],
)
def test_what_a_stage_says_is_not_believed_when_it_makes_no_sense(event: StageEvent) -> None:
    with pytest.raises(FleetError):
        read_event(write_event(event), REQUEST)


def test_an_event_of_no_kind_is_refused() -> None:
    with pytest.raises(FleetError):
        read_event(wire.OpenStageResponse(), REQUEST)


def test_tensor_addresses_are_on_a_nodes_hosts() -> None:
    assert tensor_addresses(["10.0.0.1:8154", "[::1]:8154", "10.0.0.1:9"], 7) == ("10.0.0.1:7", "[::1]:7")


def test_a_stage_opens_reports_and_faults() -> None:
    async def run() -> None:
        async with served() as (host, channel):
            host.script = [StageLoading(1, 10), StageLoading(10, 10), OPENED]
            seen: list[StageLoading] = []
            stage = await open_stage(channel, NodeId("a"), REQUEST, seen.append)
            assert seen == [StageLoading(1, 10), StageLoading(10, 10)]
            assert (stage.opened, stage.node_id, host.asked) == (OPENED, "a", [REQUEST])
            await stage.connect(NEXT)
            assert host.connected == [(REQUEST.session_id, "user", NEXT)]
            host.fault.set()
            loss = await asyncio.wait_for(asyncio.wrap_future(stage.lost), SOON_S)
            assert loss.code == PipelineStalled.code
            assert loss == PipelineFault(NodeId("b"), "pipeline_stalled", "b takes nothing", reported=True)
            assert stage.report.sent >= 1
            await stage.close()
            assert stage.lost.result() is loss

    asyncio.run(run())


@pytest.mark.parametrize(
    ("told", "still_s", "at"),
    [
        ([(410, 1000)] * 3, shard_client.SILENCE_S, "at 410 of 1000 bytes"),
        ([(1000, 1000)] * 3, PREPARE_S, "at 1000 of 1000 bytes"),
        ([(0, 0)] * 3, PREPARE_S, "at 0 of 0 bytes"),
        ([(410, 1000), (0, 1000), (410, 1000)], shard_client.SILENCE_S, "at 410"),
    ],
)
def test_a_stage_that_loads_nothing_more_is_given_up(told: list[tuple[int, int]], still_s: float, at: str) -> None:
    async def run() -> None:
        clock = FakeClock()

        def tell(loading: StageLoading) -> None:
            clock.advance(0.6 * still_s)

        async with served() as (host, channel):
            host.script = [StageLoading(*each) for each in told]
            with pytest.raises(PipelineStalled, match=f"a loaded nothing more for {still_s:g} s, {at}"):
                await open_stage(channel, NodeId("a"), REQUEST, tell, clock.monotonic)
            await asyncio.wait_for(host.ended.wait(), SOON_S)

    asyncio.run(run())


def test_a_stage_that_loads_further_bytes_is_waited_for_however_long_it_takes() -> None:
    async def run() -> None:
        clock = FakeClock()
        async with served() as (host, channel):
            host.script = [*(StageLoading(done, 1000) for done in range(0, 1000, 50)), OPENED]
            slowly = 0.9 * shard_client.SILENCE_S
            stage = await open_stage(channel, NodeId("a"), REQUEST, lambda _: clock.advance(slowly), clock.monotonic)
            assert stage.opened == OPENED
            await stage.close()

    asyncio.run(run())


def test_layers_are_warmed_without_a_session() -> None:
    async def run() -> None:
        async with served() as (host, channel):
            assert await warm_layers(channel, NodeId("a"), REQUEST) == StageLoading(41, 100)
            assert await warm_layers(channel, NodeId("a"), REQUEST) is None
            plain = replace(REQUEST, session_id=bytes(16), dtype=ActivationDtype.BF16, report_s=0.25)
            assert host.asked == [plain, plain]
            with pytest.raises(BadPipelineRequest, match="layers"):
                await warm_layers(channel, NodeId("a"), replace(REQUEST, layers=LayerRange(5, 5000)))
            host.refused.add("user")
            with pytest.raises(NotTrusted, match="guest"):
                await warm_layers(channel, NodeId("a"), REQUEST)

    asyncio.run(run())


def test_closing_a_stage_ends_it_there() -> None:
    async def run() -> None:
        async with served() as (host, channel):
            stage = await open_stage(channel, NodeId("a"), REQUEST)
            assert not stage.lost.done()
            await stage.close()
            await asyncio.wait_for(host.ended.wait(), SOON_S)
            assert stage.lost.done()
            await stage.close()

    asyncio.run(run())


def test_a_refusal_keeps_its_type() -> None:
    async def run() -> None:
        async with served() as (host, channel):
            host.script = [WeightsMismatch("others", "look")]
            with pytest.raises(WeightsMismatch, match="others"):
                await open_stage(channel, NodeId("a"), REQUEST)
            host.script = [PipelineFault(None, "weights_mismatch", "others")]
            with pytest.raises(WeightsMismatch, match="others"):
                await open_stage(channel, NodeId("a"), REQUEST)
            host.script = [StageReport()]
            with pytest.raises(FleetError, match="not open"):
                await open_stage(channel, NodeId("a"), REQUEST)
            host.refused.add("user")
            with pytest.raises(NotTrusted, match="guest"):
                await open_stage(channel, NodeId("a"), REQUEST)
            stub = ShardServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ConnectStage(write_connect(bytes(16), NEXT))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert host.connected == []

    asyncio.run(run())


def test_a_stage_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_client, "LEAST_SILENCE_S", 0.02)

    async def run() -> None:
        async with served() as (host, channel):
            host.silent = True
            stage = await open_stage(channel, NodeId("a"), replace(REQUEST, report_s=0.01))
            loss = await asyncio.wait_for(asyncio.wrap_future(stage.lost), SOON_S)
            assert loss.code == PipelineStalled.code
            await asyncio.wait_for(host.ended.wait(), SOON_S)

    asyncio.run(run())


def test_a_node_that_takes_calls_and_says_nothing_is_not_waited_for_as_one_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_client, "FIRST_WORD_S", 0.02)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as asleep:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{asleep.getsockname()[1]}")
            with pytest.raises(PipelineStalled, match=r"a has said nothing for 0\.02 s"):
                await open_stage(channel, NodeId("a"), REQUEST)
            await channel.close(None)

    asyncio.run(run())


def test_a_node_that_is_gone_is_unreachable() -> None:
    async def run() -> None:
        async with served() as (_, channel):
            stage = await open_stage(channel, NodeId("a"), REQUEST)
        loss = await asyncio.wait_for(asyncio.wrap_future(stage.lost), SOON_S)
        assert (loss.code, loss.reported) == ("shard_unavailable", False)

    asyncio.run(run())


def test_whatever_is_sent_is_answered_in_a_type() -> None:
    rng = random.Random(3)

    def messages() -> list[tuple[str, Message]]:
        return [
            ("OpenStage", replaced(write_open(REQUEST), rng)),
            ("ConnectStage", replaced(write_connect(secrets.token_bytes(16), NEXT), rng)),
        ]

    async def run() -> None:
        async with served() as (host, channel):
            host.script = [BadPipelineRequest("seen")]
            codes: set[grpc.StatusCode] = set()
            for _ in range(100):
                for method, message in messages():
                    call = channel.unary_stream(f"/paceline.v1.ShardService/{method}")(message.SerializeToString(), timeout=10)
                    try:
                        async for _ in call:
                            codes.add(grpc.StatusCode.OK)
                    except grpc.aio.AioRpcError as error:
                        codes.add(error.code())
            assert codes == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}

    asyncio.run(run())


def replaced(message: Message, rng: random.Random) -> Message:
    """The message with a field of another value."""
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.is_repeated:
        getattr(message, field.name)[:] = [rng.randbytes(5).hex()] * rng.randrange(40)
    elif field.type == field.TYPE_STRING:
        setattr(message, field.name, rng.choice(["", "x", "é", "\n", "y" * 5000, "0" * 64]))
    elif field.type == field.TYPE_BYTES:
        setattr(message, field.name, rng.randbytes(rng.choice([0, 1, 16, 32, 5000])))
    else:
        setattr(message, field.name, rng.choice([0, 1, 5, 17, 1 << 20, (1 << 32) - 1]))
    return message
