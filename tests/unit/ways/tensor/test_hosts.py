"""A tensor group over two nodes of a fleet, with real mTLS on loopback and real processes, answers as one process does, whatever becomes of the other node."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.fakes.fleets import TestFleet
from tests.fakes.loops import on_a_loop
from tests.unit.net.member.nodes import make_node, until_seen
from tests.unit.ways.tensor.test_group import BOUND_S, TINY, _await_state, _recall, _until, alone, answers, engine, group_of, model

from paceline.backends import cpu
from paceline.backends.memory import own_bytes
from paceline.core.errors import ConfigError, NodeStopping, ShardUnavailable
from paceline.core.generation import GenerationRequest, Notice, SamplingParams
from paceline.core.ids import BlockId, NodeId, RequestId, Trust
from paceline.core.manifest import ByteRuns
from paceline.fleet.messages import Expired
from paceline.machine.build import BuiltEngine, build_engine
from paceline.machine.settings import NodeSettings
from paceline.machine.weights import give_weights
from paceline.net.member.node import FleetNode
from paceline.net.weights_client import WeightsClient
from paceline.store.catalog import Library, resolve
from paceline.store.home import Home
from paceline.ways.tensor.away import AwayRank
from paceline.ways.tensor.codec import RankLoading, RankOpened, Stops, read_event
from paceline.ways.tensor.hosted import HostedRank
from paceline.ways.tensor.hosting import RankHost, RankPlace
from paceline.ways.tensor.loading import load_group
from paceline.ways.tensor.pump import GroupPump
from paceline.ways.tensor.rank import EXPORT, block_request

pytestmark = [pytest.mark.sampled(6, by="test"), pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")]

__all__ = ["alone", "model"]

PATIENT = "desk,ttl_s=100,exchange_s=0.2,restamp_s=0.2,rpc_timeout_s=20"
"""A preset whose cards outlast a processor that others want, too: a node whose card expires is hung up on."""


@dataclass(frozen=True)
class Hosts:
    """Nodes of one fleet, the first of which has groups, and the others run ranks of them."""

    nodes: tuple[FleetNode, ...]
    ranks: tuple[RankHost, ...]
    """Of the others."""
    loop: asyncio.AbstractEventLoop

    def places(self, *names: str) -> Mapping[int, RankPlace]:
        """Of ranks from the second on."""
        return {rank: RankPlace(NodeId(name), self.nodes[0], self.loop) for rank, name in enumerate(names, 1)}


@asynccontextmanager
async def nodes(root: Path, model: Path, trust: Trust = Trust.MEMBER, *, everywhere: bool = True) -> AsyncIterator[Hosts]:
    """Args: everywhere: the other nodes have the model, too."""
    fleet, home = TestFleet(), Home.from_environment()
    a = make_node(fleet, root, "a", trust=trust, preset=PATIENT)
    made, started, ranks = [a], list[FleetNode](), list[RankHost]()
    try:
        await a.start(lambda guard: give_weights(home, guard, a.trust, [resolve(str(model), home)]))
        started.append(a)
        for name in ("b", "c"):
            node = make_node(fleet, root, name, a, preset=PATIENT)
            host = RankHost(node, home, threads=1, beside=[resolve(str(model), home)] if everywhere else [])
            await node.start(host.service)
            started.append(node)
            made.append(node)
            ranks.append(host)
        await asyncio.gather(*(until_seen(node, "a", "b", "c") for node in made))
        yield Hosts(tuple(made), tuple(ranks), asyncio.get_running_loop())
    finally:
        await asyncio.gather(*(node.stop() for node in started))
        await asyncio.gather(*(host.stop() for host in ranks))


@pytest.fixture(scope="module")
def hosts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with on_a_loop(partial(nodes, tmp_path_factory.mktemp("hosts"), model)) as made:
        yield made


@contextmanager
def group(model: Path, places: Mapping[int, RankPlace], *speeds: float, kv_tokens: int = 4096) -> Iterator[BuiltEngine]:
    settings = NodeSettings(str(model), context=1024, kv_tokens=kv_tokens, threads=1, draft="off", tensor=speeds)
    built = build_engine(settings, spread=partial(load_group, places=places))
    try:
        yield built
    finally:
        built.close()


def rank_of(built: BuiltEngine, rank: int = 1) -> AwayRank:
    found = group_of(built)._ranks._processes[rank - 1]
    assert isinstance(found, AwayRank)
    return found


def test_a_rank_of_another_node_answers_as_one_process(model: Path, alone: list[list[int]], hosts: Hosts) -> None:
    with group(model, hosts.places("b"), 1.0, 1.0) as built:
        assert answers(built, "away") == alone
        assert rank_of(built).gone is None


@pytest.mark.parametrize("places", [("b", "c"), ("b", "")], ids=["two away", "one away and one here"])
def test_three_ranks_meet_at_the_first(model: Path, alone: list[list[int]], hosts: Hosts, places: tuple[str, ...]) -> None:
    with group(model, {rank: place for rank, place in hosts.places(*places).items() if place.node_id}, 2.0, 1.0, 1.0) as built:
        assert answers(built, "three") == alone
        assert group_of(built).losses == 0


def test_a_rank_of_a_node_that_lacks_the_model_is_lent_its_share_and_nothing_else(
    model: Path, alone: list[list[int]], tmp_path: Path, hosted: list[HostedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    lent, read_runs = list[int](), Library.read_runs

    def counted(self: Library, digest: str, runs: ByteRuns) -> bytes:
        lent.append(runs.nbytes)
        return read_runs(self, digest, runs)

    monkeypatch.setattr(Library, "read_runs", counted)
    with on_a_loop(partial(nodes, tmp_path, model, everywhere=False)) as made, group(model, made.places("b"), 3.0, 1.0) as built:
        assert answers(built, "lent") == alone
        assert rank_of(built).gone is None
        assert sum(lent) == hosted[0].process.progress[1] < model.stat().st_size * 0.35


def test_heads_that_lie_under_another_name_do(model: Path, alone: list[list[int]], tmp_path: Path) -> None:
    """A file's digest does not cover its name."""
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(model.read_bytes())
    for path in (model, renamed):
        root = tmp_path / path.stem
        root.mkdir()
        with on_a_loop(partial(nodes, root, path, everywhere=False)) as made, group(path, made.places("b"), 3.0, 1.0) as built:
            assert answers(built, path.stem) == alone


def test_a_block_is_asked_for_behind_a_command_however_long_that_takes(
    model: Path, alone: list[list[int]], hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow, begun, go_on = GroupPump._follow, threading.Event(), threading.Event()

    def held(self: GroupPump) -> None:
        begun.set()
        go_on.wait(BOUND_S)
        follow(self)

    with group(model, hosts.places("b"), 1.0, 1.0) as built, ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(GroupPump, "_follow", held)
        monkeypatch.setattr("paceline.ways.tensor.ranks.STALL_S", BOUND_S)
        answer = pool.submit(answers, built, "slow")
        assert begun.wait(BOUND_S)
        pump = rank_of(built)._pump
        assert pump is not None
        asked = pool.submit(pump.ask, block_request(EXPORT, BlockId(0), group_of(built).layers), 1.0)
        assert not futures.wait([asked], 1.5).done
        go_on.set()
        assert asked.result(BOUND_S)
        assert answer.result(BOUND_S) == alone
        assert group_of(built).losses == 0


def test_a_rank_that_comes_back_with_other_bytes_runs_here(
    model: Path, alone: list[list[int]], hosts: Hosts, hosted: list[HostedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine was brought up to date meanwhile."""
    told = list[Notice]()
    with group(model, hosts.places("b"), 1.0, 1.0) as built:
        monkeypatch.setattr("paceline.ways.tensor.hosting.RankOpened", lambda port, ticket, _: RankOpened(port, ticket, "other"))
        strike = partial(os.kill, hosted[0].process.pid, signal.SIGKILL)
        assert answers(built, "updated", strike=strike, notices=told) == alone
        assert told[-1].detail["route"] == "rank 1 on this machine"
        assert group_of(built).lacks is None


def test_kv_goes_out_and_in_over_the_streams(model: Path, hosts: Hosts) -> None:
    with engine(model, 1.0) as one, group(model, hosts.places("b"), 1.0, 1.0) as built:
        for each, name in ((one, "one"), (built, "two")):
            answers(each, name, 1)
        runner = group_of(built)
        mine, its = (bytearray(runner.block_bytes) for _ in range(2))
        for block in range(3):
            one.runner.export_block(BlockId(block), memoryview(mine))
            runner.export_block(BlockId(block), memoryview(its))
            assert its == mine
        runner.import_block(BlockId(100), memoryview(mine))
        runner.export_block(BlockId(100), memoryview(its))
        assert its == mine


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> list[HostedRank]:
    """Ranks that nodes of this process run for others, as they are started."""
    found, start = list[HostedRank](), HostedRank.start

    def started(self: HostedRank, patience_s: float) -> None:
        start(self, patience_s)
        found.append(self)

    monkeypatch.setattr(HostedRank, "start", started)
    return found


def end_stream(built: BuiltEngine) -> None:
    pump = rank_of(built)._pump
    assert pump is not None
    pump._sender.close()


STRIKES: dict[str, Callable[[BuiltEngine, HostedRank], object]] = {
    "killed": lambda _, rank: os.kill(rank.process.pid, signal.SIGKILL),
    "stopped": lambda _, rank: os.kill(rank.process.pid, signal.SIGSTOP),
    "cut off": lambda built, _: end_stream(built),
}


@pytest.mark.parametrize("strike", STRIKES)
def test_a_rank_away_that_is_lost_costs_no_answer(
    model: Path, alone: list[list[int]], hosts: Hosts, hosted: list[HostedRank], strike: str
) -> None:
    told = list[Notice]()
    with group(model, hosts.places("b"), 1.0, 1.0) as built:
        lost = rank_of(built)
        assert answers(built, "struck", strike=lambda: STRIKES[strike](built, hosted[0]), notices=told) == alone
        assert lost.gone is not None
        assert rank_of(built) is not lost
        assert group_of(built).losses == 1
        assert [notice.kind for notice in told] == ["shard_status", "shard_failover"]
        assert told[1].detail["route"] == "rank 1 on b"
        assert answers(built, "after") == alone
    for rank in hosted:
        _await_state(rank.process.pid, "ZX")


def test_sums_that_a_thread_beside_sends_cross_and_end_with_their_stream(
    model: Path, alone: list[list[int]], hosts: Hosts, hosted: list[HostedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.ways.tensor.pump.AT_ONCE_BYTES", -1)
    with group(model, hosts.places("b"), 1.0, 1.0) as built:
        assert answers(built, "beside") == alone
        assert answers(built, "cut off", strike=partial(end_stream, built)) == alone
        assert group_of(built).losses == 1
    for rank in hosted:
        _await_state(rank.process.pid, "ZX")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-rank-1-sends")]


def test_what_a_rank_takes_counts_where_it_runs(model: Path, hosts: Hosts) -> None:
    host = hosts.ranks[0]
    host.left_bytes = lambda: 1 << 20
    try:
        with pytest.raises(ConfigError, match=r"needs .*, and 1 MiB may be taken here"), group(model, hosts.places("b"), 1.0, 1.0):
            pass
        host.left_bytes = lambda: 1 << 30
        with group(model, hosts.places("b"), 1.0, 1.0):
            even = host.used_bytes
        with group(model, hosts.places("b"), 3.0, 1.0):
            assert 0 < host.used_bytes < even
    finally:
        host.left_bytes = lambda: None


def test_memory_that_a_rank_is_to_take_is_nobody_else_s(model: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its KV nothing is written to yet, and while it loads, of nothing: the system calls both free, and another rank's host would."""
    host, seen, start = hosts.ranks[0], list[int](), HostedRank.start

    def noted(self: HostedRank, patience_s: float) -> None:
        seen.append(host.coming_bytes)
        start(self, patience_s)

    monkeypatch.setattr(HostedRank, "start", noted)
    with group(model, hosts.places("b"), 1.0, 1.0, kv_tokens=1 << 20):
        needed = host.used_bytes
        assert seen == [needed]
        assert 0 < host.coming_bytes < needed


def test_what_the_process_of_a_rank_takes_is_counted(model: Path, hosts: Hosts, hosted: list[HostedRank]) -> None:
    """Of a small model it is most of it."""
    with group(model, hosts.places("b"), 1.0, 1.0):
        taken = own_bytes(hosted[0].process.pid)
        assert taken is not None
        assert taken <= hosts.ranks[0].used_bytes


def test_a_rank_whose_weights_come_slowly_says_how_far_they_are_and_ends_with_its_caller(
    model: Path, tmp_path: Path, hosted: list[HostedRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, told, cancelled, made_here = threading.Event(), list[RankLoading](), threading.Event(), list[AwayRank]()
    start = AwayRank._run

    def run(self: AwayRank) -> Any:
        made_here.append(self)
        return start(self)

    async def slow(self: WeightsClient, digest: str, runs: ByteRuns, arrived: Callable[[int], object]) -> bytes:
        arrived(1000)
        held.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    def read(message: Any) -> Any:
        event = read_event(message)
        if isinstance(event, RankLoading) and held.is_set():
            told.append(event)
        return event

    monkeypatch.setattr(AwayRank, "_run", run)
    monkeypatch.setattr(WeightsClient, "fetch_runs", slow)
    monkeypatch.setattr("paceline.ways.tensor.away.read_event", read)
    with on_a_loop(partial(nodes, tmp_path, model, everywhere=False)) as made, ThreadPoolExecutor(2) as pool:
        loading = pool.submit(lambda: group(model, made.places("b"), 3.0, 1.0).__enter__())
        futures.wait([pool.submit(_until, lambda: len(told) > 1)])
        made_here[0].kill()  # as who hangs up does
        assert told[-1].bytes_done == 1000
        with pytest.raises(ConfigError, match="was lost while it loaded"):
            loading.result(BOUND_S)
        assert cancelled.wait(BOUND_S)
        _until(lambda: made.ranks[0].used_bytes == 0)
        _await_state(hosted[0].process.pid, "ZX")


def test_what_is_aborted_in_the_middle_leaves_the_group_whole(model: Path, alone: list[list[int]], hosts: Hosts) -> None:
    with group(model, hosts.places("b"), 1.0, 1.0) as built:
        lose_none = rank_of(built)
        for turn in range(10):
            request = RequestId(f"gone-{turn}")
            ids = tuple(np.random.default_rng(turn).integers(5, TINY.vocab, 800).tolist())
            built.engine.add(GenerationRequest(request, ids, 4, SamplingParams(seed=1)))
            built.engine.submit()
            recalled = threading.Thread(target=_recall, args=(built, request, built.executor.advanced + turn % 3))
            recalled.start()
            built.engine.collect()
            recalled.join()
            built.engine.abort(request)
        assert answers(built, "after") == alone
        assert rank_of(built) is lose_none


def test_a_node_whose_news_are_late_keeps_its_rank(model: Path, alone: list[list[int]], hosts: Hosts) -> None:
    """Its card expires, and it answers."""

    async def expire() -> None:
        for node, late in zip(hosts.nodes, ("b", "a"), strict=False):
            node.news(Expired(NodeId(late)))
            await asyncio.gather(*node.pool._closing)

    with group(model, hosts.places("b"), 1.0, 1.0) as built:
        lose_none = rank_of(built)
        assert answers(built, "late", strike=lambda: asyncio.run_coroutine_threadsafe(expire(), hosts.loop).result(BOUND_S)) == alone
        assert answers(built, "after") == alone
        assert rank_of(built) is lose_none
        assert group_of(built).losses == 0


def test_a_node_that_leaves_for_good_leaves_its_rank_here(model: Path, alone: list[list[int]], hosts: Hosts) -> None:
    with group(model, hosts.places("c"), 1.0, 1.0) as built:

        def leave() -> None:
            asyncio.run_coroutine_threadsafe(hosts.nodes[2].stop(), hosts.loop).result(60)

        told = list[Notice]()
        assert answers(built, "left", strike=leave, notices=told) == alone
        assert told[-1].detail["route"] == "rank 1 on this machine"
        assert built.executor.away == ()
        _, here = group_of(built).processes
        assert here
        assert answers(built, "after") == alone


def test_guests_have_no_ranks_run(model: Path, tmp_path: Path) -> None:
    with (
        on_a_loop(partial(nodes, tmp_path, model, Trust.GUEST)) as made,
        pytest.raises(ConfigError, match="a is a guest of the fleet"),
        group(model, made.places("b"), 1.0, 1.0),
    ):
        pass


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"version": 99}, "speaks version 99"),
        ({"digest": "ab" * 32}, "is not on this machine"),
        ({"stops": (Stops(1, 1, 1), Stops(2, 2, 2))}, "don't share a model"),
    ],
    ids=["version", "weights", "shares"],
)
def test_a_rank_that_can_t_be_is_refused_and_why(
    model: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], says: str
) -> None:
    request = AwayRank._request
    monkeypatch.setattr(AwayRank, "_request", lambda self, ticket: replace(request(self, ticket), **wrong))
    with pytest.raises(ConfigError, match=says), group(model, hosts.places("b"), 1.0, 1.0):
        pass


def test_a_node_that_stops_begins_no_rank() -> None:
    """What watches ranks outlives the fleet's loop, and may miss one meanwhile."""
    over: Any = asyncio.new_event_loop()
    over.close()
    nothing: Any = SimpleNamespace(rank=1)
    with pytest.raises(NodeStopping, match="this node is stopping"):
        AwayRank(RankPlace(NodeId("b"), nothing, over), nothing, nothing, nothing, 1.0)


def test_one_caller_gets_half_of_a_hosts_places() -> None:
    nothing: Any = None
    host = RankHost(nothing, nothing, threads=1)

    async def loads(*_: object) -> AsyncIterator[RankLoading]:
        while True:
            yield RankLoading(0, 1)

    async def opened(name: str) -> AsyncGenerator[Any]:
        caller: Any = SimpleNamespace(node_id=NodeId(name))
        events = host.open(nothing, caller)
        await anext(events)
        return events

    async def work() -> None:
        held = [await opened(name) for name in ("b", "b", "c")]
        with pytest.raises(ShardUnavailable):
            await opened("b")
        held.append(await opened("d"))
        with pytest.raises(ShardUnavailable):
            await opened("e")
        await held.pop(0).aclose()
        held.append(await opened("b"))
        for events in held:
            await events.aclose()
        await host.stop()

    host._rank = loads  # type: ignore[assignment]
    asyncio.run(work())
