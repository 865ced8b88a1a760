"""Spares are asked over real sessions to have a route's layers loaded, and a route that loses a machine goes on over them with no load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from tests.unit.net.member.nodes import BOUND_S, in_loop, until
from tests.unit.ways.pipeline.host.hosts import DIGEST, MODEL, SPEC, Hosting, Net, User, hosting, in_thread, wanted
from tests.unit.ways.pipeline.routes.test_spot_check import Eyes as Sees

from paceline.backends.table import Kernels
from paceline.core.background import Background
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan, WeightsFormat
from paceline.fleet.card import Link, ModelOffer, NodeCard, Role, ShardState
from paceline.fleet.plan import PlanRequest
from paceline.machine.sizing import model_shape
from paceline.ways.pipeline.routes import router as ahead
from paceline.ways.pipeline.routes.fleet_access import Wanted, choose
from paceline.ways.pipeline.routes.router import SpareKeeper
from paceline.ways.pipeline.splits import PIPELINE

A, B = NodeId("a"), NodeId("b")
WANTED = Wanted(
    PlanRequest(DIGEST, "bf16", 170, 85, frozenset({PIPELINE}), orchestrator=NodeId("user"), orchestrator_layers=2, numerics_id="counting"),
    LayerRange(2, SPEC.n_layers),
)
USED = [LayerSpan(A, LayerRange(2, 6))]
GIB = 1 << 30


@dataclass(slots=True)
class Eyes(Sees):
    """With cards that say what hosts have."""

    left_out: set[NodeId] = field(default_factory=set[NodeId])

    def cards(self) -> Sequence[NodeCard]:
        return [self._card(node_id) for node_id in (self.node_id, *self.hosts) if node_id not in self.left_out]

    def _card(self, node_id: NodeId) -> NodeCard:
        shape = model_shape(SPEC, WeightsFormat.BF16, lambda _: "BF16", Kernels.TORCH)
        offer = ModelOffer(MODEL, Role.VERIFIER, "bf16", 9.0, 90.0, DIGEST, numerics_id="counting", shape=shape)
        shards = self.hosts[node_id].warm.shards if node_id in self.hosts else ()
        states = [(ShardState(shard.layers, 4, len(shard.claims)), shard.loaded is not None) for shard in shards]
        models = (offer, *(_shard(offer, state, warm=warm) for state, warm in states))
        links = tuple(Link(other, "x:1", 0.001, 1e9) for other in self.hosts if other != node_id)
        return NodeCard(
            node_id, 1, (f"{node_id}:1",), node_id.encode(), 120, 0, backend="cpu", memory_total_bytes=GIB, memory_free_bytes=GIB,
            memory_bytes_per_s=10**10, models=models, links=links, serves_shards=node_id in self.hosts, shard_memory_bytes=GIB,
        )  # fmt: skip


def _shard(offer: ModelOffer, state: ShardState, *, warm: bool) -> ModelOffer:
    return ModelOffer(
        offer.model_id, Role.SHARD, offer.weights, digest=offer.digest, warm=warm, numerics_id="counting", shape=offer.shape, shard=state
    )


def keeper_of(eyes: Eyes) -> SpareKeeper:
    return SpareKeeper(eyes, wanted(2, 6), WANTED, asyncio.get_running_loop())


@in_loop
async def test_a_machine_outside_the_route_loads_its_layers_and_takes_over_without_a_load() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        eyes = Eyes(user, {A: a, B: b})
        keeper = keeper_of(eyes)
        stage = await user.open(a, wanted(2, 6))
        assert await keeper.load_spares(USED) == {B: False}
        await until(lambda: any(shard.loaded is not None for shard in b.warm.shards))
        assert await keeper.load_spares(USED) == {B: True}
        assert (len(b.loads.asked), b.host.sessions, len(a.loads.asked)) == (1, 0, 1)
        await stage.close()
        eyes.left_out.add(A)
        parts = choose(eyes.cards(), {}, WANTED, frozenset(), USED)
        assert parts == [LayerSpan(B, LayerRange(2, 6))]
        await (await user.open(b, wanted(2, 6))).close()
        assert len(b.loads.asked) == 1


@in_loop
async def test_a_spare_that_refuses_is_asked_again_and_spares_are_kept_until_there_is_no_route() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b", refuse=("user",)) as b, User(net) as user:
        eyes = Eyes(user, {A: a, B: b})
        keeper = keeper_of(eyes)
        assert await keeper.load_spares(USED) == {}
        await b.host.close()
        assert await keeper.load_spares(USED) == {}
        both: dict[NodeId, Hosting] = {A: a}
        alone = keeper_of(Eyes(user, both))
        assert await alone.load_spares(USED) == {}


@in_loop
async def test_a_machine_that_broke_a_route_is_no_spare_of_the_next() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        keeper = keeper_of(Eyes(user, {A: a, B: b}))
        assert await keeper.load_spares(USED, frozenset({B})) == {}
        assert b.warm.shards == ()
        out: set[NodeId] = {B}
        asked: list[frozenset[NodeId]] = []

        def excluded() -> frozenset[NodeId]:
            asked.append(frozenset(out))
            return asked[-1]

        keeper.keep(USED, excluded)
        await until(lambda: bool(asked))
        assert b.warm.shards == ()
        out.clear()
        keeper.keep(USED, excluded)
        await until(lambda: bool(b.warm.shards))
        keeper.stop()


class PausingLoop:
    """An event loop that holds a thread up as soon as it has handed over what it wants done."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.handed, self.go_on = loop, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)

    def call_soon_threadsafe(self, *work: Any, **context: Any) -> asyncio.Handle:
        handle = self.loop.call_soon_threadsafe(*work, **context)
        if threading.current_thread() is not threading.main_thread():
            self.handed.set()
            assert self.go_on.wait(BOUND_S)
        return handle


@in_loop
async def test_a_stop_ends_what_another_thread_is_about_to_have_begun() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        before, loop = asyncio.all_tasks(), PausingLoop(asyncio.get_running_loop())
        eyes = Eyes(user, {A: a})
        keeper = SpareKeeper(eyes, wanted(2, 6), WANTED, cast("asyncio.AbstractEventLoop", loop))

        begun = asyncio.create_task(in_thread(keeper.keep, USED, frozenset))
        await until(loop.handed.is_set)
        keeper.stop()
        loop.go_on.set()
        await begun
        await until(lambda: asyncio.all_tasks() <= before)


@in_loop
async def test_an_ask_that_goes_wrong_is_no_end_of_asking() -> None:
    net, times = Net(), 0
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        eyes = Eyes(user, {A: a, B: b}, background=Background(SystemClock(), lambda seconds: asyncio.sleep(0)))
        keeper = keeper_of(eyes)

        def excluded() -> frozenset[NodeId]:
            nonlocal times
            times += 1
            if times < 3:
                raise ValueError("the view")
            return frozenset()

        keeper.keep(USED, excluded)
        await until(lambda: bool(b.warm.shards))
        keeper.stop()


@in_loop
async def test_loads_ahead_that_break_are_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: object, __: object) -> None:
        raise ValueError("a fault of the asking itself")

    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        eyes = Eyes(user, {A: a})
        monkeypatch.setattr(Eyes, "channel", breaks)
        monkeypatch.setattr(ahead, "choose", lambda *_: USED)
        assert ahead.begin_loads(eyes, wanted(2, 6), WANTED, asyncio.get_running_loop()) == tuple(USED)
        await until(lambda: "ahead failed" in caplog.text)
