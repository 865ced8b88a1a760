"""A generation over a real connection: what is silent and works on is waited for, what stands still is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from tests.unit.node.fleet.nodes import in_loop, until
from tests.unit.transport.test_silence import stand_still

from paceline.core.errors import NodeStopping, NodeUnreachable
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.transport import generate_client, generate_service
from paceline.transport.generate_client import PARTS, RemoteStream, Silence
from paceline.transport.generate_service import GenerateServicer, LoadedModel
from paceline.transport.wire.generate_pb2_grpc import add_GenerateServiceServicer_to_server

LOADED = LoadedModel("m", "d", "int4", "n", 0, 512)
REQUEST = GenerationRequest(RequestId("r"), (1, 2), 8, so_far={0: (3, 4)})


class Slow:
    """`LoadedModels` whose answer comes when it is told to."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []
        self.comes = asyncio.Event()
        self.works, self.stops, self.closed = True, False, False
        self.signs = 0
        """Notices that were due."""

    def find(self, name: str) -> LoadedModel | None:
        return LOADED if name == LOADED.name else None

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


@asynccontextmanager
async def asked(models: Slow) -> AsyncIterator[RemoteStream]:
    server = grpc.aio.server()
    add_GenerateServiceServicer_to_server(GenerateServicer(models), server)
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
    assert models.closed


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
        silence = Silence(lambda: ended.append(True))
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
