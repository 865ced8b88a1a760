"""A node's sources of drafts, as a person hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.core.stats import DraftUse, EngineStats
from paceline.core.trust import Trust
from paceline.engine.proposers.ngram import NGramProposer
from paceline.fleet.card import ModelOffer, NodeCard, Role
from paceline.fleet.view import FleetView, LiveCard
from paceline.node.drafts.drafter import Drafter, Line
from paceline.node.drafts.finding import Verifier
from paceline.node.drafts.sources import FLEET, NodeDrafts
from paceline.node.drafts.use import draft_use
from paceline.transport.proposer_desk import ProposerDesk

OWN = Verifier(NodeId("a"), "d" * 64, "int4", "v")


def unreachable(drafter: Drafter, *_: Callable[..., None]) -> Line:
    raise AssertionError(f"nobody may be asked: {drafter}")


def alone(*offers: ModelOffer) -> FleetView:
    card = NodeCard(NodeId("a"), 1, ("127.0.0.1:1",), b"a", 60, 0, models=offers)
    return FleetView(NodeId("a"), (LiveCard(card, 0.0, 0, Trust.MEMBER),), (), ())


@pytest.mark.parametrize(
    ("draft", "offers", "said"),
    [
        ("small", (), "answers come without drafts of small, until somebody drafts with it: Nobody in the fleet drafts with 'small'"),
        ("small", (ModelOffer("small", Role.PROPOSER, "int4", vocabulary="w"),), "small can't draft: other tokens"),
        ("auto", (), ""),
        ("ngram", (), ""),
    ],
)
def test_a_model_that_nobody_drafts_with_is_named(
    draft: str, offers: tuple[ModelOffer, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def begin() -> None:
        drafts = NodeDrafts(draft, SystemClock(), in_fleet=True)
        drafts.attach(OWN, 100, lambda: alone(*offers), unreachable)
        drafts.complain()
        await drafts.detach()

    asyncio.run(begin())
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_use_is_counted_by_kind() -> None:
    async def begin() -> tuple[DraftUse, ...]:
        drafts = NodeDrafts("small", SystemClock(), in_fleet=False)
        desk = ProposerDesk({"small": NGramProposer()})
        drafts.attach_alone(desk, {"small": (100.0, 100.0)}, 100)
        drafts.meter.hop.observe(0.25, 2)
        stats = EngineStats(drafted_tokens={"ngram": 9}, accepted_tokens={"ngram": 5}, draft_blocks={"ngram": 2})
        used = draft_use(stats, drafts)
        await drafts.detach()
        assert draft_use(stats, drafts)[1].node_id == ""
        desk.close()
        return used

    ngram, small = asyncio.run(begin())
    assert ngram == DraftUse("ngram", 2, 9, 5)
    assert (small.by, small.node_id, small.model_id, small.hop_s, small.trouble) == ("small", "here", "small", 0.25, "")
    assert draft_use(EngineStats(), None) == ()
    assert draft_use(EngineStats(), NodeDrafts("auto", SystemClock(), in_fleet=True))[0].by == FLEET
