"""Every route of this repository under the one suite: over real sessions and sockets, within one process, and within one machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.conformance.suites.route import BOUND_S, RouteCase, RouteSuite
from tests.fakes.loops import on_a_loop
from tests.fakes.pipelines import Machine, MemoryRoute
from tests.unit.ways.pipeline.host.hosts import SPEC, Net, User, hosting, wanted
from tests.unit.ways.pipeline.routes.test_spot_check import Eyes, part

from paceline.backends import cpu
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, LayerSpan, WeightsFormat
from paceline.engine.local import LayerRunner
from paceline.ways.pipeline.executor.search import LocalRoute
from paceline.ways.pipeline.host.loading import LoadsLayers
from paceline.ways.pipeline.routes.opening import FleetRoute, RouteOpener

FIRST, SECOND = LayerRange(0, 3), LayerRange(3, 6)


def load(layers: LayerRange) -> LayerRunner[Any]:
    options = LoadOptions(layers, WeightsFormat.BF16, 16, edges=False)
    return cpu.load(SeededWeights(SPEC), options)


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


def routes_over(
    parts: Sequence[LayerSpan], load: LoadsLayers | None = None, **wants: int
) -> AbstractContextManager[Callable[[], FleetRoute]]:
    """Opens routes over real sessions with hosts of these layers, on an event loop in a thread of its own.

    Args:
        load: makes what the hosts run; None: layers that count.
        wants: what is asked of each stage.
    """

    @asynccontextmanager
    async def made() -> AsyncGenerator[Callable[[], FleetRoute]]:
        net, loop = Net(), asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            hosts = {part.node_id: await stack.enter_async_context(hosting(net, part.node_id, load=load)) for part in parts}
            user = await stack.enter_async_context(User(net))
            opener = RouteOpener(Eyes(user, hosts), user.ends, wanted(**wants), SPEC.hidden, 16, loop)
            yield lambda: asyncio.run_coroutine_threadsafe(opener.open(parts), loop).result(BOUND_S)

    return on_a_loop(made)


class TestFleetRoute(RouteSuite):
    @pytest.fixture
    def case(self) -> Iterator[RouteCase]:
        with routes_over([part("a", 0, 3), part("b", 3, 6)]) as opened:
            yield RouteCase(opened(), SPEC.hidden)
