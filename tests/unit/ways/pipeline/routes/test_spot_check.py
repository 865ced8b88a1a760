"""Spot checks over real sessions: a node that computes wrong numbers is left out, and no other is."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.hosts import (
    SPEC,
    Bits,
    CountingLoads,
    Hosting,
    Net,
    User,
    batch_of,
    hosting,
    in_thread,
    rows_of,
    soon,
    wanted,
)

from paceline.backends.options import LoadOptions, LoadProgress
from paceline.core.background import Background
from paceline.core.clock import SystemClock
from paceline.core.errors import FleetError
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan
from paceline.core.weights import WeightSource
from paceline.engine.local import LayerRunner, RowPlan
from paceline.ways.pipeline.executor.route import PipelineFault
from paceline.ways.pipeline.routes.opening import FleetRoute, RouteOpener
from paceline.ways.pipeline.routes.spot_check import Holders, SpotCheck

ROWS = 5


@dataclass(frozen=True, slots=True)
class SomeCard:
    node_id: NodeId
    addresses: tuple[str, ...]


@dataclass(slots=True)
class Eyes:
    """`FleetAccess` of these hosts."""

    user: User
    hosts: dict[NodeId, Hosting]
    background: Background = field(default_factory=lambda: Background(SystemClock()))

    @property
    def node_id(self) -> NodeId:
        return self.user.identity.node_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return ("127.0.0.1:1",)  # the port of tensors is another

    def cards(self) -> Sequence[Any]:
        return [SomeCard(node_id, (host.address,)) for node_id, host in self.hosts.items()]

    def trust(self) -> dict[NodeId, Trust]:
        return {}

    def channel(self, node_id: NodeId) -> grpc.aio.Channel:
        if node_id not in self.hosts:
            raise FleetError(f"{node_id} is not in view any more")
        return self.user.channel(self.hosts[node_id])

    def order(self, addresses: Sequence[str]) -> tuple[str, ...]:
        return tuple(addresses)

    def wait_for_change(self, seconds: float) -> None:
        raise AssertionError("nobody waits here")


@dataclass(slots=True)
class Known(Holders):
    """`Holders` that says what a test wants."""

    others: list[list[LayerSpan]]
    thirds: dict[NodeId, list[LayerSpan]] = field(default_factory=dict)
    """By whom they are to stand in for."""

    def chain(self, stages: Sequence[LayerSpan]) -> list[list[LayerSpan]]:
        return self.others

    def third(self, layers: LayerRange, but: frozenset[NodeId]) -> list[LayerSpan]:
        return next((parts for node_id, parts in self.thirds.items() if node_id in but), [])


class Machine(CountingLoads):
    """What a host computes: as told, the last bit of a value is another."""

    def __init__(self) -> None:
        super().__init__()
        self.lies = 0
        """Batches from now on that come out wrong."""

    def __call__(self, source: WeightSource, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
        runner = super().__call__(source, options, progress)
        run = runner.run_layers

        def tampered(x_TD: Bits, plan: RowPlan, part: LayerRange | None = None) -> Bits:
            y_TD = np.array(run(x_TD, plan, part))
            if self.lies:
                self.lies -= 1
                y_TD[0, 7] ^= 1
            return y_TD

        runner.run_layers = tampered  # type: ignore[method-assign]
        return runner


class Drawn:
    """Chance, as a test has it: every batch is checked."""

    def randrange(self, stop: int) -> int:
        del stop
        return 0


@dataclass(slots=True)
class Bench:
    """A route over `a` and `b`; `c`, `d` and `e` could run the same layers."""

    machines: dict[str, Machine]
    hosts: dict[NodeId, Hosting]
    opener: RouteOpener
    known: Known
    route: FleetRoute
    check: SpotCheck
    faults: list[PipelineFault]
    batches: int = 0

    def lies(self, name: str, times: int = 1 << 30) -> None:
        self.machines[name].lies = times

    async def run(self, *, more: bool = False) -> None:
        """A batch as the executor runs it, the next rows of the last one's sequence or a new one's, and the check of it to its end."""
        sequence = self.batches + 1 - more
        self.batches += 1
        batch = batch_of(self.batches, rows=ROWS, first=ROWS * more, blocks=() if more else (0,), sequence=sequence)
        x_TD, route, check = rows_of(ROWS, self.batches), self.route, self.check
        check.sent(route, batch, x_TD)

        def there_and_back() -> None:
            route.sink.send(batch, x_TD, soon())
            check.came(*route.source.receive(soon()))

        await in_thread(there_and_back)
        await until(lambda: check._running is None or check._running.done())

    @property
    def blamed(self) -> list[str]:
        assert {fault.code for fault in self.faults} <= {"shard_corrupt"}
        return [fault.node_id or "" for fault in self.faults]


def part(name: str, start: int, stop: int) -> LayerSpan:
    return LayerSpan(NodeId(name), LayerRange(start, stop))


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    net = Net()
    async with AsyncExitStack() as stack:
        machines = {name: Machine() for name in "abcde"}
        hosts = {NodeId(name): await stack.enter_async_context(hosting(net, name, load=load)) for name, load in machines.items()}
        user = await stack.enter_async_context(User(net))
        loop = asyncio.get_running_loop()
        opener = RouteOpener(Eyes(user, hosts), user.ends, wanted(0, 6), SPEC.hidden, 16, loop)
        route = await opener.open([part("a", 0, 3), part("b", 3, 6)])
        known = Known([[part("c", 0, 3)], [part("d", 3, 4), part("c", 4, 6)]])
        faults: list[PipelineFault] = []
        check = SpotCheck(1, opener, known, "counting", faults.append, loop)
        made = Bench(machines, hosts, opener, known, route, check, faults)
        check._random = Drawn()  # type: ignore[assignment]
        try:
            yield made
        finally:
            check.close()
            route.close()
            await until(lambda: not any(host.host.sessions for host in hosts.values()))


@in_loop
async def test_who_does_what_it_should_is_left_in_peace() -> None:
    async with bench() as made:
        for _ in range(3):
            await made.run()
        assert (made.check.passed, made.check.failed, made.faults) == (3, 0, [])
        assert made.route.fault() is None


@pytest.mark.parametrize("liar", ["a", "b"])
@in_loop
async def test_wrong_numbers_are_found(liar: str) -> None:
    async with bench() as made:
        await made.run()
        made.lies(liar)
        await made.run()
        assert made.blamed == [liar]
        assert liar in made.faults[0].message
        assert "c" in made.faults[0].message.split()[-3:]
        assert made.route.fault() == made.faults[0]


@pytest.mark.parametrize("liar", ["a", "b"])
@in_loop
async def test_who_lied_once_is_among_those_left_out(liar: str) -> None:
    async with bench() as made:
        made.lies(liar, 1)
        await made.run()
        assert made.blamed == ["a", "b"]


@in_loop
async def test_a_second_holder_that_is_wrong_is_told_by_a_third() -> None:
    async with bench() as made:
        made.lies("c")
        made.known.thirds[NodeId("a")] = [part("e", 0, 3)]
        await made.run()
        assert made.blamed == ["c"]
        assert made.route.fault() is None


@in_loop
async def test_of_two_the_one_in_the_route_is_left_out_and_both_are_named() -> None:
    async with bench() as made:
        made.lies("c")
        await made.run()
        assert "a" in made.blamed
        assert all(name in made.faults[0].message.split() for name in ("a", "c"))


@in_loop
async def test_what_needs_kv_from_before_is_not_checked_and_nobody_is_blamed_for_want_of_others() -> None:
    async with bench() as made:
        await made.run()
        made.lies("b")
        await made.run(more=True)
        made.known.others = []
        await made.run()
        made.known.others = [[part("nobody", 0, 3)], [part("d", 3, 6)]]
        await made.run()
        assert (made.check.passed, made.check.failed, made.faults) == (1, 0, [])


@in_loop
async def test_a_second_holder_that_goes_away_blames_nobody() -> None:
    async with bench() as made:
        made.lies("b")
        made.known.others = [[part("c", 0, 3)], [part("d", 3, 7)]]  # a layer that the model does not have
        await made.run()
        assert (made.check.passed, made.check.failed, made.faults) == (0, 0, [])


@in_loop
async def test_a_check_that_breaks_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(_: object, __: object) -> None:
        raise ValueError("a fault of the check itself")

    async with bench() as made:
        monkeypatch.setattr(Known, "chain", breaks)
        await made.run()
        assert "a spot check failed" in caplog.text
