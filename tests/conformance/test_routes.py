"""Every route of this repository under the one suite: over real sessions and sockets, within one process, and within one machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.pipelines import Machine, MemoryRoute
from tests.unit.ways.pipeline.host.hosts import SPEC, Net, User, hosting, wanted
from tests.unit.ways.pipeline.routes.test_spot_check import Eyes, part

from paceline.backends import cpu, torch
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, WeightsFormat
from paceline.engine.local import LayerRunner
from paceline.testing.conformance.route import BOUND_S, RouteCase, RouteSuite
from paceline.ways.pipeline.executor.search import LocalRoute
from paceline.ways.pipeline.routes.opening import FleetRoute, RouteOpener

FIRST, SECOND = LayerRange(0, 3), LayerRange(3, 6)


def load(layers: LayerRange) -> LayerRunner[Any]:
    options = LoadOptions(layers, WeightsFormat.BF16, 16, edges=False)
    return (cpu.load if cpu.runs_here() else torch.load)(SeededWeights(SPEC), options)


class TestMemoryRoute(RouteSuite):
    @pytest.fixture
    def case(self) -> RouteCase:
        machines = [(Machine(name, load(span), SPEC.hidden), span) for name, span in (("a", FIRST), ("b", SECOND))]
        return RouteCase(MemoryRoute(machines), SPEC.hidden)


class TestLocalRoute(RouteSuite):
    @pytest.fixture
    def case(self) -> RouteCase:
        runner = load(LayerRange(0, 6))
        return RouteCase(LocalRoute(NodeId("a"), "m", runner, max_rows=64, max_context=256, width=SPEC.hidden), SPEC.hidden, waits=False)


class TestFleetRoute(RouteSuite):
    @pytest.fixture
    def case(self) -> Iterator[RouteCase]:
        """Over two hosts' real sessions, on an event loop in a thread of its own."""
        loop, done = asyncio.new_event_loop(), asyncio.Event()
        routes: list[FleetRoute] = []
        ready = threading.Event()

        async def serve() -> None:
            net = Net()
            async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
                eyes = Eyes(user, {a.node_id: a, b.node_id: b})
                opener = RouteOpener(eyes, user.ends, wanted(0, 6), SPEC.hidden, 16, loop)
                routes.append(await opener.open([part("a", 0, 3), part("b", 3, 6)]))
                ready.set()
                await done.wait()

        def run() -> None:
            try:
                loop.run_until_complete(serve())
            finally:
                ready.set()
                loop.close()

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(BOUND_S)
        yield RouteCase(routes[0], SPEC.hidden)
        loop.call_soon_threadsafe(done.set)
        thread.join(BOUND_S)
