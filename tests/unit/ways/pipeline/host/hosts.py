"""Machines that host shards, and one that uses them, in this process: real gRPC and real tensor sockets over mTLS, on models made up here."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import grpc.aio
import numpy as np
import numpy.typing as npt
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import BOUND_S, Given

from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.table import Kernels
from paceline.core.background import Background
from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import BadPipelineRequest, NotTrusted
from paceline.core.ids import BatchId, NodeId, SequenceId, Trust
from paceline.core.model import ActivationDtype, LayerRange, ModelSpec, RopeSpec, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.local import Int32, LayerRunner, RowPlan
from paceline.fleet.eligibility import TrustPolicy
from paceline.machine.devices import LocalDevice
from paceline.net.channels import CHANNEL_OPTIONS
from paceline.net.server import NodeServer, RpcMeter
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.certificates import Member
from paceline.net.trust.credentials import channel_credentials
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.identity import Identity
from paceline.net.trust.refusals import Refusals
from paceline.ways.pipeline.client import RemoteStage, open_stage
from paceline.ways.pipeline.executor.route import ActivationSink, NextStage, StageRequest
from paceline.ways.pipeline.executor.stage import StageBatch
from paceline.ways.pipeline.host.ends import ExpectedInput, TensorEnds
from paceline.ways.pipeline.host.host import NodeShardHost, shard_service
from paceline.ways.pipeline.host.loading import FoundWeights, LoadMeter, LoadsLayers
from paceline.ways.pipeline.host.session import HostLimits
from paceline.ways.pipeline.host.session_kv import StageDisk
from paceline.ways.pipeline.host.warm import WarmShards
from paceline.ways.pipeline.meter import ShardMeter

Result = TypeVar("Result")
Bits = npt.NDArray[np.uint16]

SPEC = ModelSpec(
    model_type="llama", n_layers=6, hidden=64, n_heads=2, n_kv_heads=1, head_dim=32, ffn=96, vocab=97, max_context=256,
    rms_eps=1e-5, rope=RopeSpec(10_000.0), tied_head=True,
)  # fmt: skip
DIGEST = "ab" * 32
MODEL = "tiny"


class CountingRunner:
    """A `LayerRunner` whose layers each add one to every value's bits; it notes what it is asked to run."""

    holds_identity, one_path, numerics_id = True, True, "counting"

    def __init__(self, options: LoadOptions) -> None:
        self.layers, self.n_blocks, self.block_size = options.layers, options.n_blocks, options.block_size
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Event()
        self.blocks: list[int] = []
        self.kv: dict[int, bytes] = {}
        """Of blocks that were filled from elsewhere."""

    def embed(self, token_ids_T: Int32) -> Bits:
        raise AssertionError("a stage holds no embedding")

    def run_layers(self, x_TD: Bits, plan: RowPlan, part: LayerRange | None = None) -> Bits:
        assert not self.closed, "a shard is freed while it runs"
        self.running.set()
        assert self.gate.wait(BOUND_S)
        self.blocks += [int(block) for block in plan.tables_SB.flat if block >= 0]
        return x_TD + np.uint16(len(part or self.layers))

    def to_wire(self, x_TD: Bits) -> Bits:
        return x_TD

    def from_wire(self, x_TD: Bits) -> Bits:
        return x_TD

    def logits(self, x_TD: Bits, rows_R: Int32) -> npt.NDArray[np.float32]:
        raise AssertionError("a stage holds no head")

    kv_layout = "counting"

    @property
    def block_bytes(self) -> int:
        return 8 * len(self.layers)

    def export_block(self, block: int, into: memoryview, part: LayerRange | None = None) -> None:
        assert not self.closed, "a block is copied out of a shard that was freed"
        into[:] = self.kv.get(block, bytes(block % 256 for _ in range(8 * len(part or self.layers))))

    def import_block(self, block: int, data: memoryview, part: LayerRange | None = None) -> None:
        assert not self.closed, "a block is copied into a shard that was freed"
        assert len(data) == 8 * len(part or self.layers)
        self.kv[block] = bytes(data)

    def close(self) -> None:
        self.closed = True


class CountingLoads:
    """`LoadsLayers` that makes those, and waits where a test says so."""

    def __init__(self) -> None:
        self.runners: list[CountingRunner] = []
        self.asked: list[LoadOptions] = []
        self.gate = threading.Event()
        self.gate.set()
        self.given_up = threading.Event()
        self.fault: Exception | None = None

    def __call__(self, source: WeightSource, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
        self.asked.append(options)
        try:
            while not self.gate.wait(0.005):
                progress(1, 2)
        except BaseException:
            self.given_up.set()
            raise
        if self.fault is not None:
            raise self.fault
        self.runners.append(CountingRunner(options))
        return self.runners[-1]


@dataclass(slots=True)
class SeededFinder:
    """`FindsWeights` with one model."""

    stopped: list[StageRequest] = field(default_factory=list[StageRequest])
    """What was on its way, and was not wanted."""

    async def find(self, request: StageRequest, meter: LoadMeter) -> FoundWeights:
        if request.digest != DIGEST:
            raise BadPipelineRequest(f"Nobody has {request.digest[:12]}")
        return FoundWeights(MODEL, SeededWeights(SPEC), lambda: self.stopped.append(request))


@dataclass(slots=True)
class Net:
    """A CA and what its members know of one another."""

    fleet: TestFleet = field(default_factory=TestFleet)
    members: dict[str, Member] = field(default_factory=dict)

    def identity(self, name: str) -> Identity:
        identity = self.fleet.member(name, trust=Trust.GUEST if name == "guest" else Trust.MEMBER)
        self.members[name] = identity.member
        return identity

    def member_of(self, node_id: NodeId) -> Member:
        if node_id not in self.members:
            raise BadPipelineRequest(f"There is no node {node_id}")
        return self.members[node_id]

    def ends(self, identity: Identity) -> tuple[TensorListener, TensorEnds]:
        listener = TensorListener(identity, self.fleet.revocations.voids, self.fleet.clock, Refusals())
        listener.start("127.0.0.1")
        return listener, TensorEnds(
            lambda: listener, identity, self.fleet.revocations.voids, self.member_of, lambda _, port: [f"127.0.0.1:{port}"]
        )


@dataclass(slots=True)
class Hosting:
    """A machine that serves shards."""

    node_id: NodeId
    member: Member
    address: str
    host: NodeShardHost
    warm: WarmShards
    meter: ShardMeter
    guard: PeerGuard
    listener: TensorListener
    server: NodeServer
    loads: CountingLoads
    finder: SeededFinder
    devices: Sequence[LocalDevice]

    def next_stage(self, ticket: bytes) -> NextStage:
        return NextStage(self.node_id, (f"127.0.0.1:{self.listener.port}",), ticket)

    @property
    def runner(self) -> CountingRunner:
        return self.loads.runners[-1]


def some_device(free_bytes: Callable[[], int], *weights: WeightsFormat) -> LocalDevice:
    """What runs these weights formats, or all, in memory of its own."""
    return LocalDevice(Kernels.TORCH, weights or tuple(WeightsFormat), lambda: "some device", free_bytes, free_bytes, lambda _: 1e10)


@asynccontextmanager
async def hosting(
    net: Net,
    name: str,
    *,
    limits: HostLimits | None = None,
    load: LoadsLayers | None = None,
    refuse: Sequence[str] = (),
    free_bytes: Callable[[], int] = lambda: 1 << 30,
    devices: Sequence[LocalDevice] | None = None,
    low_bytes: int = 0,
    clock: Clock | None = None,
    disk: StageDisk | None = None,
) -> AsyncIterator[Hosting]:
    identity, limits, meter, loads = net.identity(name), limits or HostLimits(), ShardMeter(), CountingLoads()
    listener, ends = net.ends(identity)
    finder = SeededFinder()
    devices = devices or (some_device(free_bytes),)
    warm = WarmShards(
        finder, load or loads, limits, devices=devices, low_bytes=low_bytes, threads=1, kernel_cache=None,
        meter=meter, clock=clock or SystemClock(), on_change=lambda: None,
    )  # fmt: skip

    def check(caller: Member) -> None:
        if caller.node_id in refuse:
            raise NotTrusted(f"{caller.node_id} is a guest", who=caller.node_id)

    host = NodeShardHost(warm, ends, limits, meter, SystemClock(), check, disk)
    refusals = Refusals()
    guard = PeerGuard(net.fleet.authority.root, net.fleet.revocations.voids, net.fleet.clock, refusals)
    server = NodeServer(identity, guard, RpcMeter(), TrustPolicy())
    server.add(shard_service(host, guard.peer))
    port = await server.start("127.0.0.1", 0)
    host.start(Background(SystemClock()))
    try:
        yield Hosting(
            identity.node_id, identity.member, f"127.0.0.1:{port}", host, warm, meter, guard, listener, server, loads, finder, devices
        )
    finally:
        await server.stop(0.1)
        await host.close()
        await asyncio.to_thread(listener.close)


class User:
    """A machine that uses stages."""

    def __init__(self, net: Net, name: str = "user") -> None:
        self.net, self.identity = net, net.identity(name)
        self.listener, self.ends = net.ends(self.identity)
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()
        await asyncio.to_thread(self.listener.close)

    def channel(self, at: Hosting) -> grpc.aio.Channel:
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", at.member.tls_name)]
        channel = grpc.aio.secure_channel(at.address, channel_credentials(self.identity), options)
        self.stack.push_async_callback(channel.close, None)
        return channel

    async def open(self, at: Hosting, request: StageRequest | None = None, channel: grpc.aio.Channel | None = None) -> RemoteStage:
        stage = await open_stage(channel or self.channel(at), at.node_id, request or wanted())
        self.stack.push_async_callback(stage.close)
        return stage

    def expect(self) -> tuple[ExpectedInput, NextStage]:
        """Where a route may end."""
        ticket = secrets.token_bytes(32)
        expected = self.ends.expect(ticket, ActivationDtype.BF16, SPEC.hidden)
        return expected, NextStage(self.identity.node_id, (f"127.0.0.1:{self.listener.port}",), ticket)

    async def reach(self, at: Hosting, stage: RemoteStage) -> ActivationSink:
        """The way in."""
        sink = await in_thread(self.ends.way(at.next_stage(stage.opened.ticket), ActivationDtype.BF16), soon())
        self.stack.callback(sink.close)
        return sink

    async def route(self, *stages: tuple[Hosting, RemoteStage]) -> Route:
        """Connect stages, from here and back to here."""
        expected, end = self.expect()
        self.stack.callback(expected.close)
        nexts = [at.next_stage(stage.opened.ticket) for at, stage in stages[1:]] + [end]
        await asyncio.gather(*(stage.connect(to) for (_, stage), to in zip(stages, nexts, strict=True)))
        return Route(await self.reach(*stages[0]), expected)


@dataclass(slots=True)
class Route:
    """The two ends of a connected chain."""

    sink: ActivationSink
    expected: ExpectedInput
    source: Any = None

    async def run(self, batch: StageBatch, x_TD: Bits) -> Bits:
        def there_and_back() -> Bits:
            self.sink.send(batch, x_TD, soon())
            self.source = self.source or self.expected.accept(soon())
            got, y_TD = self.source.receive(soon())
            assert got.batch_id == batch.batch_id
            return np.array(y_TD, np.uint16)

        return await in_thread(there_and_back)


async def in_thread(work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    return await asyncio.to_thread(work, *args, **kwargs)


def soon() -> float:
    return time.monotonic() + BOUND_S


def wanted(first: int = 0, stop: int = 3, **changes: Any) -> StageRequest:
    """A request; each has an id of its own."""
    request = StageRequest(
        secrets.token_bytes(16), MODEL, DIGEST, WeightsFormat.BF16, LayerRange(first, stop), n_blocks=8, least_blocks=2, max_rows=16,
        report_s=0.02,
    )  # fmt: skip
    return replace(request, **changes)


def batch_of(batch_id: int, *, rows: int = 4, first: int = 0, blocks: Sequence[int] = (0,), sequence: int = 1, path: int = 0) -> StageBatch:
    return StageBatch(BatchId(batch_id), [SequenceId(sequence)], [rows], [first], [path], [len(blocks)], list(blocks))


def rows_of(n: int, seed: int = 0) -> Bits:
    """Residuals of a size that models have."""
    values = np.random.default_rng(seed).standard_normal((n, SPEC.hidden)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
