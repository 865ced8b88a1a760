"""Texts that other nodes embed and rank: whole, by holders of one model, whichever of them answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.fleets import TestFleet
from tests.fakes.foreign_engine import ScriptedEngine
from tests.unit.machine.weights.conftest import new_home  # noqa: F401
from tests.unit.net.member.nodes import in_loop, until, until_seen
from tests.unit.ways.forward.test_routes import A, B, C, card
from tests.unit.ways.pipeline.host.test_serving import nodes

from paceline.core.encoding import Encoded, EncodeRequest, Task
from paceline.core.errors import (
    ContextOverflow,
    EngineGone,
    FleetError,
    InvalidRequest,
    ModelAway,
    NodeUnreachable,
    RequestLoop,
    UnknownModel,
)
from paceline.core.model import ModelRef
from paceline.engines.contract import Capability, EngineIdentity, EngineModel
from paceline.fleet.card import EngineOffer, ModelOffer, NodeCard, Role
from paceline.fleet.eligibility import Eligible, Use
from paceline.machine.embedder import encoder_shape
from paceline.machine.encoders import LocalEncoders
from paceline.machine.foreign.watched import Offering
from paceline.net.wire import encode_pb2 as wire
from paceline.node.serving import FleetServing
from paceline.store.home import Home
from paceline.ways.forward.encode_service import (
    MAX_TEXT_BYTES,
    MAX_TEXTS,
    read_encode_request,
    read_encoded,
    write_encode_request,
    write_encoded,
)
from paceline.ways.forward.encoding import FleetEncoders, parts_of
from paceline.ways.forward.known import LATELY_S
from paceline.ways.forward.routes import RouteStop

Homes = Callable[[str], Home]
IDENTITY = EngineIdentity("scripted", "1")
REF = ModelRef("d" * 64, "stored", "m")


def engine_of(port: int, can: Capability = Capability.EMBEDDINGS, quantisation: str = "F16") -> ScriptedEngine:
    engine = ScriptedEngine([1], 3, url=f"http://127.0.0.1:{port}")
    engine.told = (EngineModel("m", frozenset(), quantisation=quantisation, capabilities=frozenset({can})),)
    engine.bias = float(port)
    return engine


@asynccontextmanager
async def fleet(homes: Homes, *engines: ScriptedEngine, leaves: bool = False) -> AsyncGenerator[list[FleetServing]]:
    """A door without engines, and a node for each engine, which the door sees."""
    made = [("door", homes("door"), None), *((f"n{place}", homes(f"n{place}"), None) for place in range(len(engines)))]
    async with nodes(TestFleet(), *made) as running:
        door, *others = running
        for node, engine in zip(others, engines, strict=True):
            await node.engines.add(engine, IDENTITY, Offering(leaves_network=leaves))
        await until_seen(door.fleet, "door", *(f"n{place}" for place in range(len(engines))))
        await until(lambda: holders(door) == len(engines) and bool(door.encoders.encoders()))
        yield running


def holders(door: FleetServing) -> int:
    return sum(offer.role is Role.EMBEDDER for card in door.fleet.view().cards for offer in card.models)


@in_loop
async def test_a_request_moves_whole_to_the_next_holder(new_home: Homes) -> None:  # noqa: F811
    engines = [engine_of(port) for port in (1, 2)]
    async with fleet(new_home, *engines) as (door, *_):
        assert [(each.name, each.tasks) for each in door.encoders.encoders()] == [("m", {Task.EMBED})]
        engines[0].fails_after = 1  # in the second part of the request
        texts = ["a" * (place % 5 + 1) for place in range(MAX_TEXTS + 1)]
        for _ in range(2):
            made = await door.encoders.encode("m", EncodeRequest(texts))
            assert made.values[:, 0].tolist() == list(map(len, texts))
            assert made.values[:, 1].tolist() == [2.0] * len(texts)
            assert made.tokens == sum(map(len, texts))
        engines[1].trouble = EngineGone("it hangs")
        with pytest.raises((EngineGone, FleetError, ModelAway, UnknownModel)):
            await door.encoders.encode("m", EncodeRequest(texts))


@in_loop
async def test_marks_of_nodes_travel_loops_are_refused_and_errors_name_a_text_by_its_place(new_home: Homes) -> None:  # noqa: F811
    engine = engine_of(1)
    async with fleet(new_home, engine) as (door, has):
        await door.encoders.encode("m", EncodeRequest(["a"]))
        assert engine.worked[-1][2] == (door.engines.mark, has.engines.mark)
        for mark in (door.engines.mark, has.engines.mark):
            with pytest.raises(RequestLoop):
                await door.encoders.encode("m", EncodeRequest(["a"], via=(mark,)))
        assert len(engine.worked) == 1
        with pytest.raises(InvalidRequest) as refused:
            await door.encoders.encode("m", EncodeRequest([*["a"] * MAX_TEXTS, "b", ""], field="documents"))
        assert refused.value.field == f"documents[{MAX_TEXTS + 1}]"


class View:
    """A node's view that tests change. Holders do not work: the first of them fails, or all do."""

    def __init__(self, *cards: NodeCard) -> None:
        self.cards, self.clock = cards, FakeClock()
        node = SimpleNamespace(
            node_id=A,
            meter=SimpleNamespace(retried=0, forwarded=0),
            listen=lambda _: None,
            eligible=lambda _: Eligible(Use.ANSWER, A, self.cards),
            view=dict,
        )
        self.encoders = FleetEncoders(cast("Any", node), LocalEncoders(None), self.clock, "0" * 16)
        self.asked: list[str] = []
        self.encoders._encode_at = self._fail  # type: ignore[method-assign]
        self.encoders.look_again()

    def see(self, *cards: NodeCard) -> None:
        self.cards = cards
        self.encoders.look_again()

    async def _fail(self, stop: RouteStop, *_: object) -> Encoded:
        self.asked.append(stop.node_id)
        raise NodeUnreachable("it is gone")

    async def holders(self, query: str | None = None) -> list[str]:
        """Every node that a request goes to, one after the other."""
        self.asked.clear()
        with pytest.raises((NodeUnreachable, UnknownModel, ModelAway)):
            await self.encoders.encode("m", EncodeRequest(["a"], query))
        return sorted(self.asked)


def own(digest: str = "d", name: str = "m") -> ModelOffer:
    return ModelOffer(name, Role.EMBEDDER, "stored", digest=digest * 64, warm=True, shape=encoder_shape(64, 8))


def of_engine(offer: ModelOffer, *can: str, role: Role = Role.EMBEDDER, leaves: bool = False) -> ModelOffer:
    return replace(offer, role=role, engine=EngineOffer("x", (), capabilities=can, leaves_network=leaves))


EMBEDS, RANKS = "embeddings", "rerank"


@pytest.mark.parametrize(
    ("offers", "vectors", "ranks"),
    [
        ([own(), own()], ["b", "c"], []),
        ([own(), own("e")], ["b"], []),
        ([own(), of_engine(own(), EMBEDS)], ["b", "c"], []),
        ([own(), of_engine(own(), RANKS)], ["b"], ["c"]),
        ([own(), replace(own(), role=Role.VERIFIER)], ["b"], []),
        ([own(), replace(own(), warm=False)], ["b"], []),
        ([of_engine(own(), EMBEDS, RANKS), of_engine(own(), EMBEDS, role=Role.VERIFIER)], ["b", "c"], ["b"]),
        ([own(), of_engine(own(), EMBEDS, leaves=True)], ["b"], []),
        ([of_engine(own(), EMBEDS, leaves=True), of_engine(own(), EMBEDS, leaves=True)], ["b", "c"], []),
    ],
)
@in_loop
async def test_only_holders_of_one_model_that_do_the_task_are_asked(offers: list[ModelOffer], vectors: list[str], ranks: list[str]) -> None:
    view = View(card(B, offers[0]), card(C, offers[1]))
    assert await view.holders() == vectors
    assert await view.holders("a") == ranks


@in_loop
async def test_a_name_keeps_its_meaning_for_as_long_as_a_node_offers_it() -> None:
    view = View(card(C, own("e")))
    view.see(card(B, own("d")), card(C, own("e")))
    assert await view.holders() == ["c"]
    view.see(card(B, own("d")))
    assert await view.holders() == ["b"]
    view.see()
    with pytest.raises(ModelAway):  # it may come back
        await view.encoders.encode("m", EncodeRequest(["a"]))
    view.clock.advance(LATELY_S)
    with pytest.raises(UnknownModel):
        await view.encoders.encode("m", EncodeRequest(["a"]))


@in_loop
async def test_texts_for_a_name_that_was_at_home_lately_do_not_leave() -> None:
    view = View(card(B, own()))
    view.see(card(C, of_engine(own(), EMBEDS, leaves=True)))
    assert await view.holders() == []
    view.clock.advance(LATELY_S)
    assert await view.holders() == ["c"]
    (shown,) = view.encoders.encoders()
    assert (shown.facts.leaves_network, shown.dimensions, shown.max_tokens) == (True, 8, 64)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [([1], [1]), ([1] * (MAX_TEXTS + 1), [MAX_TEXTS, 1]), ([1 << 20, 1, 1 << 20], [1, 1, 1]), ([600_000, 400_000, 1], [3])],
)
def test_parts_are_bounded_and_hold_every_text_once(sizes: list[int], parts: list[int]) -> None:
    request = EncodeRequest(["a" * size for size in sizes])
    found = list(parts_of(request))
    assert [len(part.inputs) for part in found] == parts
    assert [text for part in found for text in part.inputs] == request.inputs
    assert [name for part in found for name in part.names] == request.names


@pytest.mark.parametrize("text", ["a" * (MAX_TEXT_BYTES + 1), "é" * (MAX_TEXT_BYTES // 2 + 1), [7] * (MAX_TEXT_BYTES // 5 + 1)])
def test_a_text_that_fits_no_call_is_too_long(text: Any) -> None:
    with pytest.raises(ContextOverflow):
        list(parts_of(EncodeRequest([text])))


@pytest.mark.parametrize(
    "request_",
    [
        EncodeRequest(["a", "日"], field="prompt"),
        EncodeRequest([[1, 2], [3]], via=("0" * 16,), first=7),
        EncodeRequest(["a"], "", field="documents", first=0),
    ],
)
def test_requests_come_as_they_were_sent(request_: EncodeRequest) -> None:
    message = write_encode_request(REF, request_)
    assert (message.model_id, message.digest, message.quantization) == (REF.name, REF.digest, REF.weights)
    read = read_encode_request(wire.EncodeRequest.FromString(message.SerializeToString()))
    assert read == replace(request_, inputs=[*request_.inputs])


@pytest.mark.parametrize(
    "message",
    [
        wire.EncodeRequest(field="input"),
        wire.EncodeRequest(field="input", texts=["a"], ids=[wire.TokenIds(ids=[1])]),
        wire.EncodeRequest(field="input", texts=["a"] * (MAX_TEXTS + 1)),
        wire.EncodeRequest(field="a\nb", texts=["a"]),
        wire.EncodeRequest(field="input", texts=["a"], via=["no mark"]),
        wire.EncodeRequest(field="input", texts=["a"], via=["0" * 16] * 9),
    ],
)
def test_what_no_caller_writes_is_refused(message: wire.EncodeRequest) -> None:
    with pytest.raises(InvalidRequest):
        read_encode_request(message)


def test_an_answer_comes_in_bounded_messages() -> None:
    vectors = np.arange(300 * 4096, dtype=np.float32).reshape(300, 4096)
    request = EncodeRequest(["a"] * 300)
    messages = list(write_encoded(Encoded(vectors, 300)))
    assert all(message.ByteSize() < (1 << 20) + 100 for message in messages)
    read = [read_encoded(message, request, "b") for message in messages]
    assert np.concatenate([part.values for part in read]).tobytes() == vectors.tobytes()
    assert sum(part.tokens for part in read) == 300


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (None, wire.EncodeResponse(scores=[1.0])),
        (None, wire.EncodeResponse(dimensions=2, vectors=b"\0" * 12)),
        (None, wire.EncodeResponse(dimensions=1 << 20, vectors=b"\0" * 4)),
        (None, wire.EncodeResponse(dimensions=1, vectors=b"\0" * 400)),
        (None, wire.EncodeResponse(dimensions=1, vectors=np.array([np.nan], "<f4").tobytes())),
        ("a", wire.EncodeResponse(dimensions=1, vectors=b"\0" * 4)),
        ("a", wire.EncodeResponse(scores=[1.0] * 9)),
        ("a", wire.EncodeResponse(scores=[float("inf")])),
        ("a", wire.EncodeResponse(scores=[1.0], tokens=1 << 60)),
    ],
)
def test_an_answer_to_something_else_is_refused(query: str | None, message: wire.EncodeResponse) -> None:
    with pytest.raises(FleetError):
        read_encoded(message, EncodeRequest(["a", "b"], query), "b")
