"""Whom a router asks after somebody broke a route: others first; who only stalled, again, before a request ends for want of anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.hosts import in_thread
from tests.unit.ways.pipeline.routes.test_choosing import BEE, CARDS, CAT, DOG, FREE, OWN

from paceline.core.errors import FleetError, NodeUnreachable, PipelineError, PipelineStalled, ShardUnavailable, WeightsMismatch
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerSpan
from paceline.fleet.card import NodeCard
from paceline.ways.pipeline.executor.route import Opening, PipelineFault, StageLoading
from paceline.ways.pipeline.meter import PipelineMeter
from paceline.ways.pipeline.routes.opening import NotOpened, StageLoads
from paceline.ways.pipeline.routes.router import LAST_RESORT_S, FleetRouter


@dataclass(slots=True)
class Eyes:
    """`FleetAccess` of these cards."""

    held: Sequence[NodeCard]
    node_id: NodeId = OWN

    def cards(self) -> Sequence[NodeCard]:
        return self.held

    def trust(self) -> dict[NodeId, Trust]:
        return {}

    def wait_for_change(self, seconds: float) -> None:
        del seconds


@dataclass(slots=True)
class Opens:
    """An `Opener` that says whom it was asked to open a route over."""

    least_blocks, block_size = 2, 16

    asked: list[set[NodeId]] = field(default_factory=list[set[NodeId]])
    names: list[Mapping[LayerSpan, bytes]] = field(default_factory=list[Mapping[LayerSpan, bytes]])
    """Of their KV."""
    may: asyncio.Event = field(default_factory=asyncio.Event)
    """Until then it takes its time."""
    stages: Sequence[LayerSpan] = ()
    """Of the route that was opened last, which this stands for."""
    closed: int = 0
    done: int = 0
    """Bytes of a hundred that each machine says it has loaded."""
    refuses: dict[NodeId, FleetError] = field(default_factory=dict[NodeId, FleetError])

    async def open(self, parts: Sequence[LayerSpan], *, loads: StageLoads, kv: Mapping[LayerSpan, bytes]) -> Any:
        self.names.append(kv)
        self.asked.append({part.node_id for part in parts})
        for part in parts:
            loads.note_progress(part, StageLoading(self.done, 100))
        await self.may.wait()
        if refused := {part.node_id: self.refuses[part.node_id] for part in parts if part.node_id in self.refuses}:
            raise NotOpened(refused)
        self.stages = parts
        return self

    def close(self) -> None:
        self.closed += 1


class Bench:
    """A router of a fleet with these nodes."""

    def __init__(self, *names: NodeId) -> None:
        self.clock, self.opens = FakeClock(), Opens()
        self.opens.may.set()
        eyes: Any = Eyes([card for card in CARDS if card.node_id in {OWN, *names}])
        self.router = FleetRouter(eyes, cast("Any", self.opens), FREE, asyncio.get_running_loop(), self.clock, PipelineMeter())

    async def found(self) -> set[NodeId]:
        assert not isinstance(await in_thread(self.router.find, 5.0), Opening)
        return self.opens.asked[-1]

    def breaks(self, node_id: NodeId, code: str) -> None:
        self.router.quarantine(PipelineFault(node_id, code, "broken"))


@in_loop
async def test_who_stalled_is_asked_again_where_nobody_else_is_there() -> None:
    bench = Bench(BEE)
    assert await bench.found() == {BEE}
    bench.breaks(BEE, "pipeline_stalled")
    with pytest.raises(ShardUnavailable) as refused:
        await bench.found()
    assert bench.router.lacks() == str(refused.value)
    bench.clock.advance(LAST_RESORT_S + 0.1)
    assert bench.router.lacks() is None
    assert await bench.found() == {BEE}


@in_loop
async def test_who_stalled_is_not_asked_where_others_are_there() -> None:
    bench = Bench(BEE, CAT, DOG)
    await bench.found()
    for node_id in (BEE, CAT):
        bench.breaks(node_id, "pipeline_stalled")
    bench.clock.advance(LAST_RESORT_S + 0.1)
    assert await bench.found() == {DOG}
    bench.clock.advance(30)
    bench.breaks(DOG, "pipeline_stalled")
    assert DOG not in await bench.found()


@in_loop
async def test_who_computes_garbage_is_not_asked_whoever_else_is_there() -> None:
    bench = Bench(BEE)
    await bench.found()
    bench.breaks(BEE, "shard_corrupt")
    bench.clock.advance(300)
    with pytest.raises(ShardUnavailable):
        await bench.found()


@pytest.mark.parametrize(
    ("bees", "cats", "kind"),
    [
        (WeightsMismatch("other weights"), WeightsMismatch("others too"), WeightsMismatch),
        (PipelineStalled("loads nothing"), PipelineStalled("nor this"), PipelineStalled),
        (WeightsMismatch("other weights"), NodeUnreachable("gone"), ShardUnavailable),
        (PipelineError("busy"), PipelineError("busy"), ShardUnavailable),
    ],
)
@in_loop
async def test_where_all_refuse_for_one_reason_it_is_the_reason(bees: FleetError, cats: FleetError, kind: type[PipelineError]) -> None:
    bench = Bench(BEE, CAT)
    bench.opens.refuses = {BEE: bees, CAT: cats}
    with pytest.raises(PipelineError) as caught:
        await bench.found()
    assert type(caught.value) is kind
    assert bees.message in caught.value.message
    assert cats.message in caught.value.message


@in_loop
async def test_a_route_that_takes_its_time_is_opened_once() -> None:
    bench = Bench(BEE)
    bench.opens.may.clear()
    for _ in range(20):
        assert isinstance(await in_thread(bench.router.find, 0.0), Opening)
    bench.opens.may.set()
    assert await bench.found() == {BEE}
    assert len(bench.opens.asked) == 1


@in_loop
async def test_a_route_on_its_way_says_how_far_its_machines_are() -> None:
    bench = Bench(BEE)
    bench.opens.may.clear()
    bench.opens.done = 41
    await in_thread(bench.router.find, 0.0)
    await until(lambda: bool(bench.opens.asked))
    said = await in_thread(bench.router.find, 0.0)
    assert isinstance(said, Opening)
    assert (said.nodes, said.percent, said.advanced) == ((BEE,), 41, 41)
    bench.opens.may.set()
    await bench.found()


@in_loop
async def test_who_is_left_goes_on_with_the_kv_of_the_route_before_and_nobody_else() -> None:
    bench = Bench(BEE, CAT, DOG)
    await bench.found()
    await bench.found()
    first, second = bench.opens.names
    assert first == second
    (gone, *_) = first
    bench.breaks(gone.node_id, "shard_unavailable")
    await bench.found()
    third = bench.opens.names[-1]
    assert third.keys() != first.keys()
    assert all(third[part] == first.get(part, third[part]) for part in third)
    assert not {*third.values()} & {name for part, name in first.items() if part not in third}
    bench.router.forget_kv()
    await bench.found()
    assert not {*bench.opens.names[-1].values()} & {*third.values()}


@in_loop
async def test_a_route_on_its_way_over_kv_that_is_of_no_use_any_more_is_not_taken() -> None:
    bench = Bench(BEE)
    await bench.found()
    bench.opens.may.clear()
    await in_thread(bench.router.find, 0.0)
    await until(lambda: len(bench.opens.asked) == 2)
    bench.router.forget_kv()
    bench.opens.may.set()
    assert isinstance(await in_thread(bench.router.find, 5.0), Opening)
    assert bench.opens.closed == 1
    await bench.found()
    assert not {*bench.opens.names[-1].values()} & {*bench.opens.names[-2].values()}
