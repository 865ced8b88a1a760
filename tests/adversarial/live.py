"""A node with an engine that runs, on an event loop in a thread, and a guest that calls it over mTLS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from tests.fakes.engines import VOCAB, VOCABULARY
from tests.fakes.executors import InOrderExecutor
from tests.fakes.fleets import TestFleet
from tests.fakes.null_backend import NullRunner
from tests.unit.net.member.nodes import make_node
from tests.unit.ways.draft.proposers import Lookup

from paceline.backends.cpu.sampler import CompiledSampler
from paceline.core.clock import SystemClock
from paceline.core.ids import Trust
from paceline.core.inference import ServedModel
from paceline.core.model import ModelRef
from paceline.core.text import Tokenizer
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.machine.host import EngineHost
from paceline.net.channels import Purpose
from paceline.net.member.node import FleetNode
from paceline.net.server import Service
from paceline.net.wire import generate_pb2
from paceline.net.wire.generate_pb2_grpc import GenerateServiceStub
from paceline.ways.draft.pool import ProposerPool, proposer_service
from paceline.ways.forward.service import LoadedModel, LocalModels, generate_service

T = TypeVar("T")
BOUND_S = 100.0
CONFIG = EngineConfig(max_context=64, max_running=8, max_waiting=64, prefill_chunk=8)


@contextmanager
def loop_in_thread() -> Generator[asyncio.AbstractEventLoop, None, None]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(BOUND_S)
        loop.close()


@dataclass(slots=True)
class LiveNode:
    """A member with an engine, and a guest of its fleet."""

    node: FleetNode
    guest: FleetNode
    member: FleetNode
    host: EngineHost
    loop: asyncio.AbstractEventLoop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(BOUND_S)

    def channel(self, caller: FleetNode | None = None) -> grpc.aio.Channel:
        return (caller or self.guest).pool.get(Purpose.STREAM, self.node.addresses[0], self.node.identity.member)

    async def ask(
        self, request: generate_pb2.GenerateRequest, caller: FleetNode | None = None
    ) -> tuple[grpc.StatusCode, list[generate_pb2.GenerationChunk]]:
        """What the node answers: its status, and the chunks before it."""
        chunks: list[generate_pb2.GenerationChunk] = []
        try:
            async for message in cast("Any", GenerateServiceStub(self.channel(caller))).Generate(request, timeout=BOUND_S):
                chunks += message.chunks
        except grpc.aio.AioRpcError as error:
            return error.code(), chunks
        return grpc.StatusCode.OK, chunks


def request(*prompt: int, n: int = 1, max_tokens: int = 4, sampling: generate_pb2.Sampling | None = None) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        model_id="null",
        digest="d",
        numerics_id="null",
        prompt_ids=prompt or (1, 2, 3),
        max_tokens=max_tokens,
        n=n,
        ignore_eos=True,
        sampling=sampling or generate_pb2.Sampling(seed=1, temperature=1, top_p=1, repetition_penalty=1),
    )


@contextmanager
def live_node(root: Path, config: EngineConfig = CONFIG, services: Sequence[Service] = ()) -> Generator[LiveNode, None, None]:
    with loop_in_thread() as loop:
        whole = _live(root, config, loop, services)
        live = asyncio.run_coroutine_threadsafe(whole.__aenter__(), loop).result(BOUND_S)
        try:
            yield live
        finally:
            asyncio.run_coroutine_threadsafe(whole.__aexit__(None, None, None), loop).result(BOUND_S)


@asynccontextmanager
async def _live(root: Path, config: EngineConfig, loop: asyncio.AbstractEventLoop, services: Sequence[Service]) -> AsyncGenerator[LiveNode]:
    fleet = TestFleet()
    node, guest = make_node(fleet, root, "desk"), make_node(fleet, root, "visitor", trust=Trust.GUEST)
    member = make_node(fleet, root, "laptop")
    executor = InOrderExecutor(NullRunner(n_blocks=128, block_size=4, vocab=VOCAB), 1)
    sampler = CompiledSampler(VOCAB, 1)
    engine = Engine(executor, VOCABULARY, config, SystemClock(), sampler=sampler)
    model = ServedModel("null", 0, config.max_context, cast("Tokenizer", None), "fp")
    host = EngineHost(engine, sampler.close, model, config, SystemClock())
    models = LocalModels(host, (LoadedModel(ModelRef("d", "", "null"), "null", 0, config.max_context),), node.meter)
    desk = ProposerPool({"lookup": Lookup()})
    await node.start(
        lambda _: generate_service(models),
        lambda guard: proposer_service(desk, guard.peer),
        *(lambda _, one=one: one for one in services),
    )
    try:
        yield LiveNode(node, guest, member, host, loop)
    finally:
        await guest.pool.close()
        await member.pool.close()
        await node.stop()
        desk.close()
        await asyncio.to_thread(host.close)
