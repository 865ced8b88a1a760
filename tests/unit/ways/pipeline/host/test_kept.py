"""KV outlives its session: the caller's next session of the same name goes on with it, and nobody else does."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.hosts import Hosting, Net, User, batch_of, hosting, in_thread, rows_of, soon, wanted

from paceline.ways.pipeline.executor.route import StageRequest
from paceline.ways.pipeline.host.session import HostLimits

NAME = secrets.token_bytes(16)


def named(**changes: object) -> StageRequest:
    return wanted(0, 3, **{"kv": NAME, **changes})


async def use(a: Hosting, user: User) -> None:
    """Write five rows, and leave."""
    stage = await user.open(a, named())
    assert stage.opened.resumed is False
    route = await user.route((a, stage))
    await route.run(batch_of(1, rows=5, blocks=(2,)), rows_of(5))
    await stage.close()
    await until(lambda: a.host.sessions == 0)


async def resumed(a: Hosting, user: User, **changes: object) -> bool | None:
    return (await user.open(a, named(**changes))).opened.resumed


@in_loop
async def test_a_session_goes_on_where_the_last_one_of_its_name_stood() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        await use(a, user)
        stage = await user.open(a, named())
        assert stage.opened.resumed
        route = await user.route((a, stage))
        x_TD = rows_of(1, 7)
        assert np.array_equal(await route.run(batch_of(2, rows=1, first=5, blocks=(), path=1), x_TD), x_TD + 3)


@in_loop
async def test_a_session_that_is_still_there_ends_for_the_next_of_its_name() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        first = await user.open(a, named())
        route = await user.route((a, first))
        await route.run(batch_of(1), rows_of(4))
        assert await resumed(a, user)
        await until(lambda: a.host.sessions == 1)


@in_loop
async def test_no_other_caller_and_no_other_name_goes_on_with_it() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user, User(net, "other") as other:
        await use(a, user)
        assert await resumed(a, other) is False
        assert await resumed(a, user, kv=secrets.token_bytes(16)) is False
        assert await resumed(a, user)


@in_loop
async def test_without_a_name_nothing_is_kept() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        await (await user.open(a)).close()
        await until(lambda: a.host.sessions == 0)
        (shard,) = a.warm.shards
        assert shard.leases.free == shard.leases.n_blocks


@in_loop
async def test_what_was_not_run_to_its_end_is_not_gone_on_with() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a, named())
        route = await user.route((a, stage))
        await in_thread(route.sink.send, batch_of(1, first=13), rows_of(4), soon())
        await until(lambda: a.host.sessions == 0)
        assert await resumed(a, user) is False


@in_loop
async def test_it_makes_way_for_sessions_that_need_the_room() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        await use(a, user)
        (shard,) = a.warm.shards
        whole = shard.leases.n_blocks
        assert (await user.open(a, wanted(0, 3, n_blocks=whole, least_blocks=whole))).opened.n_blocks == whole
        assert await in_thread(lambda: shard.leases.free) == 0


@pytest.mark.parametrize(("waits_s", "expected"), [(9.0, True), (11.0, False)])
@in_loop
async def test_it_is_kept_for_a_while(waits_s: float, expected: bool) -> None:
    net, clock = Net(), FakeClock()
    async with hosting(net, "a", limits=HostLimits(kept_s=10.0), clock=clock) as a, User(net) as user:
        await use(a, user)
        clock.advance(waits_s)
        await a.warm.evict_idle()
        assert await resumed(a, user) is expected
