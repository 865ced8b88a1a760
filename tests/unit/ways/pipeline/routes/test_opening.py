"""Opening routes over real sessions, and ending them: nothing is left of a route that did not come about, and stages blame only whom they know."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from tests.unit.net.member.nodes import BOUND_S, in_loop, until
from tests.unit.ways.pipeline.host.hosts import SPEC, Hosting, Net, User, hosting, in_thread, wanted
from tests.unit.ways.pipeline.routes.test_spot_check import Eyes, part

from paceline.core.errors import FleetError, NodeUnreachable, StreamStalled, UnsupportedModel
from paceline.core.ids import NodeId
from paceline.ways.pipeline.executor.route import PipelineFault
from paceline.ways.pipeline.host.ends import ExpectedInput, StreamSource
from paceline.ways.pipeline.routes.opening import FleetRoute, NotOpened, RouteOpener, refusals_said


@dataclass(slots=True)
class Two:
    """A fleet in which `a` and `b` host layers."""

    a: Hosting
    b: Hosting
    user: User
    opener: RouteOpener

    async def open(self) -> FleetRoute:
        return await self.opener.open([part("a", 0, 3), part("b", 3, 6)])

    async def nothing_is_left(self) -> None:
        await until(
            lambda: not (self.a.host.sessions or self.b.host.sessions or self.user.listener._expected or self.user.listener._streams)
        )


@asynccontextmanager
async def two() -> AsyncIterator[Two]:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        eyes = Eyes(user, {a.node_id: a, b.node_id: b})
        yield Two(a, b, user, RouteOpener(eyes, user.ends, wanted(0, 6), SPEC.hidden, 16, asyncio.get_running_loop()))


@in_loop
async def test_a_route_that_is_given_up_half_open_leaves_no_session_behind() -> None:
    async with two() as fleet:
        fleet.b.loads.gate.clear()
        opening = asyncio.create_task(fleet.open())
        await until(lambda: fleet.a.host.sessions == 1 and bool(fleet.b.loads.asked))
        opening.cancel()
        await asyncio.wait({opening})
        assert opening.cancelled()
        await fleet.nothing_is_left()


@in_loop
async def test_where_one_refuses_no_other_is_waited_for_and_what_it_loads_stays() -> None:
    async with two() as fleet:
        fleet.a.loads.fault = UnsupportedModel("no such layers here")
        fleet.b.loads.gate.clear()
        with pytest.raises(NotOpened) as refused:
            await fleet.open()
        assert {**refused.value.refusals}.keys() == {"a"}
        assert fleet.b.warm.shards[0].is_loading
        fleet.b.loads.gate.set()
        await until(lambda: fleet.b.warm.shards[0].is_idle)
        await fleet.nothing_is_left()


@in_loop
async def test_a_route_that_can_t_be_had_names_the_machine_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as fleet:
        fleet.b.listener.close()  # so that a can't reach it
        with pytest.raises(NotOpened) as refused:
            await fleet.open()
        assert {**refused.value.refusals}.keys() == {"b"}
        await fleet.nothing_is_left()


@in_loop
async def test_a_machine_that_turns_out_unlike_is_in_the_way_and_keeps_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as fleet:
        route = await fleet.open()
        await in_thread(route.close)
        await fleet.nothing_is_left()
        fleet.opener.numerics_id = fleet.a.runner.numerics_id
        monkeypatch.setattr(fleet.b.runner, "numerics_id", "other")
        with pytest.raises(NotOpened) as refused:
            await fleet.open()
        assert {node_id: error.message for node_id, error in refused.value.refusals.items()} == {
            "b": "it computes other bytes than this machine"
        }
        await fleet.nothing_is_left()
        fleet.opener.numerics_id = ""
        route = await fleet.open()
        assert [stage.numerics_id for stage in route.stages] == [fleet.a.runner.numerics_id, "other"]
        await in_thread(route.close)
        await fleet.nothing_is_left()


@in_loop
async def test_a_route_says_whose_kernels_give_other_bytes_for_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as fleet:
        route = await fleet.open()
        assert [stage.holds_identity for stage in route.stages] == [True, True]
        await in_thread(route.close)
        await fleet.nothing_is_left()
        monkeypatch.setattr(fleet.b.runner, "holds_identity", False)
        route = await fleet.open()
        assert [stage.holds_identity for stage in route.stages] == [True, False]
        await in_thread(route.close)
        await fleet.nothing_is_left()


@dataclass(slots=True)
class Held:
    """An `ExpectedInput` whose stream is fetched, and handed over when a test says so; or never comes."""

    inner: ExpectedInput
    comes: bool
    fetched: threading.Event
    gate: threading.Event

    def accept(self, deadline: float) -> StreamSource:
        if not self.comes:
            raise StreamStalled("Nobody came")
        stream = self.inner.accept(deadline)
        self.fetched.set()
        assert self.gate.wait(BOUND_S)
        return stream

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("comes", [True, False])
@in_loop
async def test_a_route_that_is_given_up_or_fails_at_its_end_leaves_no_stream_and_no_ticket(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two() as fleet:
        expect, fetched, gate = fleet.user.ends.expect, threading.Event(), threading.Event()
        monkeypatch.setattr(fleet.user.ends, "expect", lambda *args: Held(expect(*args), comes, fetched, gate))
        opening = asyncio.create_task(fleet.open())
        if comes:
            await in_thread(fetched.wait, BOUND_S)
            opening.cancel()
        await asyncio.wait({opening})
        gate.set()
        assert opening.cancelled() if comes else isinstance(opening.exception(), NotOpened)
        await fleet.nothing_is_left()


@pytest.mark.parametrize(("named", "held"), [("b", "b"), ("c", "a"), ("user", "a"), ("a", "a")])
@in_loop
async def test_a_stage_may_blame_its_neighbours_and_nobody_else(named: str, held: str) -> None:
    async with two() as fleet:
        route = await fleet.open()
        (session,) = fleet.a.host._live
        session.fail(PipelineFault(NodeId(named), "shard_corrupt", "it was not me"))
        await until(lambda: route.fault() is not None)
        fault = route.fault()
        assert fault is not None
        assert (fault.node_id, fault.code) == (held, "shard_corrupt")
        route.close()
        await fleet.nothing_is_left()


def test_a_node_is_named_once_in_what_it_refuses() -> None:
    refusals = {NodeId("b"): NodeUnreachable("b can't be reached (nothing listens there)"), NodeId("c"): FleetError("busy")}
    assert refusals_said(refusals) == "b can't be reached (nothing listens there); c: busy"
    assert refusals_said({NodeId("b"): FleetError("b: no memory"), NodeId("a"): FleetError("ab is gone")}) == "b: no memory; a: ab is gone"
