"""What a host grants and refuses, and that nothing is left of a session: its stream, its KV, its thread."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import BOUND_S, in_loop, until
from tests.unit.ways.pipeline.host.hosts import (
    SPEC,
    CountingLoads,
    Hosting,
    Net,
    User,
    batch_of,
    hosting,
    in_thread,
    rows_of,
    some_device,
    soon,
    wanted,
)

from paceline.backends.holding import kv_group
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.backends.table import Kernels
from paceline.core.errors import (
    BadPipelineRequest,
    NodeUnreachable,
    NotTrusted,
    PipelineError,
    ShardUnavailable,
    StreamClosed,
    UnsupportedModel,
)
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, ActivationDtype, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.local import LayerRunner
from paceline.machine.devices import LocalDevice
from paceline.store.home import Home
from paceline.ways.pipeline.client import open_stage
from paceline.ways.pipeline.executor.route import NextStage, StageRequest
from paceline.ways.pipeline.host import loading
from paceline.ways.pipeline.host.loading import RETRY_S, kernels_for
from paceline.ways.pipeline.host.serving import ShardOffers
from paceline.ways.pipeline.host.session import HostLimits
from paceline.ways.pipeline.host.warm import SHARDS_FREE_SHARE, block_bytes, fixed_bytes


def threads() -> int:
    return sum(thread.name.startswith("paceline-stage") for thread in threading.enumerate())


async def until_free(at: Hosting) -> None:
    """Until nothing of any session is left."""
    await until(lambda: at.host.sessions == threads() == 0)
    for shard in at.warm.shards:
        assert not shard.claims
        assert shard.leases.free == shard.leases.n_blocks


async def as_far_as_it_goes() -> None:
    """Let what waits for no thread run."""
    for _ in range(20):
        await asyncio.sleep(0)


def warmed(a: Hosting, request: StageRequest | None = None) -> bool:
    """Have a machine load layers that nobody uses yet. Whether it has them."""
    return a.host.warm_layers(request or wanted()) is None


@in_loop
async def test_layers_that_may_be_needed_are_loaded_and_lease_nothing() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        assert not warmed(a)
        await until(lambda: warmed(a))
        (shard,) = a.warm.shards
        assert (len(shard.claims), shard.leases.free) == (0, shard.leases.n_blocks)
        stage = await user.open(a)
        assert len(a.loads.asked) == 1
        assert warmed(a), "it is in use, and kept"
        await stage.close()


@in_loop
async def test_a_card_says_how_far_layers_are_that_are_being_loaded(tmp_path: Path) -> None:
    net, offers = Net(), ShardOffers(Home(tmp_path), 1)
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a, wanted(3, 6))
        a.loads.gate.clear()
        warmed(a, wanted(0, 3))
        assert len(offers.of(a.warm.shards)) == 1, "nothing is said of weights that may not be there"
        await until(lambda: len(offers.of(a.warm.shards)) == 2)
        said = [(offer.warm, offer.shard.layers.start, offer.shard.loaded_percent) for offer in offers.of(a.warm.shards) if offer.shard]
        assert said == [(True, 3, 0), (False, 0, 50)]
        a.loads.gate.set()
        await stage.close()


@in_loop
async def test_nothing_makes_way_for_layers_that_may_be_needed() -> None:
    net, block = Net(), 16 * SPEC.kv_bytes_per_token(wanted(0, 1).layers)
    layer, rows = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96), 4 * 512 * (4 * 64 + 2 * 64 + 2 * 96)
    async with hosting(net, "a", limits=HostLimits(memory_bytes=rows + 4 * (layer + 20 * block))) as a, User(net) as user:
        await (await user.open(a, wanted(0, 3))).close()
        await until_free(a)
        assert not warmed(a, wanted(3, 6))
        await until(lambda: len(a.warm.shards) == 1)
        assert a.warm.shards[0].layers.start == 0
        assert a.meter.evictions == 0
        await user.open(a, wanted(3, 6))  # which a caller waits for
        assert a.meter.evictions == 1


@in_loop
async def test_layers_that_may_be_needed_wait_for_those_that_are_and_make_way() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        a.loads.gate.clear()
        warmed(a, wanted(0, 3))
        await until(lambda: bool(a.loads.asked))
        waiting = asyncio.create_task(user.open(a, wanted(3, 6)))
        await in_thread(a.loads.given_up.wait, 10)
        with pytest.raises(ShardUnavailable, match="being loaded"):
            warmed(a, wanted(0, 3))
        a.loads.gate.set()
        await waiting


@in_loop
async def test_a_machine_short_of_memory_unloads_what_nobody_uses() -> None:
    net, free = Net(), [1 << 30]
    async with hosting(net, "a", free_bytes=lambda: free[0], low_bytes=1 << 20) as a, User(net) as user:
        used = await user.open(a, wanted(0, 2))
        await (await user.open(a, wanted(3, 6))).close()
        await until(lambda: any(shard.is_idle for shard in a.warm.shards))
        await a.warm.evict_idle()
        assert a.meter.evictions == 0
        free[0] = 1 << 19
        await a.warm.evict_idle()
        assert [shard.layers.start for shard in a.warm.shards] == [0]
        assert not used.lost.done()


@in_loop
async def test_layers_are_not_loaded_into_memory_whose_lack_would_unload_them() -> None:
    net, free = Net(), 1 << 30
    async with hosting(net, "a", free_bytes=lambda: free, low_bytes=free - (1 << 12), limits=HostLimits(memory_bytes=free)) as a:
        async with User(net) as user:
            with pytest.raises(ShardUnavailable, match="may be taken here"):
                await user.open(a)
        assert a.warm.left_bytes(a.devices[0]) == 1 << 12


@in_loop
async def test_memory_that_was_promised_to_others_is_not_free() -> None:
    net, free = Net(), 1 << 30
    processors = LocalDevice(Kernels.AVX2, tuple(WeightsFormat), lambda: "", lambda: free, lambda: free, lambda _: 1e10)
    for limits, left in ((HostLimits(), int((free - 500) * SHARDS_FREE_SHARE)), (HostLimits(memory_bytes=free), free - 700)):
        async with hosting(net, "a", devices=(processors, some_device(lambda: free)), limits=limits) as a:
            a.warm.beside = lambda: (700, 500)
            assert a.warm.left_bytes(processors) == left


@in_loop
async def test_layers_take_the_memory_of_the_device_that_runs_their_format() -> None:
    """Two devices, as a machine with a GPU has them: the memory of one says nothing of the other's."""
    net, free = Net(), {"gpu": 1 << 30, "processors": 1 << 12}
    gpu = some_device(lambda: free["gpu"], WeightsFormat.BF16)
    processors = some_device(lambda: free["processors"], WeightsFormat.INT8, WeightsFormat.INT4)
    async with hosting(net, "a", devices=(gpu, processors), low_bytes=1 << 10) as a, User(net) as user:
        await (await user.open(a, wanted(0, 3))).close()
        await until(lambda: any(shard.is_idle for shard in a.warm.shards))
        with pytest.raises(ShardUnavailable, match="may be taken here"):
            await user.open(a, wanted(0, 3, weights=WeightsFormat.INT8))
        assert a.meter.evictions == 0, "what is idle on the other device is not in the way"
        free["processors"] = 1 << 30
        await (await user.open(a, wanted(0, 3, weights=WeightsFormat.INT8))).close()
        await until(lambda: all(shard.is_idle for shard in a.warm.shards))
        free["gpu"] = 1
        await a.warm.evict_idle()
        assert [shard.weights for shard in a.warm.shards] == [WeightsFormat.INT8]


@in_loop
async def test_layers_that_could_not_be_loaded_are_not_loaded_again_soon_but_for_a_caller_that_waits() -> None:
    net, clock = Net(), FakeClock()
    async with hosting(net, "a", clock=clock) as a, User(net) as user:
        a.loads.fault = UnsupportedModel("no such layers here")
        assert not warmed(a)
        await until(lambda: not a.warm.shards)
        for _ in range(3):
            with pytest.raises(ShardUnavailable, match="no such layers here"):
                warmed(a)
        assert not warmed(a, wanted(3, 6)), "those are others"
        await until(lambda: not a.warm.shards)
        clock.advance(RETRY_S + 1)
        assert not warmed(a)
        await until(lambda: not a.warm.shards)
        assert len(a.loads.asked) == 3
        a.loads.fault = None
        await (await user.open(a)).close()
        assert warmed(a)


@in_loop
async def test_layers_that_are_there_with_too_little_room_are_named() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        await (await user.open(a)).close()
        with pytest.raises(ShardUnavailable, match="tiny:0-2 is loaded with less room than is asked for"):
            warmed(a, wanted(max_rows=4096))


@in_loop
async def test_streams_are_bounded_strictly_and_come_back() -> None:
    net = Net()
    async with hosting(net, "a", limits=HostLimits(max_streams=2)) as a, User(net) as user:
        channel = user.channel(a)
        first, second = await user.open(a, channel=channel), await user.open(a, wanted(1, 2), channel=channel)
        with pytest.raises(ShardUnavailable, match="All 2 streams"):
            await user.open(a, channel=channel)
        assert a.meter.sessions_refused == 1
        await first.close()
        third = await user.open(a, channel=channel)
        assert (third.opened.n_blocks, len(a.loads.asked)) == (8, 1)
        assert not second.lost.done()
        await second.close()
        await third.close()
        await until_free(a)


@in_loop
async def test_streams_are_bounded_while_their_layers_load() -> None:
    net = Net()
    async with hosting(net, "a", limits=HostLimits(max_streams=2)) as a, User(net) as user:
        a.loads.gate.clear()
        waiting = [asyncio.create_task(user.open(a)) for _ in range(2)]
        await until(lambda: sum(len(shard.claims) for shard in a.warm.shards) == 2)
        with pytest.raises(ShardUnavailable):
            await user.open(a)
        a.loads.gate.set()
        stages = await asyncio.gather(*waiting)
        assert len(a.loads.asked) == 1, "two who want the same wait for one load"
        assert {stage.opened.numerics_id for stage in stages} == {"counting"}


async def abandoned(a: Hosting, user: User, request: StageRequest) -> None:
    """Have a machine load what a caller asked for that went away meanwhile."""
    a.loads.gate.clear()
    seen: list[tuple[int, int]] = []
    asked = asyncio.create_task(
        open_stage(user.channel(a), a.node_id, request, lambda loading: seen.append((loading.bytes_done, loading.bytes_total)))
    )
    await until(lambda: (1, 2) in seen)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: not a.warm.shards[0].claims)


@in_loop
async def test_a_load_outlives_its_caller_who_finds_it_when_it_comes_again() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        await abandoned(a, user, wanted())
        waiting = asyncio.create_task(user.open(a))
        await until(lambda: len(a.warm.shards[0].claims) == 1)
        a.loads.gate.set()
        await (await waiting).close()
        await until_free(a)
        assert len(a.loads.asked) == 1
        assert not a.loads.given_up.is_set()


@in_loop
async def test_what_was_loaded_for_a_caller_that_went_away_is_kept_as_long_as_any_other() -> None:
    net = Net()
    async with hosting(net, "a", limits=HostLimits(idle_s=0.05)) as a, User(net) as user:
        await abandoned(a, user, wanted())
        a.loads.gate.set()
        await until(lambda: bool(a.loads.runners) and a.runner.closed)
        assert a.warm.shards == ()
        assert a.meter.evictions == 1


@in_loop
async def test_a_load_that_no_caller_waits_for_makes_way_for_one_that_a_caller_waits_for() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        await abandoned(a, user, wanted(0, 3))
        waiting = asyncio.create_task(user.open(a, wanted(3, 6)))
        await in_thread(a.loads.given_up.wait, 100)
        await until(lambda: len(a.loads.asked) == 2)
        a.loads.gate.set()
        await (await waiting).close()
        assert [shard.layers.start for shard in a.warm.shards] == [3]
        assert [runner.layers.start for runner in a.loads.runners] == [3]


@in_loop
async def test_what_is_claimed_while_other_layers_are_evicted_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    net, clock, gate = Net(), FakeClock(), threading.Event()
    async with hosting(net, "a", clock=clock) as a:
        for layers in ((0, 2), (3, 6)):
            a.warm.prepare(wanted(*layers))
            await until(lambda: all(shard.is_idle for shard in a.warm.shards))
        monkeypatch.setattr(a.loads.runners[0], "close", lambda: gate.wait(BOUND_S))
        clock.advance(1e4)
        reap = asyncio.create_task(a.warm.evict_idle())
        await until(lambda: len(a.warm.shards) == 1)
        shard, claim = await a.warm.claim(wanted(3, 6))
        gate.set()
        await reap
        assert shard.loaded
        a.warm.release(shard, claim)


@in_loop
async def test_layers_wait_for_the_memory_of_a_load_that_made_way() -> None:
    net, free, let_go = Net(), [1 << 30], threading.Event()
    loads = CountingLoads()

    def load(source: WeightSource, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
        if options.layers.start == 0:
            free[0] = 0
            assert let_go.wait(BOUND_S)
            free[0] = 1 << 30
            progress(1, 2)
        return loads(source, options, progress)

    async with hosting(net, "a", load=load, free_bytes=lambda: free[0]) as a:
        a.warm.prepare(wanted(0, 3))
        await until(lambda: free[0] == 0)
        shard, claim = await a.warm.claim(wanted(3, 6))
        assert shard.loading
        await as_far_as_it_goes()
        let_go.set()
        await shard.loading
        a.warm.release(shard, claim)


@in_loop
async def test_layers_wait_for_the_memory_of_others_that_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    net, free, clock, let_go = Net(), [1 << 30], FakeClock(), threading.Event()
    freed_by: list[threading.Thread] = []

    def close() -> None:
        assert let_go.wait(BOUND_S)
        free[0] = 1 << 30

    monkeypatch.setattr(loading, "give_memory_back", lambda: freed_by.append(threading.current_thread()))
    async with hosting(net, "a", free_bytes=lambda: free[0], clock=clock) as a:
        a.warm.prepare(wanted(0, 3))
        await until(lambda: any(shard.is_idle for shard in a.warm.shards))
        free[0] = 0
        a.runner.close = close
        weakref.finalize(a.loads.runners.pop(), lambda: freed_by.append(threading.current_thread()))
        clock.advance(1e4)
        reap = asyncio.create_task(a.warm.evict_idle())
        await until(lambda: not a.warm.shards)
        shard, claim = await a.warm.claim(wanted(3, 6))
        assert shard.loading
        await as_far_as_it_goes()
        let_go.set()
        await asyncio.gather(reap, shard.loading)
        assert len(freed_by) == 2
        assert threading.main_thread() not in freed_by, "the event loop stands still meanwhile"
        a.warm.release(shard, claim)


@in_loop
async def test_a_load_behind_another_says_how_far_both_are() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        a.loads.gate.clear()
        seen: list[tuple[int, int]] = []
        first = asyncio.create_task(user.open(a, wanted(0, 3)))
        await until(lambda: bool(a.loads.asked))
        second = asyncio.create_task(
            open_stage(user.channel(a), a.node_id, wanted(3, 6), lambda told: seen.append((told.bytes_done, told.bytes_total)))
        )
        await until(lambda: (1, 2) in seen)
        assert len(a.loads.asked) == 1, "it waits its turn"
        a.loads.gate.set()
        await asyncio.gather(first, second)
        await (await second).close()
        assert sorted(seen) == seen, "it only rises"


@in_loop
async def test_one_of_two_callers_may_go_away_during_a_load() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        a.loads.gate.clear()
        first, second = (asyncio.create_task(user.open(a)) for _ in range(2))
        await until(lambda: sum(len(shard.claims) for shard in a.warm.shards) == 2)
        first.cancel()
        await until(lambda: sum(len(shard.claims) for shard in a.warm.shards) == 1)
        a.loads.gate.set()
        assert (await second).opened.n_blocks == 8
        assert not a.loads.given_up.is_set()


@in_loop
async def test_a_load_that_fails_is_told_and_tried_again() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        a.loads.fault = UnsupportedModel("no such layers here")
        with pytest.raises(ShardUnavailable, match="no such layers here"):
            await user.open(a)
        a.loads.fault = OSError("disk")
        with pytest.raises(PipelineError, match="can't be loaded: OSError"):
            await user.open(a)
        assert a.warm.shards == ()
        a.loads.fault = None
        assert (await user.open(a)).opened.one_path


@in_loop
async def test_idle_shards_go_when_room_is_wanted_the_oldest_first() -> None:
    net = Net()
    async with hosting(net, "a", limits=HostLimits(max_shards=2)) as a, User(net) as user:
        for first in (0, 2):
            await (await user.open(a, wanted(first, first + 2))).close()
            await until_free(a)
        held = await user.open(a, wanted(0, 1))  # which makes it the younger one
        await user.open(a, wanted(4, 6))
        assert [shard.layers.start for shard in a.warm.shards] == [0, 4]
        assert [runner.closed for runner in a.loads.runners] == [False, True, False]
        assert a.meter.evictions == 1
        with pytest.raises(ShardUnavailable, match="all are in use"):
            await user.open(a, wanted(1, 5))
        assert not held.lost.done()


@in_loop
async def test_memory_is_budgeted() -> None:
    layer = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)  # weights of a layer, bf16
    block = 16 * SPEC.kv_bytes_per_token(wanted(0, 1).layers)
    rows = 4 * 512 * (4 * 64 + 2 * 64 + 2 * 96)
    budget = rows + 4 * (layer + 20 * block)
    net = Net()
    async with hosting(net, "a", limits=HostLimits(memory_bytes=budget)) as a, User(net) as user:
        stage = await user.open(a, wanted(0, 3))
        assert a.warm.used_bytes <= budget
        with pytest.raises(ShardUnavailable, match="may be taken here"):
            await user.open(a, wanted(3, 6))
        with pytest.raises(ShardUnavailable, match="may be taken here"):
            await user.open(a, wanted(0, 6))
        await stage.close()
        await until_free(a)
        await user.open(a, wanted(3, 6))
        assert a.meter.evictions == 1
        with pytest.raises(ShardUnavailable):
            await user.open(a, wanted(3, 6, n_blocks=1 << 20, least_blocks=1 << 20))
        assert a.warm.used_bytes <= budget


@in_loop
async def test_what_can_not_fit_is_refused_before_it_comes_and_not_behind_other_loads() -> None:
    four, streams = wanted(2, 6), HostLimits().max_streams
    fixed = fixed_bytes(SeededWeights(SPEC), four, kernels_for(SPEC, four.weights), 1, streams)
    group = kv_group(kernels_for(SPEC, four.weights))
    budget = fixed + -(-four.least_blocks // group) * group * block_bytes(SPEC, four, BLOCK_TOKENS)
    net = Net()
    async with hosting(net, "a", limits=HostLimits(memory_bytes=budget)) as a, User(net) as user:
        a.loads.gate.clear()
        first = asyncio.create_task(user.open(a, wanted(0, 1)))
        await until(lambda: bool(a.loads.asked))
        too_much = wanted(1, 6)
        with pytest.raises(ShardUnavailable, match="may be taken here"):
            await user.open(a, too_much)
        assert [request.layers for request in a.finder.stopped] == [too_much.layers]
        a.loads.gate.set()
        await (await first).close()
        await until_free(a)
        await user.open(a, four)


@in_loop
async def test_a_load_that_fails_leaves_no_memory_behind() -> None:
    """However long it is remembered why: an error knows the functions that it ended, and they know their arrays."""
    half: list[weakref.ref[npt.NDArray[np.float32]]] = []

    def fails(source: WeightSource, options: LoadOptions, progress: LoadProgress) -> NoReturn:
        packed = np.zeros(options.n_blocks, np.float32)
        half.append(weakref.ref(packed))
        raise KeyError(source.digest)

    net = Net()
    gc.disable()
    try:
        async with hosting(net, "a", load=fails) as a:
            loading = a.warm.prepare(wanted()).loading
            assert loading is not None
            await asyncio.wait({loading})
            with pytest.raises(ShardUnavailable, match="KeyError"):
                a.warm.prepare(wanted())
            assert [array() for array in half] == [None]
    finally:
        gc.enable()


@in_loop
async def test_a_session_leases_what_it_asks_for_and_later_ones_the_rest() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        first = await user.open(a)
        n = a.runner.n_blocks
        second = await user.open(a, wanted(n_blocks=n, least_blocks=1))
        assert (first.opened.n_blocks, second.opened.n_blocks) == (8, (n - 8) // 2)
        with pytest.raises(ShardUnavailable, match="KV blocks free"):
            await user.open(a, wanted(n_blocks=n, least_blocks=n))
        third = await user.open(a)
        assert third.opened.n_blocks >= 2


@in_loop
async def test_what_nobody_uses_for_long_is_evicted() -> None:
    net = Net()
    async with hosting(net, "a", limits=HostLimits(idle_s=0.05)) as a, User(net) as user:
        stage = await user.open(a)
        await a.warm.evict_idle()
        assert len(a.warm.shards) == 1
        await stage.close()
        await until(lambda: a.runner.closed)
        assert a.warm.shards == ()
        assert a.meter.evictions == 1


@in_loop
async def test_callers_that_are_not_trusted_are_refused_everything() -> None:
    net = Net()
    async with hosting(net, "a", refuse=("guest",)) as a, User(net) as user, User(net, "guest") as guest:
        stage = await user.open(a)
        with pytest.raises(NotTrusted, match="guest"):
            await guest.open(a)
        assert not stage.lost.done()
        assert len(a.loads.asked) == 1
        assert a.meter.sessions_opened == 1


@in_loop
async def test_a_session_is_its_callers_alone() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user, User(net, "other") as other:
        request = wanted()
        await user.open(a, request)
        theirs = await other.open(a, request)  # the same id, and another session
        with pytest.raises(BadPipelineRequest, match="is open"):
            await user.open(a, request)
        await theirs.close()
        await until(lambda: a.host.sessions == 1)
        with pytest.raises(BadPipelineRequest, match="no such session"):
            await theirs.connect(other.expect()[1])


@in_loop
async def test_results_go_only_to_members_that_are_there() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        stage = await user.open(a)
        with pytest.raises(BadPipelineRequest, match="no node"):
            await stage.connect(NextStage(NodeId("nobody"), ("127.0.0.1:1",), bytes(32)))
        with pytest.raises(ShardUnavailable, match="b can't be reached"):
            await stage.connect(NextStage(b.node_id, ("127.0.0.1:1",), bytes(32)))
        with pytest.raises(ShardUnavailable, match="ticket"):
            await stage.connect(NextStage(b.node_id, (f"127.0.0.1:{b.listener.port}",), bytes(32)))
        net.fleet.revoke("b")
        with pytest.raises(NotTrusted, match="revoked"):
            await stage.connect(b.next_stage(bytes(32)))
        await stage.connect(user.expect()[1])
        with pytest.raises(BadPipelineRequest, match="connected already"):
            await stage.connect(user.expect()[1])
        assert not stage.lost.done()


@in_loop
async def test_a_session_ends_with_its_call() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        route = await user.route((a, stage))
        await route.run(batch_of(1), rows_of(4))
        assert threads() == 1
        await stage.close()
        await until_free(a)
        assert a.runner.closed is False


@in_loop
async def test_a_session_ends_when_its_callers_channel_breaks() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        channel = user.channel(a)
        stage = await user.open(a, channel=channel)
        await user.route((a, stage))
        await channel.close(None)
        await until_free(a)
        loss = await asyncio.wait_for(asyncio.wrap_future(stage.lost), 100)
        assert (loss.code, loss.reported) == ("shard_unavailable", False)


@in_loop
async def test_whatever_is_asked_over_a_channel_that_was_closed_ends_with_an_error_of_the_fleet() -> None:
    """As when the node starts anew, which is heard of while a route over it is being opened."""
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        channel = user.channel(a)
        stage = await user.open(a, channel=channel)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # a stage that can't be reached soon
            silent_stage = NextStage(user.identity.node_id, (f"127.0.0.1:{silent.getsockname()[1]}",), bytes(32))
            connecting = asyncio.create_task(stage.connect(silent_stage))
            dialled, _ = await in_thread(silent.accept)
            with dialled:
                await channel.close(None)
                with pytest.raises(NodeUnreachable):
                    await connecting
        for later in (stage.connect(user.expect()[1]), open_stage(channel, a.node_id, wanted())):
            with pytest.raises(NodeUnreachable, match="was closed"):
                await later


@in_loop
async def test_a_session_ends_with_its_callers_certificate() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        await user.route((a, stage))
        sealed = net.fleet.revoke("user")
        a.guard.revoked(NodeId("user"), sealed.revocation.not_after)
        await asyncio.wait_for(asyncio.wrap_future(stage.lost), 100)
        await until_free(a)


@in_loop
async def test_a_session_that_computes_ends_after_its_batch() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        route = await user.route((a, stage))
        a.runner.gate.clear()
        await in_thread(route.sink.send, batch_of(1), rows_of(4), soon())
        await in_thread(a.runner.running.wait, 10)
        await until(lambda: stage.report.queue_depth == 1)
        await stage.close()
        await until(lambda: not a.host._open)  # pyright: ignore[reportPrivateUsage]
        (shard,) = a.warm.shards
        assert (len(shard.claims), shard.is_ending, shard.leases.free < shard.leases.n_blocks) == (1, True, True)
        a.runner.gate.set()
        await until_free(a)


@in_loop
async def test_a_stopping_host_ends_its_sessions_and_says_so() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        await user.route((a, stage))
        await a.host.close()
        loss = await asyncio.wait_for(asyncio.wrap_future(stage.lost), 100)
        assert loss.code == ShardUnavailable.code
        assert (a.warm.shards, a.runner.closed) == ((), True)
        await until(lambda: threads() == 0)
        with pytest.raises(ShardUnavailable, match="stopping"):
            await user.open(a)


@in_loop
async def test_layers_that_the_model_lacks_and_models_that_nobody_has() -> None:
    net = Net()
    loads = CountingLoads()
    async with hosting(net, "a", load=loads) as a, User(net) as user:
        with pytest.raises(BadPipelineRequest, match="6 layers"):
            await user.open(a, wanted(5, 7))
        with pytest.raises(BadPipelineRequest, match="Nobody has"):
            await user.open(a, replace(wanted(), digest="cd" * 32))
        assert (loads.asked, a.warm.shards) == ([], ())


@in_loop
async def test_activations_sent_before_a_stage_is_connected_wait() -> None:
    net = Net()
    async with hosting(net, "a") as a, User(net) as user:
        stage = await user.open(a)
        sink = await user.reach(a, stage)
        await in_thread(sink.send, batch_of(1), rows_of(4), soon())
        assert not a.runner.running.is_set()
        expected, end = user.expect()
        await stage.connect(end)
        source = await in_thread(expected.accept, soon())
        batch, _ = await in_thread(source.receive, soon())
        assert batch.batch_id == 1
        with pytest.raises(StreamClosed, match="ticket"):
            await in_thread(user.ends.way(a.next_stage(stage.opened.ticket), ActivationDtype.BF16), soon())
        source.close()


@in_loop
async def test_a_stage_dials_only_hosts_of_the_card_whatever_hosts_its_caller_names(monkeypatch: pytest.MonkeyPatch) -> None:
    net, dialled = Net(), list[tuple[str, ...]]()

    def refuse(addresses: tuple[str, ...], *_: object) -> None:
        dialled.append(tuple(addresses))
        raise NodeUnreachable("refused")

    monkeypatch.setattr("paceline.ways.pipeline.host.ends.dial", refuse)
    async with hosting(net, "a") as a, User(net) as user:
        for named in (("192.0.2.7:22",), ("localhost:6379", "10.0.0.1:22"), ("[fd00::1]:6379", "127.0.0.1:1")):
            stage = await user.open(a)
            with pytest.raises(ShardUnavailable):
                await stage.connect(NextStage(user.identity.node_id, named, bytes(32)))
    assert dialled == [("127.0.0.1:22",), ("127.0.0.1:6379",), ("127.0.0.1:6379",)]
