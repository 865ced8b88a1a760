"""A node's sources of drafts, as a person hears of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.unit.ways.draft.cards import LOOKUP, SMALL, VERIFIER, A, card
from tests.unit.ways.draft.proposers import Scripted

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId, SequenceId
from paceline.core.stats import DraftUse, EngineStats
from paceline.fleet.card import ModelOffer, Role
from paceline.fleet.eligibility import Eligible, MayDraft, Use
from paceline.ways.draft.finding import Connection, Drafter
from paceline.ways.draft.names import FLEET
from paceline.ways.draft.pool import BlockAsk, ProposerPool
from paceline.ways.draft.service import OFF_HERE, draft_use
from paceline.ways.draft.sources import MOST_NAMED, NodeDrafts

ONE, TWO = SequenceId(1), SequenceId(2)


def unreachable(drafter: Drafter, *_: Callable[..., None]) -> Connection:
    raise AssertionError(f"nobody may be asked: {drafter}")


class Nowhere:
    """Implements `Connection`; nobody answers."""

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None:
        pass

    async def close(self) -> None:
        pass


def nowhere(_drafter: Drafter, *_: Callable[..., None]) -> Connection:
    return Nowhere()


def alone(*offers: ModelOffer) -> MayDraft:
    return Eligible(Use.DRAFT, NodeId("a"), (card("a", *offers),))


@pytest.mark.parametrize(
    ("draft", "offers", "said"),
    [
        ("small", (), "answers come without drafts of small, until a node drafts with it: No node in the fleet drafts with 'small'"),
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
        drafts.attach(A, 100, lambda: alone(*offers), unreachable)
        drafts.complain()
        await drafts.detach()

    asyncio.run(begin())
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_a_request_may_name_any_model_whose_tokens_fit() -> None:
    offers = [replace(SMALL, model_id=f"m{n}") for n in range(2 * MOST_NAMED)]
    others = VERIFIER, replace(SMALL, model_id="foreign", vocabulary="w"), LOOKUP

    async def begin() -> None:
        drafts = NodeDrafts("ngram", SystemClock(), in_fleet=True)
        assert drafts.find("m0", ONE) is None, "nobody is there yet"
        assert set(drafts.names()) == {FLEET}, "whoever comes may draft"
        view = alone(*offers[1:], *others)
        drafts.attach(A, 100, lambda: view, nowhere)
        assert set(drafts.names()) == {FLEET, *(offer.model_id for offer in offers[1:])}
        assert drafts.find("foreign", ONE) is None
        assert drafts.find("m0", ONE) is None
        view = alone(*offers, *others)
        drafts.look()
        first = drafts.find("m0", ONE)
        assert first is not None
        assert first is drafts.find("m0", ONE)
        await asyncio.sleep(0)
        assert first.drafter is not None
        for offer in offers[1:]:
            found = drafts.find(offer.model_id, TWO)
            assert found is not None
            found.forget(TWO)
        assert len(drafts.sources) == MOST_NAMED
        assert drafts.sources["m0"] is first, "a sequence that goes on has it"
        await drafts.detach()
        assert drafts.find("m1", ONE) is None

    asyncio.run(begin())


def test_sources_of_sequences_that_go_on_are_kept_however_many_they_are() -> None:
    offers = [replace(SMALL, model_id=f"m{n}") for n in range(3 * MOST_NAMED)]

    async def begin() -> None:
        drafts = NodeDrafts("ngram", SystemClock(), in_fleet=True)
        drafts.attach(A, 100, lambda: alone(*offers, VERIFIER), nowhere)
        # At once: before any of them can be asked, so that they know of no text yet.
        found = [drafts.find(offer.model_id, SequenceId(n)) for n, offer in enumerate(offers[1:])]
        await asyncio.sleep(0)
        assert all(source is not None and source.drafter is not None for source in found)
        for n, source in enumerate(found):
            assert source is not None
            source.forget(SequenceId(n))
        assert drafts.find("m0", ONE) is not None
        assert len(drafts.sources) == MOST_NAMED
        await drafts.detach()

    asyncio.run(begin())


def test_use_is_counted_by_kind() -> None:
    async def begin() -> tuple[DraftUse, ...]:
        drafts = NodeDrafts("small", SystemClock(), in_fleet=False)
        pool = ProposerPool({"small": Scripted(5)})
        drafts.attach_alone(pool, {"small": ModelOffer("small", Role.PROPOSER, "int4", 0.0, float("nan"))}, 100)
        drafts.meter.hop.observe(0.25, 2)
        stats = EngineStats(drafted_tokens={"ngram": 9}, accepted_tokens={"ngram": 5}, draft_blocks={"ngram": 2})
        used = draft_use(stats, drafts)
        await drafts.detach()
        assert draft_use(stats, drafts)[1].node_id == ""
        pool.close()
        return used

    ngram, small = asyncio.run(begin())
    assert ngram == DraftUse("ngram", 2, 9, 5)
    assert (small.by, small.node_id, small.model_id, small.hop_s, small.trouble) == ("small", "here", "small", 0.25, "")
    assert draft_use(EngineStats(), None) == ()
    assert draft_use(EngineStats(drafts_off=True), None) == (DraftUse("ngram", trouble=OFF_HERE),)
    assert draft_use(EngineStats(), NodeDrafts("auto", SystemClock(), in_fleet=True))[0].by == FLEET
