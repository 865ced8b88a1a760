"""A generation over a real connection: what is silent and works on is waited for, what stands still is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.net.test_silence import stand_still

from paceline.core.clock import SystemClock
from paceline.core.errors import NodeStopping, NodeUnreachable, PacelineError, UnknownModel, WayNotAllowed
from paceline.core.following import Holding
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, Grammar, GrammarKind
from paceline.core.ids import NodeId, RequestId
from paceline.core.inference import ModelFacts, ServedModel
from paceline.core.model import ModelRef
from paceline.core.no_tokenizer import NoTokenizer
from paceline.fleet.eligibility import Use
from paceline.net.trust.handlers import rewrap, told
from paceline.net.wire import generate_pb2 as wire
from paceline.net.wire.generate_pb2_grpc import add_GenerateServiceServicer_to_server
from paceline.ways.forward import client as generate_client
from paceline.ways.forward import service as generate_service
from paceline.ways.forward.client import PARTS, AnswerSilence, RemoteStream
from paceline.ways.forward.forwarded import Forwarded, Leg
from paceline.ways.forward.routes import RouteStop
from paceline.ways.forward.service import GenerateServicer, LoadedModel

LOADED = LoadedModel(ModelRef("d", "int4", "m"), "n", 0, 512)
REQUEST = GenerationRequest(RequestId("r"), (1, 2), 8, so_far={0: (3, 4)})


class Slow:
    """`LocalModels` whose answer comes when it is told to."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []
        self.comes = asyncio.Event()
        self.works, self.stops, self.closed = True, False, False
        self.is_outside = False
        self.signs = 0
        """Notices that were due."""

    def find(self, name: str) -> LoadedModel | None:
        return LOADED if name == LOADED.model.name else None

    def served(self, name: str) -> ServedModel | None:
        del name
        facts = ModelFacts(engine="openai", leaves_network=self.is_outside)
        return ServedModel(LOADED.model.name, 0, LOADED.max_context, NoTokenizer(), "fp", facts)

    async def packed_tokenizer(self, name: str) -> tuple[str, bytes]:
        raise NotImplementedError(name)

    def advances(self) -> bool:
        self.signs += 1
        return self.works

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        del model
        self.asked.append(request)
        if self.stops:
            raise NodeStopping("stopping")
        try:
            await self.comes.wait()
            yield [GenerationChunk(request.request_id, 0, (7,), "x", finish_reason=FinishReason.STOP)]
        finally:
            self.closed = True


class Tells(grpc.aio.ServerInterceptor):
    """Of errors, what a node's guard does; without TLS."""

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return rewrap(await continuation(handler_call_details), told)


@asynccontextmanager
async def asked(models: Slow, *allowed: Use) -> AsyncIterator[RemoteStream]:
    server = grpc.aio.server(interceptors=[Tells()])
    add_GenerateServiceServicer_to_server(GenerateServicer(models, lambda _, use: use in allowed), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    stream = RemoteStream(lambda: channel, "b", LOADED, REQUEST)
    try:
        yield stream
    finally:
        await stream.aclose()
        await channel.close()
        await server.stop(None)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_service, "NOTICE_S", 0.02)
    monkeypatch.setattr(generate_client, "SILENCE_S", 2.0)


@in_loop
async def test_an_answer_that_is_worked_on_says_so_until_it_comes() -> None:
    models = Slow()
    async with asked(models) as stream:
        assert [await anext(stream) for _ in range(3)] == [[], [], []]
        models.comes.set()
        while not (item := await anext(stream)):
            pass
        assert [(chunk.token_ids, chunk.request_id) for chunk in item] == [((7,), "r")]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert models.asked[0].so_far == {0: (3, 4)}


@pytest.mark.parametrize(("is_outside", "allowed", "answers"), [(False, (), True), (True, (), False), (True, (Use.REACH_OUTSIDE,), True)])
@in_loop
async def test_an_engine_outside_answers_the_nodes_that_may_reach_it(is_outside: bool, allowed: tuple[Use, ...], answers: bool) -> None:
    models = Slow()
    models.is_outside = is_outside
    models.comes.set()
    async with asked(models, *allowed) as stream:
        if answers:
            await anext(stream)
        else:
            with pytest.raises(WayNotAllowed):
                await anext(stream)
    assert bool(models.asked) == answers


@in_loop
async def test_a_client_that_reads_nothing_for_a_while_is_no_silence_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Slow()
    async with asked(models) as stream:
        assert await anext(stream) == []
        monkeypatch.setattr(generate_client, "SILENCE_S", 0.1)  # ten times over before it is read again
        assert await anext(stream) == []
        before = models.signs
        await until(lambda: models.closed or models.signs > before + 50)
        models.comes.set()
        while not (item := await anext(stream)):
            pass
        assert [chunk.token_ids for chunk in item] == [(7,)]


@in_loop
async def test_an_engine_that_stands_still_is_left_though_its_machine_answers() -> None:
    models = Slow()
    async with asked(models) as stream:
        assert await anext(stream) == []
        models.works = False
        with pytest.raises(NodeUnreachable, match="b has said nothing"):
            assert [item async for item in stream]
    await until(lambda: models.closed)  # the other side learns of the end a little later


@in_loop
async def test_a_node_that_stops_refuses_by_that_name() -> None:
    models = Slow()
    models.stops = True
    async with asked(models) as stream:
        with pytest.raises(NodeStopping):
            await anext(stream)


@in_loop
async def test_time_lost_here_is_no_silence_there() -> None:
    ended = list[bool]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        silence = AnswerSilence(lambda: ended.append(True))
        silence.begin()
        for _ in range(PARTS - 1):
            await stand_still(monkeypatch)
        assert not ended
        silence.end()
        silence.begin()
        for _ in range(PARTS - 1):
            await stand_still(monkeypatch)
        assert not ended
        await stand_still(monkeypatch)
        assert ended == [True]
        assert silence.is_too_long


class Saying(Slow):
    """Says some tokens, and is gone behind them unless they end the answer."""

    def __init__(self, *tokens: int, ends: bool = False) -> None:
        super().__init__()
        self._tokens, self._ends = tokens, ends

    async def generate(self, model: str, request: GenerationRequest) -> AsyncGenerator[Sequence[GenerationChunk], None]:
        del model
        self.asked.append(request)
        yield [GenerationChunk(request.request_id, 0, self._tokens, "", finish_reason=FinishReason.STOP if self._ends else None)]


class OtherGrammars(GenerateServicer):
    """A node whose library is of another version."""

    def _check(self, request: wire.GenerateRequest) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(generate_service, "VERSION", "llguidance 0.0.1, 1")
            super()._check(request)


class NoGrammars(GenerateServicer):
    """A node of a version that knows no grammars, and reads past them."""

    def _check(self, request: wire.GenerateRequest) -> None:
        request.ClearField("grammar")
        super()._check(request)


class Served:
    """`Nodes` over real connections: the first that was not left is asked."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in ports]
        self.told: list[str] = []

    def leg(self, request: GenerationRequest, left: Collection[NodeId], after: Holding | None) -> Leg | None:
        del after
        for place, channel in enumerate(self._channels):
            name = NodeId(str(place))
            if name not in left:
                return Leg(RouteStop(name, b"", "n", ()), RemoteStream(lambda channel=channel: channel, name, LOADED, request))
        return None

    def is_coming(self) -> bool:
        return False

    def ended(self, leg: Leg, error: PacelineError | None) -> None:
        self.told += [] if error is None else [f"{leg.node_id}: {error.message}"]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


@in_loop
async def test_an_answer_of_a_form_goes_on_only_where_the_same_library_follows_it() -> None:
    models = [Saying(7), Saying(8, ends=True), Saying(8, ends=True), Saying(9, ends=True)]
    servicers = [GenerateServicer(models[0]), OtherGrammars(models[1]), NoGrammars(models[2]), GenerateServicer(models[3])]
    servers, ports = [grpc.aio.server(interceptors=[Tells()]) for _ in servicers], list[int]()
    for servicer, server in zip(servicers, servers, strict=True):
        add_GenerateServiceServicer_to_server(servicer, server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
    nodes = Served(ports)
    grammar = Grammar(GrammarKind.REGEX, "a+")
    try:
        for request, expected in ((replace(REQUEST, so_far={}, grammar=grammar), (7, 9)), (replace(REQUEST, so_far={}), (7, 8))):
            nodes.told.clear()
            chunks = [chunk async for item in Forwarded(request, nodes, SystemClock()) for chunk in item]
            assert sum((chunk.token_ids for chunk in chunks), ()) == expected
        # One without a form goes on at any of them.
        assert len(nodes.told) == 1
        assert (models[3].asked[0].grammar, models[3].asked[0].so_far) == (grammar, {0: (7,)})
        assert len(models[1].asked) == 1
        assert not models[2].asked
        others = Served(ports[1:3])
        with pytest.raises(UnknownModel, match="Grammars are followed by llguidance 0"):
            await anext(Forwarded(replace(REQUEST, so_far={}, grammar=grammar), others, SystemClock()))
        await others.close()
    finally:
        await nodes.close()
        for server in servers:
            await server.stop(None)
