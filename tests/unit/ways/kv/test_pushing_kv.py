"""Prompts computed at another node: the same bytes whatever becomes of them, and nothing held once they are over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.kv.sharers import DIGEST, Sharer, sharer, sharers
from tests.unit.ways.kv.test_faulty_peers import FIRST, Turn, another, damaged, dies, shorter
from tests.unit.ways.kv.test_sharing_kv import PROMPT, WHOLE, alone

from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId, Trust
from paceline.engine.prefix_cache import prompt_keys, root_key
from paceline.machine.settings import PrefillRole
from paceline.net.channels import Purpose
from paceline.net.tensor.ends import TensorSender
from paceline.net.wire import kv_pb2 as wire
from paceline.net.wire.kv_pb2_grpc import KvServiceStub
from paceline.ways.kv import prefilling, pushing

FAST, SLOW = 10_000.0, 1.0
LEFT = ({"left": 1}, {"write_failed": 1})
"""How a prompt that is not wanted any more ends where it is computed: a stream that is opened after that is refused."""
SWIFT = 30.0
"""Tokens of prompts a second at D: its watchdog fires after three seconds, by when P has taken the registration on a busy processor too."""


async def at_rest(p: Sharer, d: Sharer) -> None:
    """Nothing is lent, held or leased any more."""
    await until(lambda: not p.loans.out and not d.loans.out and not p.sharing._servicer._leases.live)  # pyright: ignore[reportPrivateUsage]


@in_loop
async def test_a_prompt_is_computed_where_that_is_faster_and_each_block_comes_once(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        await p.computes_for(d)
        answer = await d.answer("1", PROMPT)
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), 4 * WHOLE)
        assert d.bench.runner.rows_run == len(PROMPT) - 4 * WHOLE + len(answer.token_ids) - 1
        assert p.bench.runner.rows_run == 4 * WHOLE
        await until(lambda: p.sharing.meter.prefills == {"whole": 1} and d.sharing.meter.pushes == {"whole": 1})
        assert d.sharing.meter.blocks["pushed"] == p.sharing.meter.blocks["given"] == WHOLE
        first_s = d.sharing.meter.push_s["whole"]
        # What is known here is not asked for again: of a longer prompt, the rest alone comes.
        longer = [*PROMPT, *PROMPT[:60]]
        assert (await d.answer("2", longer)).token_ids == alone(longer)
        await until(lambda: d.sharing.meter.pushes == {"whole": 2})
        assert d.sharing.meter.push_s["whole"] > first_s > 0
        assert d.sharing.meter.blocks["pushed"] == (len(longer) - 1) // 4 - 1  # its 25th block was computed here
        await at_rest(p, d)


@in_loop
async def test_blocks_come_while_later_chunks_still_run(tmp_path: Path) -> None:
    gate = threading.Event()
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        steps = 0

        def pace() -> None:
            nonlocal steps
            steps += 1
            if steps == 4:
                gate.wait(60)

        p.pace = pace
        await p.computes_for(d)
        asking = asyncio.create_task(d.answer("1", PROMPT))
        try:
            await until(lambda: sum(fetch.filled for fetch in d.kv._fetches) >= 4)  # pyright: ignore[reportPrivateUsage]
            assert not asking.done()
        finally:
            gate.set()
        assert (await asking).token_ids == alone(PROMPT)
        await at_rest(p, d)


@in_loop
async def test_what_a_salt_or_a_guest_or_another_node_asks_is_not_shown(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        await p.computes_for(d)
        await d.answer("1", PROMPT, cache_salt="mine")
        await d.answer("2", PROMPT[::-1], caller="visitor")
        assert not d.sharing.meter.pushes
        assert p.bench.runner.rows_run == 0


@in_loop
async def test_roles_decide_who_computes_for_whom(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        await p.computes_for(d)
        d.kv.role = PrefillRole.PREFILL
        d.sharing._look_soon()  # pyright: ignore[reportPrivateUsage]
        await until(lambda: not d.sharing.meter.least_pushed)
        assert (await d.answer("1", PROMPT)).cached_tokens == 0
        d.kv.role, p.kv.role = PrefillRole.BOTH, PrefillRole.DECODE
        d.sharing._look_soon()  # pyright: ignore[reportPrivateUsage]
        await p.computes_for(d)  # it was told before
        other = PROMPT[::-1]
        assert (await d.answer("2", other)).token_ids == alone(other)
        await until(lambda: d.sharing.meter.pushes == {"refused": 1})


@in_loop
async def test_where_the_other_is_as_fast_the_prompt_stays(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=100.0), sharer("d", speed=100.0)) as (p, d):
        await until(lambda: p.node_id in d.sharing.meter.least_tokens)
        assert (await d.answer("1", PROMPT)).cached_tokens == 0
        assert not d.sharing.meter.pushes
        assert not d.sharing.meter.least_pushed


@in_loop
async def test_where_answers_are_written_it_goes_to_one_that_is_as_fast(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=100.0), sharer("d", speed=100.0)) as (p, d):
        await until(lambda: p.node_id in d.sharing.meter.least_tokens)
        d.bench.add(GenerationRequest(RequestId("1"), tuple(PROMPT[:3]), 40, SamplingParams(seed=1), ignore_eos=True))
        while not d.bench.answers:
            d.bench.step()
        answer = await d.answer("2", PROMPT)
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), 4 * WHOLE)
        await until(lambda: d.sharing.meter.pushes == {"whole": 1})
        await at_rest(p, d)


@in_loop
async def test_a_guest_computes_nothing_for_others_and_has_nothing_computed(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("d", speed=SLOW), sharer("guest", Trust.GUEST, FAST)) as (d, guest):
        assert (await d.answer("1", PROMPT)).cached_tokens == 0
        assert guest.node_id not in d.sharing.meter.least_pushed
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call_of(guest, d, [registration(d)])
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(("fault", "end"), [(damaged, "damaged"), (another, "damaged"), (shorter, "damaged"), (dies, "write_failed")])
@in_loop
async def test_what_comes_wrong_or_not_at_all_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[TensorSender, bytes, memoryview], object], end: str
) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        await p.computes_for(d)
        monkeypatch.setattr(prefilling, "send_block", Turn(fault))
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {end: 1})
        assert d.sharing.meter.blocks["pushed"] == FIRST
        await at_rest(p, d)
        monkeypatch.undo()
        other = PROMPT[::-1]
        assert (await d.answer("2", other)).token_ids == alone(other)
        assert d.sharing.meter.pushes == {end: 1}, "it is left in peace for a while"


@pytest.mark.parametrize("end", ["handshake_failed", "refused"])
@in_loop
async def test_one_that_takes_no_registration_is_left_in_peace(tmp_path: Path, end: str) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        await p.computes_for(d)
        if end == "refused":
            p.kv.role = PrefillRole.DECODE
        else:
            d.kv._peers = tuple(replace(peer, addresses=("127.0.0.1:1",)) for peer in d.kv._peers)  # pyright: ignore[reportPrivateUsage]
        for name, prompt in (("1", PROMPT), ("2", PROMPT[::-1])):
            answer = await d.answer(name, prompt)
            assert (answer.token_ids, answer.cached_tokens) == (alone(prompt), 0)
        await until(lambda: d.sharing.meter.pushes == {end: 1})
        assert not p.sharing.meter.prefills
        await at_rest(p, d)


@in_loop
async def test_one_that_can_t_be_reached_with_blocks_hears_so_and_nothing_is_kept_for_it(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call_of(d, p, [registration(d, tensor_port=1)])
        assert ended.value.code() is grpc.StatusCode.ABORTED
        assert p.sharing.meter.prefills == {"write_failed": 1}
        await at_rest(p, d)
        await until(lambda: p.bench.engine.stats().blocks_in_use == 0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@in_loop
async def test_one_that_takes_too_long_is_left_by_the_watchdog(tmp_path: Path, gate: threading.Event) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SWIFT)) as (p, d):
        p.pace = lambda: gate.wait(60)
        await p.computes_for(d)
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"watchdog": 1})
        gate.set()
        await until(lambda: p.sharing.meter.prefills in LEFT)
        await at_rest(p, d)
        await until(lambda: p.bench.engine.stats().blocks_in_use == 0)


@pytest.mark.parametrize("n_writing", [0, 1])
@in_loop
async def test_one_is_waited_for_as_long_as_computing_here_would_take_beside_answers(
    tmp_path: Path, gate: threading.Event, n_writing: int
) -> None:
    clock = FakeClock()
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=8.0)) as (p, d):
        p.pace, d.kv.now = lambda: gate.wait(60), clock.monotonic
        await p.computes_for(d)
        if n_writing:
            d.bench.add(GenerationRequest(RequestId("1"), tuple(PROMPT[:3]), 40, SamplingParams(seed=1), ignore_eos=True))
            while not d.bench.answers:
                d.bench.step()
        answering = asyncio.create_task(d.answer("2", PROMPT))
        await until(lambda: p.sharing._servicer.n_leases == 1)  # pyright: ignore[reportPrivateUsage]
        clock.advance(2.5 * WHOLE * 4 / 8.0)  # alone all would be computed by now
        (waited,) = d.kv._fetches  # pyright: ignore[reportPrivateUsage]
        (push,) = waited._parts  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        push.look()
        gate.set()
        assert (await answering).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"whole" if n_writing else "watchdog": 1})
        await at_rest(p, d)


@in_loop
async def test_one_that_says_nothing_is_left_before_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    monkeypatch.setattr(pushing, "SILENT_S", 0.2)
    monkeypatch.setattr(prefilling, "PROGRESS_S", 60.0)
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        p.pace = lambda: gate.wait(60)
        await p.computes_for(d)
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"silent": 1})
        gate.set()
        await until(lambda: p.sharing.meter.prefills in LEFT)
        await at_rest(p, d)


@in_loop
async def test_an_answer_that_is_not_wanted_any_more_ends_its_prompt_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        reached, streams, send_next = threading.Event(), threading.Event(), prefilling.Prefilling._send_next  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(prefilling.Prefilling, "_send_next", lambda *of: (streams.set(), send_next(*of))[1])
        p.pace = lambda: (reached.set(), gate.wait(60))
        await p.computes_for(d)
        asked = GenerationRequest(RequestId("x"), tuple(PROMPT), 6, SamplingParams(seed=1))
        d.bench.add(asked)
        d.bench.engine.submit()
        await until(lambda: reached.is_set() and streams.is_set())  # a stream that came after the end would be refused
        d.bench.engine.abort(asked.request_id)
        assert d.bench.run()[asked.request_id, 0].finish is FinishReason.ABORT
        await until(lambda: d.sharing.meter.pushes == {"left": 1})
        gate.set()
        await until(lambda: p.sharing.meter.prefills == {"left": 1})
        await at_rest(p, d)
        await until(lambda: p.bench.engine.stats().blocks_in_use == 0)


def registration(d: Sharer, **changed: object) -> wire.PrefillRequest:
    n = 4 * WHOLE
    said: dict[str, object] = {
        "request_id": "r",
        "epoch": 1,
        "digest": DIGEST,
        "numerics_id": "null",
        "layout": d.kv.layout,
        "prompt_ids": PROMPT[:n],
        "keys": b"".join(prompt_keys(root_key("null", DIGEST), PROMPT[:n], 4)),
        "tp_size": 1,
        "tensor_port": d.node.tensors.port,
        "ticket": bytes(32),
        "lease_ms": 30_000,
    }
    return wire.PrefillRequest(**{**said, **changed})  # type: ignore[arg-type]


async def call_of(d: Sharer, p: Sharer, messages: list[wire.PrefillRequest]) -> list[wire.PrefillResponse]:
    """Say these, and hear it to the end. The caller goes on listening."""
    ended = asyncio.Event()

    async def say() -> AsyncIterator[wire.PrefillRequest]:
        for message in messages:
            yield message
        await ended.wait()

    stub = KvServiceStub(d.node.pool.get(Purpose.STREAM, p.node.addresses[0], p.node.identity.member))
    try:
        return [answer async for answer in stub.Prefill(say())]
    finally:
        ended.set()


@in_loop
async def test_registrations_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        for changed in (
            {"request_id": ""},
            {"request_id": "a:b"},
            {"epoch": 0},
            {"layout": bytes(16)},
            {"prompt_ids": PROMPT[:3]},
            {"prompt_ids": []},
            {"keys": b""},
            {"keys": bytes(31)},
            {"keys": bytes(16)},
            {"tp_size": 2},
            {"tensor_port": 0},
            {"ticket": b"x"},
            {"lease_ms": 0},
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call_of(d, p, [registration(d, **changed)])
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, changed
            assert next(iter(changed)) in str(refused.value.details()) or "keys" in changed
        assert p.bench.runner.rows_run == 0
        assert not p.sharing.meter.prefills


@in_loop
async def test_a_lease_that_ends_ends_the_prompt_and_its_epoch_does_not_come_back(tmp_path: Path, gate: threading.Event) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        p.pace = lambda: gate.wait(60)
        expected = d.node.tensors.expect()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call_of(d, p, [registration(d, ticket=expected.ticket, lease_ms=100)])
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert p.sharing.meter.prefills == {"expired": 1}
        gate.set()
        await at_rest(p, d)
        await until(lambda: p.bench.engine.stats().blocks_in_use == 0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call_of(d, p, [registration(d, ticket=expected.ticket)])
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "epoch" in str(refused.value.details())
        expected.cancel()


@in_loop
async def test_a_later_epoch_ends_the_earlier_call(tmp_path: Path, gate: threading.Event) -> None:
    async with sharers(tmp_path, sharer("p", speed=FAST), sharer("d", speed=SLOW)) as (p, d):
        p.pace = lambda: gate.wait(60)
        first, second = d.node.tensors.expect(), d.node.tensors.expect()
        earlier = asyncio.create_task(call_of(d, p, [registration(d, ticket=first.ticket)]))
        leases = p.sharing._servicer._leases  # pyright: ignore[reportPrivateUsage]
        await until(lambda: bool(leases.live))
        later = asyncio.create_task(call_of(d, p, [registration(d, ticket=second.ticket, epoch=2)]))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await earlier
        assert ended.value.code() is grpc.StatusCode.ABORTED
        gate.set()
        receiver = await asyncio.to_thread(second.wait, time.perf_counter() + 60)
        for _ in range(WHOLE):
            await asyncio.to_thread(receiver.receive, time.perf_counter() + 60)
        assert (await later)[-1].completion == "r:1"
        receiver.close()
        first.cancel()
        await until(lambda: p.sharing.meter.prefills == {"fenced": 1, "whole": 1})
        await at_rest(p, d)
