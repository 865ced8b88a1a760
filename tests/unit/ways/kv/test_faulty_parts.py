"""Blocks whose parts lie on several machines, of which one dies, is replaced, stalls, or sends what is not its part: the bytes are those of one machine,
and nothing stays lent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.kv.spreads import WHOLE as LAYERS
from tests.unit.ways.kv.spreads import Spread, spreads
from tests.unit.ways.kv.test_faulty_peers import FIRST, Send, Turn, another, damaged, dies, lies, shorter
from tests.unit.ways.kv.test_sharing_kv import PROMPT, WHOLE, alone

from paceline.core.model import LayerRange
from paceline.ways.kv import fetching, giving, moving

ROWS = 4 * WHOLE
FRONT, BACK = LayerRange(0, 1), LayerRange(1, 4)
"""Of a pipeline's first node, and of its stage."""
MIDDLE, LAST = LayerRange(1, 3), LayerRange(3, 4)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Opens in the end, for what stalls until then."""
    event = threading.Event()
    yield event
    event.set()


async def at_rest(*all_of: Spread) -> None:
    await until(lambda: all(one.is_at_rest for one in all_of))


NAMES = count(1)


async def answered(one: Spread, prompt: list[int] = PROMPT) -> int:
    """An answer, as it is given alone. Returns the tokens of its prompt that were not computed."""
    answer = await one.answer(str(next(NAMES)), prompt)
    assert answer.token_ids == alone(prompt)
    return answer.cached_tokens


async def asked(asker: Spread, giver: Spread) -> int:
    """Have the giver compute a prompt, and the asker answer it: as it is answered alone. Returns the tokens that it did not compute."""
    await answered(giver)
    await asker.knows(giver)
    return await answered(asker)


@in_loop
async def test_parts_cross_between_cuts_that_differ(tmp_path: Path) -> None:
    async with spreads(tmp_path, a=LAYERS, o=FRONT, q=LayerRange(0, 2), g=LAYERS, h=LAYERS) as (a, o, q, g, h):
        o.stages_at((g, MIDDLE), (h, LAST))
        q.stages_at((h, LayerRange(2, 4)))
        assert await asked(o, a) == ROWS
        assert await asked(q, o) == ROWS
        assert [one.sharing.meter.blocks["fetched"] > 0 for one in (o, q, g, h)] == [True] * 4
        await at_rest(a, o, q, g, h)


@pytest.mark.parametrize("fault", [damaged, another, shorter, dies], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("giver", ["a machine alone", "a stage"])
@in_loop
async def test_a_part_that_is_damaged_or_does_not_come_costs_what_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Send, giver: str
) -> None:
    async with spreads(tmp_path, a=LAYERS, o=FRONT, g=LAYERS) as (a, o, g):
        o.stages_at((g, BACK))
        turn = Turn(fault)
        monkeypatch.setattr(giving if giver == "a machine alone" else moving, "send_block", turn)
        asker, of = (o, a) if giver == "a machine alone" else (a, o)
        cached = await asked(asker, of)
        assert turn.sent > FIRST
        assert cached <= 4 * FIRST  # of both parts together: a block stands once both do
        await at_rest(a, o, g)
        await answered(asker, PROMPT[::-1])
        assert asker.bench.engine.stats().blocks_in_use == 0


@in_loop
async def test_a_part_that_its_stage_can_not_read_is_missing_from_there_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with spreads(tmp_path, a=LAYERS, o=FRONT, g=LAYERS) as (a, o, g):
        o.stages_at((g, BACK))
        turn = Turn(lambda *_: o.route.stages[0].lose())
        monkeypatch.setattr(moving, "send_block", turn)
        assert await asked(a, o) <= 4 * (FIRST + 1)
        await at_rest(a, o, g)


@pytest.mark.parametrize("replaced", [False, True], ids=["dies", "is replaced"])
@in_loop
async def test_a_stage_that_goes_while_it_fetches_writes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, *, replaced: bool
) -> None:
    async with spreads(tmp_path, a=LAYERS, o=FRONT, g=LAYERS, h=LAYERS) as (a, o, g, h):
        o.stages_at((g, BACK))
        lost = o.route.stages[0]
        written: list[int] = []

        def goes(*_: object) -> None:
            if not written:
                if replaced:
                    o.route.loop.call_soon_threadsafe(o.stages_at, (h, BACK))
                    while o.route.stages == [lost]:
                        pass
                else:
                    lost.lose()
                written.append(len(lost.held.written))
            gate.wait(60)

        monkeypatch.setattr(giving, "send_block", Turn(goes))
        assert await asked(o, a) == 0
        gate.set()
        await at_rest(a, o, g, h)
        assert len(lost.held.written) <= written[0] + 1, "what was being written when it went"
        assert not [stage for stage in o.route.stages if stage.held.written and replaced]


@pytest.mark.parametrize("giver", ["a machine alone", "a stage"])
@in_loop
async def test_one_that_stops_in_the_middle_of_its_part_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, giver: str
) -> None:
    monkeypatch.setattr(fetching, "SILENCE_S", 0.5)
    async with spreads(tmp_path, a=LAYERS, o=FRONT, g=LAYERS) as (a, o, g):
        o.stages_at((g, BACK))
        monkeypatch.setattr(giving if giver == "a machine alone" else moving, "send_block", Turn(lambda *_: gate.wait(60)))
        asker, of = (o, a) if giver == "a machine alone" else (a, o)
        assert await asked(asker, of) <= 4 * FIRST
        gate.set()
        await at_rest(a, o, g)


@in_loop
async def test_a_giver_that_is_cut_otherwise_than_it_told_gives_what_one_machine_holds(tmp_path: Path) -> None:
    async with spreads(tmp_path, a=LAYERS, o=FRONT, g=LAYERS, h=LAYERS) as (a, o, g, h):
        o.stages_at((g, BACK))
        await answered(o)
        await a.knows(o)
        o.stages_at((g, MIDDLE), (h, LAST))  # it told of one stage behind it
        assert await answered(a) == 0
        await at_rest(a, o, g, h)


@in_loop
async def test_a_giver_of_no_route_gives_nothing(tmp_path: Path) -> None:
    async with spreads(tmp_path, a=LAYERS, o=FRONT, g=LAYERS) as (a, o, g):
        o.stages_at((g, BACK))
        await answered(o)
        await a.knows(o)
        o.route.stages[0].lose()
        assert await answered(a) == 0
        await at_rest(a, o, g)


@pytest.mark.parametrize("giver", ["a machine alone", "a stage"])
@in_loop
async def test_one_that_lies_about_its_part_is_found_by_computing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, giver: str
) -> None:
    async with spreads(tmp_path, 1, a=LAYERS, o=FRONT, g=LAYERS) as (a, o, g):
        o.stages_at((g, BACK))
        # The blocks that a stage has: of what a machine alone gives, both parts lie.
        monkeypatch.setattr(giving if giver == "a machine alone" else moving, "send_block", Turn(lies))
        asker, of = (o, a) if giver == "a machine alone" else (a, o)
        await asked(asker, of)
        await until(lambda: asker.sharing.meter.lies == {of.node_id: 1})
        assert asker.sharing.meter.checks["wrong"] == 1
        assert asker.sharing.meter.checks["right"] <= FIRST
        # It is asked for nothing more.
        assert of.node_id in asker.node.wrong
        await answered(of, PROMPT[::-1])
        assert await answered(asker, PROMPT[::-1]) == 0
        await at_rest(a, o, g)
        assert asker.bench.engine.stats().blocks_in_use == 0
