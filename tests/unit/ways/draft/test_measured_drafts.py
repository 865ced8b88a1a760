"""What became of drafts is known by the node that made them, and forgotten when that node has made none for long."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.fakes.clock import FakeClock
from tests.unit.ways.draft.cards import SMALL, VERIFIER, A, card
from tests.unit.ways.draft.test_sources import nowhere

from paceline.core.ids import NodeId
from paceline.core.stats import EngineStats
from paceline.fleet.card import MeasuredDraft
from paceline.fleet.eligibility import Eligible, MayDraft, Use
from paceline.ways.draft.sources import SEEN, TRIED_AGAIN_S, NodeDrafts


def counted(compared: int, came_true: int) -> EngineStats:
    return EngineStats(compared_tokens={"small": compared}, true_tokens={"small": came_true})


def test_a_share_is_of_the_node_that_drafts_and_is_forgotten() -> None:
    clock = FakeClock()
    drafts = NodeDrafts("small", clock, in_fleet=True)
    assert drafts.measured(counted(0, 0)) == ()
    cards = [card("a", VERIFIER), card("b", SMALL)]

    def seen() -> MayDraft:
        return Eligible(Use.DRAFT, NodeId("a"), tuple(cards))

    async def begin() -> None:
        drafts.attach(A, 100, seen, nowhere)
        assert drafts.measured(counted(500, 400)) == (), "whose those were is not known"
        assert drafts.measured(counted(500 + SEEN - 1, 410)) == (), "too few to say"
        assert drafts.measured(counted(564, 416)) == (MeasuredDraft(NodeId("b"), "small", 0.25),)
        cards[1:] = [card("c", SMALL)]
        drafts.look()
        assert drafts.measured(counted(700, 500)) == (MeasuredDraft(NodeId("b"), "small", 0.25),), "no node's in particular"
        clock.advance(TRIED_AGAIN_S / 2)
        assert drafts.measured(counted(800, 500))[1:] == (MeasuredDraft(NodeId("c"), "small", 0.0),)
        clock.advance(TRIED_AGAIN_S / 2)
        assert drafts.measured(counted(800, 500)) == (MeasuredDraft(NodeId("c"), "small", 0.0),)
        await drafts.detach()

    asyncio.run(begin())


def test_the_best_drafter_is_another_once_the_first_was_wrong() -> None:
    async def drafter(*seen: MeasuredDraft) -> str:
        drafts = NodeDrafts("small", FakeClock(), in_fleet=True)
        cards = (card("a", replace(VERIFIER, drafts=seen)), card("b", SMALL), card("c", replace(SMALL, tokens_per_second=150.0)))
        drafts.attach(A, 100, lambda: Eligible(Use.DRAFT, NodeId("a"), cards), nowhere)
        found = drafts.sources["small"].drafter
        await drafts.detach()
        assert found is not None
        return found.node_id

    assert asyncio.run(drafter()) == "b"
    assert asyncio.run(drafter(MeasuredDraft(NodeId("b"), "small", 0.1))) == "c"
