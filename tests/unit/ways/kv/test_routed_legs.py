"""Requests that a router sends to two nodes: the same bytes as at one, in whichever order the parts come, whatever is lost, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.kv.sharers import DIGEST, Sharer, sharer, sharers
from tests.unit.ways.kv.test_faulty_peers import FIRST, Turn, damaged, dies
from tests.unit.ways.kv.test_pushing_kv import LEFT, call_of, registration
from tests.unit.ways.kv.test_sharing_kv import PROMPT, WHOLE, alone

from paceline.core.errors import InvalidRequest
from paceline.core.generation import GenerationChunk, GenerationRequest, KvLeg, SamplingParams
from paceline.core.ids import BlockId, NodeId, RequestId, Trust
from paceline.machine.settings import PrefillRole
from paceline.ways.kv import legs, prefilling, pushing, routed
from paceline.ways.kv.fetching import KvPeer, PromptPush
from paceline.ways.kv.price import KvPrice

ALIKE = 100.0
"""Tokens of prompts a second, of either: no plan would have one compute for the other."""
P_ID, D_ID = "chatcmpl-x-aaaaaaaa", "chatcmpl-x-bbbbbbbb"
PREFILL = KvLeg(P_ID, is_prefill=True)


def decode(p: Sharer, request_id: str = D_ID, **fields: Any) -> KvLeg:
    return KvLeg(request_id, is_prefill=False, engine_id=p.node_id, **fields)


async def run(at: Sharer, name: str, leg: KvLeg, prompt: list[int] = PROMPT, **fields: Any) -> list[GenerationChunk]:
    asked = GenerationRequest(
        RequestId(name), tuple(prompt), 1 if leg.is_prefill else 6, SamplingParams(seed=1), ignore_eos=True, leg=leg, **fields
    )
    return [chunk async for chunks in at.sharing.legs.stream(DIGEST, "null", asked) for chunk in chunks]


def tokens(chunks: list[GenerationChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def outcome(chunks: list[GenerationChunk]) -> tuple[object, object]:
    """Said to clients that ask for events, and the same at the answer's end."""
    transfer = chunks[-1].transfer
    assert transfer is not None
    assert [notice.detail for chunk in chunks for notice in chunk.notices] == [transfer]
    return transfer["outcome"], transfer["n_blocks"]


async def at_rest(*nodes: Sharer) -> None:
    """Nothing is pinned, lent, leased or waited for."""
    for one in nodes:
        await until(lambda one=one: not one.loans.out and not one.sharing._servicer._leases.live)  # pyright: ignore[reportPrivateUsage]
        await until(lambda one=one: one.sharing.legs.waiting() == {"prompts": 0, "nodes": 0} and not one.kv.routed)
        await until(lambda one=one: one.bench.engine.stats().blocks_in_use == 0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("first", ["p", "d", "both"])
@in_loop
async def test_a_prompt_comes_from_where_the_router_sent_it_whichever_comes_first(tmp_path: Path, first: str) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        if first == "d":
            answering = asyncio.create_task(run(d, "d1", decode(p)))
            await until(lambda: p.sharing.legs.waiting()["nodes"] == 1)
            prompt = await run(p, "p1", PREFILL)
        elif first == "p":
            prompt = await run(p, "p1", PREFILL)
            assert p.sharing.legs.waiting() == {"prompts": 1, "nodes": 0}
            await until(lambda: p.bench.engine.stats().blocks_in_use == 16)  # a quarter of its pool at most
            answering = asyncio.create_task(run(d, "d1", decode(p)))
        else:
            answering = asyncio.create_task(run(d, "d1", decode(p)))
            prompt = await run(p, "p1", PREFILL)
        answer = await answering
        assert (tokens(answer), outcome(answer)) == (alone(PROMPT), ("whole", WHOLE))
        assert tokens(prompt) == alone(PROMPT)[:1]
        assert prompt[-1].transfer == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p",
            "remote_host": "127.0.0.1",
            "remote_port": int(p.node.addresses[0].rpartition(":")[2]),
            "remote_request_id": P_ID,
            "tp_size": 1,
        }
        assert (answer[1].cached_tokens, d.bench.runner.rows_run) == (4 * WHOLE, len(PROMPT) - 4 * WHOLE + 5)
        assert p.bench.runner.rows_run == len(PROMPT)
        await at_rest(p, d)
        assert (p.sharing.legs.ended, p.sharing.meter.prefills, d.sharing.meter.pushes) == ({"taken": 1}, {"whole": 1}, {"whole": 1})


@in_loop
async def test_blocks_come_while_the_prompt_still_runs(tmp_path: Path, gate: threading.Event) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        steps = 0

        def pace() -> None:
            nonlocal steps
            steps += 1
            if steps == 4:
                gate.wait(60)

        p.pace = pace
        answering = asyncio.create_task(run(d, "d1", decode(p)))
        prompting = asyncio.create_task(run(p, "p1", PREFILL))
        await until(lambda: sum(fetch.filled for fetch in d.kv._fetches) >= 4)  # pyright: ignore[reportPrivateUsage]
        assert not prompting.done()
        gate.set()
        assert tokens(await answering) == alone(PROMPT)
        await prompting
        await at_rest(p, d)


@in_loop
async def test_what_p_answered_is_enough_where_the_two_have_no_name_in_common(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        told = (await run(p, "p1", KvLeg("chatcmpl-one-aaaaaaaa", is_prefill=True)))[-1].transfer
        assert told is not None
        address = f"{told['remote_host']}:{told['remote_port']}"
        leg = KvLeg("chatcmpl-other-bbbbbbbb", False, "", address, 1, str(told["remote_request_id"]))
        answer = await run(d, "d1", leg)
        assert (tokens(answer), outcome(answer)) == (alone(PROMPT), ("whole", WHOLE))
        await at_rest(p, d)


@in_loop
async def test_a_salt_that_both_have_and_several_answers_of_one_prompt(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        _, answer = await asyncio.gather(run(p, "p1", PREFILL, cache_salt="mine"), run(d, "d1", decode(p), cache_salt="mine", n=3))
        assert outcome(answer) == ("whole", WHOLE)
        assert [chunk.index for chunk in answer if chunk.token_ids] == [0, 1, 2]
        assert d.bench.runner.rows_run == 3 * (len(PROMPT) - 4 * WHOLE + 5)
        await at_rest(p, d)
        # Other salts are other prompts.
        other = PROMPT[::-1]
        _, answer = await asyncio.gather(
            run(p, "p2", KvLeg("chatcmpl-y-aaaaaaaa", is_prefill=True), other, cache_salt="mine"),
            run(d, "d2", decode(p, "chatcmpl-y-bbbbbbbb"), other, cache_salt="yours"),
        )
        assert (tokens(answer), outcome(answer)) == (alone(other), ("unmatched", 0))
        assert p.sharing.meter.prefills == {"whole": 1, "unmatched": 1}


@in_loop
async def test_prompts_of_one_request_and_requests_of_one_name_find_their_own(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        prompts = [[place + 1, *PROMPT[: 40 + 4 * place]] for place in range(3)]
        answers = [
            run(d, f"d{place}", decode(p, f"cmpl-x-{place}-{place:08x}"), prompt) for place, prompt in reversed(list(enumerate(prompts)))
        ]
        asked = [
            run(p, f"p{place}", KvLeg(f"cmpl-x-{place}-{9 - place:08x}", is_prefill=True), prompt) for place, prompt in enumerate(prompts)
        ]
        got = (await asyncio.gather(*answers, *asked))[:3][::-1]
        assert [tokens(one) for one in got] == [alone(prompt) for prompt in prompts]
        assert [outcome(one)[0] for one in got] == ["whole"] * 3
        await at_rest(p, d)
        # A router that tries again sends the name anew: both get the one prompt's blocks.
        longer = PROMPT[::-1]
        prompt = asyncio.create_task(run(p, "p9", KvLeg("cmpl-y-0-00000001", is_prefill=True), longer))
        one = await run(d, "d8", decode(p, "cmpl-y-0-00000002"), longer)
        two = await run(d, "d9", decode(p, "cmpl-y-0-00000003"), longer)
        await prompt
        assert tokens(one) == tokens(two) == alone(longer)
        assert (outcome(one), outcome(two)) == (("whole", WHOLE), ("unasked", 0)), "the second had all of it here"


@in_loop
async def test_a_prompt_that_never_comes_is_computed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "MATCH_S", 0.3)
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        answer = await run(d, "d1", decode(p))
        assert (tokens(answer), outcome(answer)) == (alone(PROMPT), ("unmatched", 0))
        await at_rest(p, d)
        assert (p.sharing.meter.prefills, d.sharing.meter.pushes) == ({"unmatched": 1}, {"unmatched": 1})
        # It is no fault of P's, which is asked again at once.
        other = PROMPT[::-1]
        _, answer = await asyncio.gather(run(p, "p1", PREFILL, other), run(d, "d2", decode(p), other))
        assert outcome(answer) == ("whole", WHOLE)


@in_loop
async def test_how_a_prompt_ended_is_heard_where_its_lease_is_kept_at_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call that ends while something is sent on it, the caller hears that this failed, and no more."""
    monkeypatch.setattr(legs, "MATCH_S", 0.05)
    monkeypatch.setattr(pushing, "HEARTBEAT_S", 0.0)
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        ends = [outcome(await run(d, f"d{turn}", decode(p), [turn + 1, *PROMPT])) for turn in range(20)]
        assert ends == [("unmatched", 0)] * 20


@in_loop
async def test_a_node_that_never_comes_leaves_ordinary_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "LEASE_S", 0.3)
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        await run(p, "p1", PREFILL)
        await at_rest(p, d)
        assert p.sharing.legs.ended == {"expired": 1}
        assert (await p.answer("again", PROMPT)).cached_tokens == 4 * WHOLE


@in_loop
async def test_pinned_prompts_are_not_evicted_and_leave_room_for_others(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        await run(p, "p1", PREFILL, PROMPT[:61])
        for turn in range(8):
            other = [turn + 1, *PROMPT]
            assert p.kv.compute is not None
            asked = GenerationRequest(RequestId(f"o{turn}"), tuple(other), 6, SamplingParams(seed=1), ignore_eos=True)
            assert [token async for chunks in p.kv.compute(asked) for token in chunks[0].token_ids] == alone(other)
        # A second one finds its share of the pool taken, and is computed all the same.
        await run(p, "p2", KvLeg("chatcmpl-y-aaaaaaaa", is_prefill=True), PROMPT[::-1])
        answer = await run(d, "d1", decode(p), PROMPT[:61])
        assert (tokens(answer), outcome(answer)) == (alone(PROMPT[:61]), ("whole", 15))
        p.sharing.legs.forget(p.kv)
        await at_rest(p, d)


@in_loop
async def test_a_prompt_whose_request_ends_before_it_is_computed_is_computed_here(tmp_path: Path, gate: threading.Event) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        reached = threading.Event()
        p.pace = lambda: (reached.set(), gate.wait(60))
        prompting = asyncio.create_task(run(p, "p1", PREFILL))
        await until(reached.is_set)
        answering = asyncio.create_task(run(d, "d1", decode(p)))
        await until(lambda: bool(p.sharing._servicer._leases.live))  # pyright: ignore[reportPrivateUsage]
        prompting.cancel()
        await until(lambda: p.sharing.legs.ended == {"left": 1})
        gate.set()
        answer = await answering
        assert (tokens(answer), outcome(answer)[0]) == (alone(PROMPT), "unmatched")
        await at_rest(p, d)
        assert p.sharing.meter.prefills == {"not_computed": 1}
        # A client that left is no fault of P's, which is asked again at once.
        other = PROMPT[::-1]
        _, answer = await asyncio.gather(run(p, "p2", PREFILL, other), run(d, "d2", decode(p), other))
        assert outcome(answer) == ("whole", WHOLE)


@in_loop
async def test_an_answer_that_is_not_wanted_any_more_leaves_the_prompt_to_others(tmp_path: Path, gate: threading.Event) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        reached = threading.Event()
        p.pace = lambda: (reached.set(), gate.wait(60))
        prompting = asyncio.create_task(run(p, "p1", PREFILL))
        await until(reached.is_set)
        answering = asyncio.create_task(run(d, "d1", decode(p)))
        await until(lambda: bool(p.sharing._servicer._leases.live))  # pyright: ignore[reportPrivateUsage]
        d.kv.reset()  # as its engine does that fails
        assert tokens(await answering) == alone(PROMPT)
        await until(lambda: p.sharing.meter.prefills in LEFT)
        gate.set()
        await prompting
        assert p.sharing.legs.waiting() == {"prompts": 1, "nodes": 0}
        p.sharing.legs.forget(p.kv)
        await at_rest(p, d)


@in_loop
async def test_a_client_that_leaves_while_its_prompt_is_waited_for_holds_nothing(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        answering = asyncio.create_task(run(d, "d1", decode(p)))
        await until(lambda: p.sharing.legs.waiting()["nodes"] == 1)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        d.kv._wake()  # pyright: ignore[reportPrivateUsage]
        await until(lambda: p.sharing.meter.prefills == {"left": 1} and d.sharing.meter.pushes == {"left": 1})
        await at_rest(p, d)


@pytest.mark.parametrize(("fault", "end"), [(damaged, "damaged"), (dies, "write_failed")])
@in_loop
async def test_what_comes_wrong_is_computed_and_its_sender_left_in_peace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, end: str
) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        monkeypatch.setattr(prefilling, "send_block", Turn(fault))
        _, answer = await asyncio.gather(run(p, "p1", PREFILL), run(d, "d1", decode(p)))
        assert (tokens(answer), outcome(answer)) == (alone(PROMPT), (end, FIRST))
        monkeypatch.undo()
        other = PROMPT[::-1]
        answer = await run(d, "d2", decode(p), other)
        assert (tokens(answer), outcome(answer)) == (alone(other), ("handshake_failed", 0))
        assert d.sharing.meter.pushes == {end: 1, "handshake_failed": 1}


@in_loop
async def test_who_can_t_be_asked_is_not(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("d", speed=ALIKE), sharer("guest", Trust.GUEST, ALIKE)) as (d, guest):
        for turn, (leg, end) in enumerate(
            (
                (decode(guest), "handshake_failed"),
                (KvLeg(D_ID, False, "nobody"), "handshake_failed"),
                (KvLeg(D_ID, False, "", "127.0.0.1:1"), "handshake_failed"),
                (decode(d), "unasked"),
            )
        ):
            prompt = [turn + 1, *PROMPT]
            answer = await run(d, f"d{turn}", leg, prompt)
            assert (tokens(answer), outcome(answer)) == (alone(prompt), (end, 0))
        d.kv.role = PrefillRole.PREFILL
        assert outcome(await run(d, "d9", decode(guest))) == ("unasked", 0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call_of(guest, d, [routed_registration(guest, d)])
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


@in_loop
async def test_a_prompt_is_asked_for_once_its_blocks_have_room_and_not_where_it_was_told_otherwise_meanwhile(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("d", speed=ALIKE)) as (d,):
        begun: list[Any] = []
        d.kv.show((), begun.append)
        request = GenerationRequest(RequestId("d1"), tuple(PROMPT), 6)
        routed_to = KvPeer(NodeId("p"), b"", (), frozenset(), KvPrice(0.0, 0.0, 0.0)), PromptPush(D_ID, leg=decode(d))
        keys, blocks = [bytes([place]) * 16 for place in range(3)], [BlockId(place) for place in range(3)]
        d.kv.routed[request.request_id] = routed_to
        assert (d.kv.run_of(keys, request), d.kv.routed) == (3, {request.request_id: routed_to})
        assert not d.kv.fetch(keys, blocks).is_over
        assert (len(begun), d.kv.routed) == (1, {})
        d.kv.routed[request.request_id] = routed_to
        assert d.kv.run_of(keys, request) == 3
        d.kv.routed.clear()  # as the event loop does, where the answer's first tokens are there
        fetch = d.kv.fetch(keys, blocks)
        assert (fetch.is_over, fetch.filled, len(begun)) == (True, 0, 1)


@in_loop
async def test_a_prompt_that_comes_again_is_pinned_in_place_of_the_first(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE)) as (p,):
        of, keys = p.sharing.legs.of(p.kv), [bytes([place]) * 16 for place in range(p.kv.most_held)]
        for _ in range(2):
            last = of.begin(P_ID, keys)
            pinned = of._pinned  # pyright: ignore[reportPrivateUsage]
            assert [(one, held) for one, (held, _) in pinned.items()] == [(last, len(keys))]
        of.left(last)
        assert p.sharing.legs.ended == {"evicted": 1, "left": 1}


@in_loop
async def test_what_comes_when_the_engine_is_gone_ends_at_once(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE)) as (p,):
        of, keys = p.sharing.legs.of(p.kv), [bytes(16)]
        p.sharing.keep(())
        assert p.sharing.legs.of(p.kv) is not of
        for closed in (of, p.sharing.legs.of(p.kv)):
            assert closed.begin(P_ID, keys).ended == "left"
            assert not closed._pinned  # pyright: ignore[reportPrivateUsage]
        assert not p.sharing.legs._engines  # pyright: ignore[reportPrivateUsage]


@in_loop
async def test_legs_that_can_t_be_run_here_are_refused(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE)) as (p,):
        asked = GenerationRequest(RequestId("x"), tuple(PROMPT), 1, leg=PREFILL)
        with pytest.raises(InvalidRequest, match="does not run the model alone"):
            p.sharing.legs.stream("other", "null", asked)
        p.kv.role = PrefillRole.DECODE
        with pytest.raises(InvalidRequest, match="computes no prompts"):
            p.sharing.legs.stream(DIGEST, "null", asked)


def routed_registration(d: Sharer, p: Sharer, **changed: object) -> Any:
    said: dict[str, object] = {"request_id": D_ID, "prompt_ids": [], "remote_engine_id": p.node_id, "remote_tp_size": 1}
    return registration(d, **{**said, **changed})


@in_loop
async def test_registrations_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        for changed in (
            {"prompt_ids": PROMPT[:4]},
            {"keys": b""},
            {"remote_engine_id": "another"},
            {"remote_request_id": "x" * 201},
            {"remote_tp_size": 2},
            {"remote_tp_size": 0},
            {"tp_size": 2},
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call_of(d, p, [routed_registration(d, p, **changed)])
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, changed
            assert next(iter(changed)) in str(refused.value.details())
        assert p.sharing.legs.waiting() == {"prompts": 0, "nodes": 0}
        answer = await run(d, "d1", decode(p, tp_size=2))
        assert (tokens(answer), outcome(answer)) == (alone(PROMPT), ("refused", 0))


@in_loop
async def test_a_lease_that_ends_ends_the_wait_and_a_later_epoch_takes_its_place(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call_of(d, p, [routed_registration(d, p, lease_ms=100)])
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        earlier = asyncio.create_task(call_of(d, p, [routed_registration(d, p, epoch=2)]))
        await until(lambda: p.sharing.legs.waiting()["nodes"] == 1)
        later = asyncio.create_task(call_of(d, p, [routed_registration(d, p, epoch=3)]))
        with pytest.raises(grpc.aio.AioRpcError) as fenced:
            await earlier
        assert fenced.value.code() is grpc.StatusCode.ABORTED
        await until(lambda: p.sharing.legs.waiting()["nodes"] == 1)
        later.cancel()
        await at_rest(p, d)
        assert p.sharing.meter.prefills == {"expired": 1, "fenced": 1, "left": 1}


@in_loop
async def test_many_at_once_all_have_their_own_bytes(tmp_path: Path) -> None:
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        prompts = [[turn + 1, *PROMPT[: 30 + turn]] for turn in range(6)]

        async def both(turn: int, prompt: list[int]) -> list[GenerationChunk]:
            prefill = run(p, f"p{turn}", KvLeg(f"chatcmpl-{turn}-aaaaaaaa", is_prefill=True), prompt)
            answer = run(d, f"d{turn}", decode(p, f"chatcmpl-{turn}-bbbbbbbb"), prompt)
            return (await asyncio.gather(answer, prefill))[0]

        answers = await asyncio.gather(*(both(turn, prompt) for turn, prompt in enumerate(prompts)))
        assert [tokens(answer) for answer in answers] == [alone(prompt) for prompt in prompts]
        assert d.sharing.meter.pushes == {"whole": len(prompts)}
        await at_rest(p, d)


@in_loop
async def test_what_is_told_late_is_left_out_of_an_answers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "TELL_S", 0.0)
    async with sharers(tmp_path, sharer("p", speed=ALIKE), sharer("d", speed=ALIKE)) as (p, d):
        monkeypatch.setattr(d.sharing, "_push", lambda kv, fetch: _cancelled(fetch))
        answer = await run(d, "d1", decode(p))
        assert (tokens(answer), answer[-1].transfer) == (alone(PROMPT), None)


async def _cancelled(fetch: Any) -> None:
    fetch.cancel()
