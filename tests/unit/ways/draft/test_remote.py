"""Drafts between real nodes over mTLS: what a source says of proposers that work, and of those that don't."""

from __future__ import annotations

import asyncio

from tests.unit.net.member.nodes import until
from tests.unit.ways.draft.fleet import ONE, TWO, VOCAB, DraftFleet, on_fleet
from tests.unit.ways.draft.proposers import Breaks, Hangs, Scripted, TooLong

from paceline.core.ids import SequenceId
from paceline.engine.drafts import DraftAnswer, DraftAsk


@on_fleet
async def test_only_new_tokens_travel_and_wrong_guesses_are_taken_back(fleet: DraftFleet) -> None:
    proposer = Scripted(7, 8, 9)
    async with fleet.drafting(proposer) as drafting:
        assert drafting.source.expected_s is not None
        assert await drafting.ask(0, [1, 2, 3]) == DraftAnswer(ONE, 3, (7, 8, 9))
        assert await drafting.ask(3, [7, 8], 2) == DraftAnswer(ONE, 5, (7, 8))
        assert (await drafting.ask(4, [5])).position == 5
        assert (await drafting.ask(0, [4], sequence=TWO)).position == 1
        assert proposer.texts == [(1, 2, 3), (1, 2, 3, 7, 8), (1, 2, 3, 7, 5), (4,)]
        stats = drafting.meter.of(drafting.model_id)
        assert (stats.blocks, stats.tokens, stats.forward_passes, stats.failures) == (4, 11, 8, 0)
        assert drafting.meter.hop.buckets()[-1][1] == 4


@on_fleet
async def test_what_ended_is_forgotten_on_both_sides(fleet: DraftFleet) -> None:
    async with fleet.drafting(Scripted(7)) as drafting:
        pool = drafting.order[0].proposers
        await drafting.ask(0, [1, 2, 3])
        await drafting.ask(0, [1, 2], sequence=TWO)
        assert (pool.sessions, pool.tokens) == (2, 5)
        drafting.source.forget(ONE)
        drafting.source.forget(SequenceId(99))
        await until(lambda: (pool.sessions, pool.tokens) == (1, 2))
        await drafting.source.detach()
        await until(lambda: (pool.sessions, pool.tokens) == (0, 0))


@on_fleet
async def test_a_session_that_the_other_side_lost_is_told_anew(fleet: DraftFleet) -> None:
    proposer = Scripted(7)
    async with fleet.drafting(proposer) as drafting:
        await drafting.ask(0, [1, 2, 3])
        pool = drafting.order[0].proposers
        pool.end("a", [key[2] for key in pool._kept])
        assert await drafting.ask(3, [7]) == DraftAnswer(ONE, 4, (7,))
        assert proposer.texts[-1] == (1, 2, 3, 7)
        assert not drafting.meter.failures


@on_fleet
async def test_whoever_drafts_nonsense_is_replaced_and_with_nobody_left_nobody_is_asked(fleet: DraftFleet) -> None:
    for bad, status in ((TooLong(), "DATA_LOSS"), (Scripted(VOCAB), "DATA_LOSS"), (Breaks(), "UNKNOWN")):
        good = Scripted(7, 8)
        async with fleet.drafting(bad, good) as drafting:
            assert await drafting.ask(0, [1, 2]) == DraftAnswer(ONE, 2, ())
            assert await drafting.ask(2, [3]) == DraftAnswer(ONE, 3, (7, 8))
            assert good.texts == [(1, 2, 3)]
            assert drafting.meter.failures == {("b0", status): 1}
            assert drafting.meter.of(drafting.model_id).failures == 1
            good.token_ids = (VOCAB,)
            assert await drafting.ask(3, [4]) == DraftAnswer(ONE, 4, ())
            assert drafting.source.expected_s is None
            assert await drafting.ask(4, [5]) == DraftAnswer(ONE, 5, ())  # asked all the same


@on_fleet
async def test_a_later_ask_takes_the_place_of_one_under_way(fleet: DraftFleet) -> None:
    hangs = Hangs(7, 8)
    async with fleet.drafting(hangs) as drafting:
        drafting.source.ask(DraftAsk(ONE, 0, [1, 2], 4))
        await asyncio.to_thread(hangs.begun.wait, 20)
        drafting.source.ask(DraftAsk(ONE, 2, [7, 8], 4))  # guessed, and then known to be wrong
        drafting.source.ask(DraftAsk(ONE, 2, [3], 4))
        await until(lambda: drafting.order[0].proposers.tokens == 3)
        hangs.go.set()
        answers = list[DraftAnswer]()
        while len(answers) < 3:
            answers += await asyncio.to_thread(drafting.source.answers, 20.0)
        assert answers == [DraftAnswer(ONE, 2, (7, 8)), DraftAnswer(ONE, 4, ()), DraftAnswer(ONE, 3, (7, 8))]
        assert not drafting.meter.failures


@on_fleet
async def test_a_node_that_dies_within_a_block_is_replaced(fleet: DraftFleet) -> None:
    dies, own = Hangs(7), Scripted(8)
    dying = fleet.others[0]
    async with fleet.drafting(dies, own=own) as drafting:
        asked = asyncio.create_task(drafting.ask(0, [1, 2]))
        await asyncio.to_thread(dies.begun.wait, 20)
        stopping = asyncio.create_task(dying.stop())
        assert await asked == DraftAnswer(ONE, 2, ())
        dies.go.set()
        await stopping
        assert await drafting.ask(2, [3]) == DraftAnswer(ONE, 3, (8,))
        assert own.texts == [(1, 2, 3)]
    await fleet.replace(dying)
