"""Who drafts: the plan's choice, but for guests and those left out, and never with other tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.ways.draft.cards import LOOKUP, SMALL, VERIFIER, A, card

from paceline.core.errors import PlacementError, VocabularyMismatch
from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import NodeCard
from paceline.fleet.eligibility import Eligible, FleetView, LiveCard, TrustPolicy, Use
from paceline.ways.draft.finding import drafters


def names(cards: list[NodeCard], model_id: str = "small", **more: object) -> list[str]:
    trust: dict[str, Trust] = more.get("trust", {})  # type: ignore[assignment]
    view = FleetView(A.node_id, tuple(LiveCard(one, 0.0, trust=trust.get(one.node_id, Trust.MEMBER)) for one in cards))
    return [one.node_id for one in drafters(TrustPolicy().eligible(view, Use.DRAFT), A, model_id, more.get("left_out", ()))]  # type: ignore[arg-type]


def test_the_fastest_comes_first_and_this_machine_last() -> None:
    slow = replace(SMALL, tokens_per_second=90.0)
    cards = [card("a", VERIFIER, SMALL), card("b", slow), card("c", SMALL), card("far", SMALL, rtt_s=0.5)]
    assert names(cards) == ["c", "b", "far", "a"]
    (first, *_) = drafters(Eligible(Use.DRAFT, A.node_id, tuple(cards)), A, "small")
    assert (first.tokens_per_s, first.prompt_tokens_per_s, first.rtt_s, first.instance) == (200.0, 400.0, 0.001, b"c")
    assert first.takes_s(400, 20) == pytest.approx(0.001 + 1.0 + 0.1)


def test_who_failed_is_left_out_until_it_starts_anew() -> None:
    cards = [card("a", VERIFIER, SMALL), card("b", SMALL), card("c", SMALL)]
    assert names(cards, left_out=[("c", b"c")]) == ["b", "a"]
    assert names(cards, left_out=[("c", b"before"), ("a", b"a")]) == ["c", "b"]
    with pytest.raises(PlacementError, match="No node is left to draft with small"):
        names(cards, left_out=[("a", b"a"), ("b", b"b"), ("c", b"c")])


def test_the_one_that_is_pinned_drafts_and_no_other() -> None:
    cards = (card("a", VERIFIER, SMALL), card("b", SMALL), card("c", replace(SMALL, tokens_per_second=900.0)))
    seen = Eligible(Use.DRAFT, A.node_id, cards)
    assert [one.node_id for one in drafters(seen, A, "small", on=NodeId("b"))] == ["b"]
    assert [one.node_id for one in drafters(seen, A, "", on=NodeId("b"))] == ["b"]
    with pytest.raises(PlacementError, match="d is pinned and is not in the fleet"):
        drafters(seen, A, "small", on=NodeId("d"))


def test_guests_do_not_see_texts() -> None:
    cards = [card("a", VERIFIER), card("b", SMALL), card("c", SMALL)]
    assert names(cards, trust={"c": Trust.GUEST}) == ["b"]
    with pytest.raises(PlacementError, match="No node in the fleet drafts with 'small'"):
        names(cards[:2], trust={"b": Trust.GUEST})


def test_what_there_is_instead_is_named() -> None:
    with pytest.raises(PlacementError) as caught:
        names([card("a", VERIFIER, LOOKUP), card("b", SMALL, LOOKUP)], "./small.gguf")
    assert caught.value.hint == "Start a machine with --propose ./small.gguf, or choose of what there is: small."


def test_other_tokens_are_an_error() -> None:
    other = replace(SMALL, vocabulary="w")
    with pytest.raises(VocabularyMismatch, match="small can't draft"):
        names([card("a", VERIFIER), card("b", other)])
    assert names([card("a", VERIFIER), card("b", other), card("c", SMALL)]) == ["c"]
    with pytest.raises(VocabularyMismatch):
        names([card("a", VERIFIER), card("b", other)], "")


def test_prompt_lookup_that_older_nodes_offer_is_not_asked_for() -> None:
    with pytest.raises(PlacementError, match="No node in the fleet drafts with 'ngram'"):
        names([card("a", VERIFIER), card("b", LOOKUP)], "ngram")
    with pytest.raises(PlacementError, match="Start a machine with --propose tiny"):
        names([card("a", VERIFIER), card("b", LOOKUP)], "tiny")


def test_without_a_name_any_model_drafts_that_pays() -> None:
    quick = replace(SMALL, model_id="quick", tokens_per_second=2000.0)
    fast, slow = replace(SMALL, model_id="fast", tokens_per_second=5000.0), replace(SMALL, model_id="slow", tokens_per_second=1.0)
    assert [
        one.model_id
        for one in drafters(Eligible(Use.DRAFT, A.node_id, (card("a", VERIFIER), card("b", LOOKUP, slow, quick), card("c", fast))), A, "")
    ] == [
        "fast",
        "quick",
    ]
    with pytest.raises(PlacementError, match="would save time"):
        names([card("a", VERIFIER), card("b", slow)], "")
    with pytest.raises(PlacementError, match="No node in the fleet drafts"):
        names([card("a", VERIFIER), card("b", LOOKUP)], "")
