"""KV between nodes: the same tokens, less of them computed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event

import grpc
import grpc.aio
import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.engines import VOCAB, EngineBench
from tests.fakes.fleets import TestFleet
from tests.fakes.null_backend import NullRunner
from tests.fakes.scripted_inference import ScriptedInference
from tests.unit.machine.weights.conftest import new_home  # noqa: F401
from tests.unit.net.member.nodes import in_loop, make_node, until
from tests.unit.ways.kv.sharers import DIGEST, sharer, sharers
from tests.unit.ways.pipeline.host.test_serving import nodes

from paceline.core.clock import SystemClock
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import BlockId, NodeId, RequestId, Trust
from paceline.core.model import ModelRef
from paceline.engine.kv_source import KvLoan, KvLoans
from paceline.fleet.eligibility import Use
from paceline.machine.kv_tier import REST_S, STALL_S, DiskTier, KvDiskLimits
from paceline.net.channels import Purpose
from paceline.net.wire import kv_pb2 as wire
from paceline.net.wire.kv_pb2_grpc import KvServiceStub
from paceline.store.home import Home
from paceline.ways.forward.client import RemoteStream
from paceline.ways.forward.service import LoadedModel
from paceline.ways.kv.fetching import KvPeer
from paceline.ways.kv.price import MARK_BYTES, KvPrice
from paceline.ways.kv.source import PeerKv

_DRAW = random.Random(3)
PROMPT = [_DRAW.randrange(1, VOCAB) for _ in range(100)]
WHOLE = (len(PROMPT) - 1) // 4


def alone(prompt: list[int]) -> list[int]:
    bench = EngineBench(n_blocks=64, max_context=200)
    return bench.run(GenerationRequest(RequestId("x"), tuple(prompt), 6, SamplingParams(seed=1), ignore_eos=True))[
        RequestId("x"), 0
    ].token_ids


@in_loop
async def test_a_conversation_goes_on_at_another_node_with_what_the_first_one_computed(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        first = await a.answer("1", PROMPT)
        assert first.token_ids == alone(PROMPT)
        await b.knows(a)
        second = await b.answer("1", PROMPT)
        assert (second.token_ids, second.cached_tokens) == (first.token_ids, 4 * WHOLE)
        assert b.bench.runner.rows_run == len(PROMPT) - 4 * WHOLE + len(second.token_ids) - 1
        await until(lambda: b.sharing.meter.fetches.total() == 1 and a.sharing.meter.blocks["given"] == WHOLE)
        assert b.sharing.meter.fetches == {"whole": 1}
        assert b.sharing.meter.blocks["fetched"] == WHOLE
        longer = [*PROMPT, *second.token_ids, *PROMPT[:30]]
        await a.knows(b)
        third = await a.answer("2", longer)
        assert third.token_ids == alone(longer)
        await until(lambda: not a.loans.out and not b.loans.out)


@in_loop
async def test_what_one_salt_or_another_model_has_is_not_fetched(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await a.answer("1", PROMPT, cache_salt="mine")
        await b.knows(a)
        assert (await b.answer("1", PROMPT)).cached_tokens == 0
        assert (await b.answer("2", PROMPT, cache_salt="mine")).cached_tokens == 4 * WHOLE


@in_loop
async def test_what_is_computed_for_a_node_that_may_not_share_is_told_to_none(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await a.answer("1", PROMPT[:40])
        before = a.loans.prefixes
        await a.answer("2", PROMPT[::-1], caller="visitor")
        assert a.loans.prefixes == before
        await b.knows(a)
        assert (await b.answer("2", PROMPT[::-1])).cached_tokens == 0


@in_loop
async def test_a_guest_gets_no_kv_and_gives_none(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("guest", Trust.GUEST)) as (a, guest):
        await a.answer("1", PROMPT)
        await guest.answer("1", PROMPT[::-1])
        channel = guest.node.pool.get(Purpose.STREAM, a.node.addresses[0], a.node.identity.member)
        stub = KvServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.FetchBlocks(wire.FetchBlocksRequest(digest=DIGEST, numerics_id="null", layout=a.kv.layout, keys=bytes(16)))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.WatchPrefixes(wire.WatchPrefixesRequest(digest=DIGEST, numerics_id="null")):
                pass
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert a.node.eligible(Use.SHARE_KV).cards == (a.node.view().get(a.node_id).card,)  # type: ignore[union-attr]
        assert (await a.answer("2", PROMPT[::-1])).cached_tokens == 0


@in_loop
async def test_where_a_prompt_lies_is_known_and_what_could_be_fetched_counts_as_here(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b")) as (a, b):
        await a.answer("1", PROMPT)
        await b.knows(a)
        shares = b.sharing.shares(DIGEST, "null", [*PROMPT, *PROMPT], "")
        assert shares[a.node_id] == 0.5
        assert 0.4 < shares[b.node_id] < 0.5
        assert b.sharing.shares(DIGEST, "null", PROMPT[::-1], "") == {}
        assert b.sharing.shares(DIGEST, "null", PROMPT, "salt") == {}
        assert b.sharing.shares("e" * 64, "null", PROMPT, "") == {}


@in_loop
async def test_where_computing_is_faster_nothing_is_fetched(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("a"), sharer("b", speed=1e9)) as (a, b):
        await a.answer("1", PROMPT)
        await b.was_told(a)
        answer = await b.answer("1", PROMPT)
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), 0)
        assert not b.sharing.meter.least_tokens
        assert not b.sharing.meter.fetches


@pytest.mark.parametrize(("trust", "shared"), [(Trust.GUEST, False), (Trust.MEMBER, True), (Trust.TRUSTED, True)])
@in_loop
async def test_a_guest_s_request_is_computed_apart_and_a_member_s_with_this_node_s_own(
    tmp_path: Path,
    new_home: Callable[[str], Home],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    trust: Trust,
    shared: bool,
) -> None:
    fleet, seen = TestFleet(), list[GenerationRequest]()
    async with nodes(fleet, ("a", new_home("a"), None)) as (a,):
        asker = make_node(fleet, tmp_path, "asker", trust=trust)
        local, scripted = a.inference._local, ScriptedInference()  # pyright: ignore[reportPrivateUsage]
        loaded = LoadedModel(ModelRef("d", "", "echo"), "", 0, 4096)
        local.show(scripted, [loaded], {"echo"})
        monkeypatch.setattr(local, "generate", lambda model, request: seen.append(request) or scripted.generate(model, request))
        channel = asker.pool.get(Purpose.STREAM, a.fleet.addresses[0], a.fleet.identity.member)
        request = GenerationRequest(RequestId("x"), (65, 66), 2, SamplingParams(seed=1))
        assert [chunks async for chunks in RemoteStream(lambda: channel, "a", loaded, request)]
        await asker.pool.close()
        assert [(request.caller, request.shares_kv, request.keeps_apart) for request in seen] == [("asker", shared, not shared)]


def test_what_the_disk_lacks_is_offered_to_it_again_though_a_peer_has_it(tmp_path: Path) -> None:
    runner, loans, copied, (here, there) = NullRunner(n_blocks=8), KvLoans(), Event(), (bytes([number]) * 16 for number in (1, 2))
    with closing(DiskTier(runner, DIGEST, tmp_path, KvDiskLimits(1 << 30), SystemClock(), copied.set)) as before:
        assert before.keep(here, BlockId(0))
        assert copied.wait(60)
    disk = DiskTier(runner, DIGEST, tmp_path, KvDiskLimits(1 << 30), SystemClock(), lambda: None)
    with (
        closing(PeerKv(runner, DIGEST, disk, loans, lambda: None)) as kv,
        closing(PeerKv(runner, DIGEST, None, loans, lambda: None)) as none,
    ):
        marks = frozenset({here[:MARK_BYTES], there[:MARK_BYTES]})
        for each in (kv, none):
            each.show([KvPeer(NodeId("peer"), b"", (), marks, KvPrice(0.0, 0.1, 1.0))], lambda _: None)
            assert each.run_of([there]) == 1
        assert (kv.lacks(here), kv.lacks(there)) == (False, True)
        assert not none.lacks(there), "nothing is kept"


def test_what_lies_on_a_disk_that_hangs_is_promised_to_no_peer(tmp_path: Path) -> None:
    runner, key, copied, clock, loan = NullRunner(n_blocks=8), bytes(15) + b"k", Event(), FakeClock(), KvLoan({})
    with closing(DiskTier(runner, DIGEST, tmp_path, KvDiskLimits(1 << 30), SystemClock(), copied.set)) as before:
        assert before.keep(key, BlockId(0))
        assert copied.wait(60)
    disk = DiskTier(runner, DIGEST, tmp_path, KvDiskLimits(1 << 30), clock, lambda: None)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    with closing(PeerKv(runner, DIGEST, disk, KvLoans(), lambda: None)) as kv:
        assert kv.has(loan, key)
        path.unlink()
        os.mkfifo(path)
        fetch = disk.fetch([key], [BlockId(1)])
        with path.open("wb"):  # once it is being read, and gives nothing
            clock.advance(STALL_S + 1)
            assert fetch.is_over
            assert not kv.has(loan, key)
            clock.advance(REST_S + 1)
            assert kv.has(loan, key)
