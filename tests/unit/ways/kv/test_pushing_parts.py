"""Prompts that a machine computes for another, where the layers of either lie on several: the bytes of one machine, whatever becomes of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.kv.sharers import DIGEST
from tests.unit.ways.kv.spreads import WHOLE as LAYERS
from tests.unit.ways.kv.spreads import Spread, spreads
from tests.unit.ways.kv.test_faulty_peers import FIRST, Send, Turn, another, damaged, dies
from tests.unit.ways.kv.test_sharing_kv import PROMPT, WHOLE, alone

from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import BlockId, RequestId
from paceline.core.model import LayerRange
from paceline.engine.prefix_cache import prompt_keys, root_key
from paceline.machine.settings import PrefillRole
from paceline.net.wire import kv_pb2 as wire
from paceline.ways.kv import giving, moving, prefilling, pushing, source
from paceline.ways.kv.fetching import ComparedBlocks, PushedParts

ROWS = 4 * WHOLE
FRONT, BACK = LayerRange(0, 1), LayerRange(1, 4)
KINDS = ["d is a pipeline", "p is a pipeline", "both are"]
FAST = 10_000.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@asynccontextmanager
async def pushes(root: Path, kind: str, **how: Any) -> AsyncGenerator[tuple[Spread, Spread, list[Spread]]]:
    """One that computes prompts, one that has them computed, and all nodes."""
    p, d = (LAYERS if kind == KINDS[0] else FRONT), (LAYERS if kind == KINDS[1] else FRONT)
    speeds = {"p": FAST, "d": 1.0}
    async with spreads(root, speeds=speeds, p=p, d=d, g=LAYERS, h=LAYERS, **how) as made:
        if p == FRONT:
            made[0].stages_at((made[2], LayerRange(1, 2)), (made[3], LayerRange(2, 4)))
            made[0].kv.prompts_per_s = lambda: FAST
        if d == FRONT:
            made[1].stages_at((made[3], BACK))
        await made[0].answer("0", PROMPT[50:70])  # and so tells where its layers lie
        made[0].bench.runner.rows_run = 0
        await made[0].computes_for(made[1])
        yield made[0], made[1], made


async def swift(d: Spread) -> None:
    """All of a prompt is worth a second there: nothing is waited for longer than that and a little."""
    d.kv.prompts_per_s = lambda: 100.0
    d.sharing._look_soon()  # pyright: ignore[reportPrivateUsage]
    await until(lambda: all(peer.price.computed_s < 1 for peer in d.kv._peers))  # pyright: ignore[reportPrivateUsage]


async def at_rest(*all_of: Spread) -> None:
    await until(lambda: all(one.is_at_rest and not one.sharing._servicer._leases.live for one in all_of))  # pyright: ignore[reportPrivateUsage]
    await until(lambda: all(one.bench.engine.stats().blocks_in_use == 0 for one in all_of))
    assert not any(one.sharing._servicer._in_parts for one in all_of)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_a_prompt_is_computed_where_that_is_faster_and_its_parts_come_from_who_holds_them(tmp_path: Path, kind: str) -> None:
    async with pushes(tmp_path, kind) as (p, d, made):
        answer = await d.answer("1", PROMPT)
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), ROWS)
        assert d.bench.runner.rows_run == len(PROMPT) - ROWS + len(answer.token_ids) - 1
        await until(lambda: p.sharing.meter.prefills == {"whole": 1} and d.sharing.meter.pushes == {"whole": 1})
        assert not any(one.sharing._seen for one in made), "how fast P computes says nothing of the link"  # pyright: ignore[reportPrivateUsage]
        assert [one.node_id for one in made if one.sharing.meter.blocks["given"]] == (["p"] if kind == KINDS[0] else ["p", "g", "h"])
        assert [one.node_id for one in made if one.sharing.meter.blocks["pushed"]] == (["d"] if kind == KINDS[1] else ["d", "h"])
        await at_rest(*made)


@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_parts_come_while_later_chunks_still_run(tmp_path: Path, gate: threading.Event, kind: str) -> None:
    async with pushes(tmp_path, kind) as (p, d, made):
        steps = iter([None, None, None])
        p.pace = lambda: next(steps, gate) and gate.wait(60)
        asking = asyncio.create_task(d.answer("1", PROMPT))
        await until(lambda: any(one.sharing.meter.blocks["pushed"] for one in made))
        assert not asking.done()
        gate.set()
        assert (await asking).token_ids == alone(PROMPT)
        await at_rest(*made)


@pytest.mark.parametrize(("fault", "end"), [(damaged, "damaged"), (another, "damaged"), (dies, "write_failed")])
@pytest.mark.parametrize("kind", KINDS[:2])
@in_loop
async def test_parts_that_come_wrong_or_not_at_all_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Send, end: str, kind: str
) -> None:
    async with pushes(tmp_path, kind) as (_, d, made):
        for room in (giving, moving):
            monkeypatch.setattr(room, "send_block", Turn(fault))
        answer = await d.answer("1", PROMPT)
        assert answer.token_ids == alone(PROMPT)
        assert answer.cached_tokens <= 4 * FIRST
        await until(lambda: d.sharing.meter.pushes == {end: 1})
        await at_rest(*made)
        monkeypatch.undo()
        other = PROMPT[::-1]
        assert (await d.answer("2", other)).token_ids == alone(other)
        await at_rest(*made)


@pytest.mark.parametrize("lost", ["d's stage", "p's stage"])
@in_loop
async def test_a_stage_that_is_lost_meanwhile_gives_and_takes_no_more(tmp_path: Path, gate: threading.Event, lost: str) -> None:
    async with pushes(tmp_path, KINDS[2]) as (p, d, made):
        await swift(d)
        steps = iter([None, None, None])
        p.pace = lambda: next(steps, gate) and gate.wait(60)
        asking = asyncio.create_task(d.answer("1", PROMPT))
        await until(lambda: any(one.sharing.meter.blocks["pushed"] for one in made))
        stage = (d if lost == "d's stage" else p).route.stages[0]
        stage.lose()
        written = len(stage.held.written)
        gate.set()
        answer = await asking
        assert (answer.token_ids, answer.cached_tokens < ROWS) == (alone(PROMPT), True)
        await at_rest(*made)
        assert len(stage.held.written) <= written + 1, "what was being written when it went"


@pytest.mark.parametrize("kind", KINDS[1:])
@in_loop
async def test_a_stage_that_is_lost_before_its_first_block_is_not_waited_for(tmp_path: Path, gate: threading.Event, kind: str) -> None:
    async with pushes(tmp_path, kind) as (p, d, made):
        dialling = threading.Event()
        stage = p.route.stages[0]
        moves: Any = stage.host.sharing.moves
        moves._dial = lambda *_: lambda: (dialling.set(), gate.wait(60))
        asking = asyncio.create_task(d.answer("1", PROMPT))
        await until(dialling.is_set)
        stage.lose()
        answer = await asking
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), 0)
        await until(lambda: d.sharing.meter.pushes == {"write_failed": 1})
        gate.set()
        await at_rest(*made)


@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_one_that_comes_no_further_is_left_and_what_it_computes_is_not_wanted_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, kind: str
) -> None:
    monkeypatch.setattr(pushing, "SILENT_S", 0.5)
    monkeypatch.setattr(prefilling, "HOLD_S", 0.5)
    async with pushes(tmp_path, kind) as (p, d, made):
        monkeypatch.setattr(prefilling, "PROGRESS_S", 60.0)
        p.pace = lambda: gate.wait(60)
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"silent": 1})
        gate.set()
        await until(lambda: p.sharing.meter.prefills == {"left": 1})
        await at_rest(*made)


@in_loop
async def test_stages_are_waited_for_as_long_as_their_blocks_pay(tmp_path: Path, gate: threading.Event) -> None:
    async with pushes(tmp_path, KINDS[0]) as (p, d, made):
        await swift(d)
        p.pace = lambda: gate.wait(60)
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"watchdog": 1})
        gate.set()
        await until(lambda: p.sharing.meter.prefills == {"left": 1})
        await at_rest(*made)


@pytest.mark.parametrize("kind", KINDS)
@in_loop
async def test_an_answer_that_is_not_wanted_any_more_ends_its_prompt_there(tmp_path: Path, gate: threading.Event, kind: str) -> None:
    async with pushes(tmp_path, kind) as (p, d, made):
        reached = threading.Event()
        p.pace = lambda: (reached.set(), gate.wait(60))
        asked = GenerationRequest(RequestId("x"), tuple(PROMPT), 6, SamplingParams(seed=1))
        d.bench.add(asked)
        d.bench.engine.submit()
        await until(reached.is_set)
        d.bench.engine.abort(asked.request_id)
        ended = asyncio.create_task(asyncio.to_thread(d.bench.run))
        await until(lambda: d.sharing.meter.pushes == {"left": 1} and p.sharing.meter.prefills == {"left": 1})
        gate.set()
        assert (await ended)[asked.request_id, 0].finish is FinishReason.ABORT
        await at_rest(*made)


@in_loop
async def test_a_lease_that_ends_while_parts_are_fetched_ends_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(pushing, "LEASE_S", 1.0)
    monkeypatch.setattr(prefilling, "HOLD_S", 0.5)
    async with pushes(tmp_path, KINDS[2]) as (p, d, made):
        steps = iter([None, None, None])
        p.pace = lambda: next(steps, gate) and gate.wait(60)
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"lease_expired": 1} and p.sharing.meter.prefills == {"expired": 1})
        gate.set()
        await at_rest(*made)


@in_loop
async def test_one_that_refuses_is_asked_for_no_part(tmp_path: Path) -> None:
    async with pushes(tmp_path, KINDS[2]) as (p, d, made):
        p.kv.role = PrefillRole.DECODE
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"refused": 1})
        assert not any(one.sharing.meter.fetches for one in made)
        await at_rest(*made)


@pytest.mark.parametrize("end", ["silent", "watchdog"])
@pytest.mark.parametrize("kind", KINDS[:2])
@in_loop
async def test_one_that_speaks_of_another_epoch_alone_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, kind: str, end: str
) -> None:
    monkeypatch.setattr(pushing, "SILENT_S", 0.5 if end == "silent" else 60.0)
    monkeypatch.setattr(prefilling, "PROGRESS_S", 0.1)
    monkeypatch.setattr(prefilling.PrefillingInParts, "_progress", lambda _: wire.PrefillResponse(epoch=1))
    async with pushes(tmp_path, kind) as (p, d, made):
        if end == "watchdog":
            await swift(d)
        p.pace = lambda: gate.wait(60)
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {end: 1})
        gate.set()
        await until(lambda: p.sharing.meter.prefills == {"left": 1})
        await at_rest(*made)


@in_loop
async def test_one_that_is_left_before_it_is_asked_is_not_asked(tmp_path: Path) -> None:
    async with pushes(tmp_path, KINDS[1]) as (p, d, made):
        answered = asyncio.Event()
        sharing: Any = d.sharing
        push = sharing._push

        async def late(kv: Any, fetch: PushedParts) -> None:
            fetch.cancel()
            await answered.wait()
            await push(kv, fetch)

        sharing._push = late
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        answered.set()
        await until(lambda: d.sharing.meter.pushes == {"left": 1})
        await at_rest(*made)
        assert not p.sharing.meter.prefills


@in_loop
async def test_a_prompt_of_which_nobody_fetches_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "LEASE_S", 1.0)
    monkeypatch.setattr(pushing, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(PushedParts, "begin", lambda *_: None)
    async with pushes(tmp_path, KINDS[1]) as (p, d, made):
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {"write_failed": 1} and p.sharing.meter.prefills == {"left": 1})
        await at_rest(*made)


@pytest.mark.parametrize(("most", "end"), [(16, "whole"), (2, "write_failed")])
@in_loop
async def test_parts_that_wait_for_a_prompt_take_no_place_of_those_that_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, most: int, end: str
) -> None:
    monkeypatch.setattr(prefilling, "MOST_FETCHING", most)
    async with pushes(tmp_path, KINDS[1]) as (p, d, made):
        servicer: Any = p.sharing._servicer  # pyright: ignore[reportPrivateUsage]
        p.pace = lambda: gate.wait(60)
        asking = asyncio.create_task(d.answer("1", PROMPT))
        if end == "whole":
            await until(lambda: [one.n_fetching for one in servicer._in_parts.values()] == [3])
            assert not servicer._served.total()
            gate.set()
        assert (await asking).token_ids == alone(PROMPT)
        await until(lambda: d.sharing.meter.pushes == {end: 1})
        gate.set()
        await at_rest(*made)


@in_loop
async def test_stages_of_an_earlier_version_are_told_of_no_prompt_and_move_blocks(tmp_path: Path) -> None:
    async with pushes(tmp_path, KINDS[0]) as (p, d, made):
        d.route.takes_prompts = False
        assert (await d.answer("1", PROMPT)).token_ids == alone(PROMPT)
        await p.answer("2", other := PROMPT[::-1])
        await d.knows(p)
        answer = await d.answer("3", other)
        assert (answer.token_ids, answer.cached_tokens) == (alone(other), ROWS)
        assert not d.sharing.meter.pushes
        await at_rest(*made)


@pytest.mark.parametrize(("n_there", "pays"), [(0, True), (2, True), (2, False)])
@in_loop
async def test_what_is_behind_the_blocks_of_its_disks_is_computed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_there: int, pays: bool
) -> None:
    async with pushes(tmp_path, KINDS[0]) as (p, d, made):
        keys = prompt_keys(root_key("null", DIGEST), PROMPT, 4)
        await p.answer("2", PROMPT[: 4 * 2 + 1])
        loan = await asyncio.wrap_future(p.loans.ask(keys[:2]))

        def from_disks(names: Sequence[bytes], blocks: Sequence[BlockId]) -> ComparedBlocks:
            assert names == keys[:4]
            for key, block in list(zip(names, blocks, strict=True))[:n_there]:
                data = memoryview(bytearray(d.bench.runner.block_bytes))
                p.bench.runner.export_block(loan.blocks[key], data)
                d.bench.runner.import_block(block, data)
            d.route.wake()
            return ComparedBlocks(n_there)

        monkeypatch.setattr(d.route, "run_of", lambda *_: 4)
        monkeypatch.setattr(d.route, "fetch", from_disks)
        if not pays:
            monkeypatch.setattr(source, "_pays", lambda *_: False)
        answer = await d.answer("1", PROMPT)
        assert (answer.token_ids, answer.cached_tokens) == (alone(PROMPT), ROWS if pays else 4 * n_there)
        await until(lambda: d.sharing.meter.pushes == ({"whole": 1} if pays else {}))
        assert d.sharing.meter.blocks["pushed"] == (WHOLE - n_there if pays else 0)
        p.loans.give_back(loan)
        await at_rest(*made)
