"""Engines of other makers in a plan: which could answer, in which order, and what nothing of a card makes of their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId
from paceline.core.model import digest_of_name
from paceline.fleet.card import EngineOffer, ModelOffer, ModelShape, NodeCard, Role
from paceline.fleet.choices import LOAD_BYTES_PER_S
from paceline.fleet.eligibility import Eligible, Use
from paceline.fleet.engines import UNKNOWN_LOAD_S, Loading, holders, loading, price
from paceline.fleet.placement import different_models, plan, weights_sources
from paceline.fleet.plan import ALONE, Pin, PlanRequest, Way
from paceline.fleet.ways import Alone

DIGEST = "1" * 64


def engine_offer(speed: float = 20.0, name: str = "m", *, digest: str = DIGEST, **of_engine: object) -> ModelOffer:
    engine = replace(EngineOffer("llama-server b9000", ("ids",), "Q4_K_M", 4), **of_engine)
    return ModelOffer(name, Role.VERIFIER, "stored", speed, 10 * speed, digest, warm=True, size_bytes=5 << 30, engine=engine)


def card(node_id: str, *offers: ModelOffer, free: int = 8 << 30) -> NodeCard:
    return NodeCard(NodeId(node_id), 1, (f"{node_id}:1",), b"i", 120, 0, memory_total_bytes=1 << 34, memory_free_bytes=free, models=offers)


def test_a_price_comes_from_measured_rates_alone() -> None:
    expected = price(engine_offer(20.0), PlanRequest("m", prompt_tokens=400, answer_tokens=41))
    assert expected is not None
    assert (expected.ttft_s, expected.total_s, expected.measured) == (pytest.approx(2.0), pytest.approx(4.0), True)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        assert price(engine_offer(rate), PlanRequest("m")) is None
    assert price(replace(engine_offer(), engine=None), PlanRequest("m")) is None


@pytest.mark.parametrize(
    ("changes", "ttft_s", "measured"),
    [
        ({}, 2.0, True),
        ({"load_s": 30.0}, 32.0, True),
        ({"load_s": 0.0}, 2.0 + (5 << 30) / LOAD_BYTES_PER_S, False),
        ({"first_token_s": 0.5}, 2.0, True),
    ],
    ids=["loaded", "measured", "estimated", "the prompt's rate says more"],
)
def test_a_load_is_part_of_the_price(changes: dict[str, object], ttft_s: float, measured: bool) -> None:
    expected = price(engine_offer(**changes), PlanRequest("m", prompt_tokens=400))
    assert expected is not None
    assert (expected.ttft_s, expected.measured) == (pytest.approx(ttft_s), measured)


def test_what_little_is_known_is_used() -> None:
    short = replace(engine_offer(first_token_s=0.5), prefill_tokens_per_second=0.0)
    expected = price(short, PlanRequest("m", prompt_tokens=400))
    assert expected is not None
    assert expected.ttft_s == pytest.approx(0.5)
    assert loading(replace(engine_offer(load_s=0.0), size_bytes=0)) == Loading(UNKNOWN_LOAD_S, measured=False)


def test_a_model_on_disk_competes_with_loaded_ones() -> None:
    fleet = (
        card("far", engine_offer(50.0, load_s=60.0)),
        card("near", engine_offer(50.0, load_s=1.0)),
        card("slow", engine_offer(5.0)),
        card("new", engine_offer(0.0, load_s=5.0)),
        card("newer", engine_offer(0.0)),
    )
    found = holders(fleet, PlanRequest("m"))
    assert [each.node_id for each in found] == ["near", "slow", "far", "newer", "new"]
    assert "loads first: 1 s" in found[0].headline


def test_the_fastest_comes_first_the_unmeasured_later_and_what_leaves_the_network_last() -> None:
    fleet = (
        card("away", engine_offer(900.0, leaves_network=True)),
        card("new", engine_offer(0.0)),
        card("slow", engine_offer(5.0)),
        card("fast", engine_offer(50.0)),
    )
    assert [each.node_id for each in holders(fleet, PlanRequest("m"))] == ["fast", "slow", "new", "away"]
    assert holders(fleet, PlanRequest("m")) == holders(fleet[::-1], PlanRequest("m"))


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (PlanRequest("m"), ["a", "b"]),
        (PlanRequest(DIGEST[:12]), ["a", "b"]),
        (PlanRequest("m", exact=True), []),
        (PlanRequest("m", ways=frozenset({ALONE})), ["a", "b"]),
        (PlanRequest("m", ways=frozenset({Way("pipeline")})), []),
        (PlanRequest("m", proposer=NodeId("b")), []),
        (PlanRequest("m", pins=(Pin(NodeId("b")),)), ["b"]),
        (PlanRequest("m", pins=(Pin(NodeId("a")), Pin(NodeId("b")))), []),
        (PlanRequest("m", exclude=frozenset({NodeId("a")})), ["b"]),
        (PlanRequest("m", "Q4_K_M"), ["a", "b"]),
        (PlanRequest("m", "int8"), []),
        (PlanRequest("other"), []),
    ],
)
def test_engines_answer_alone_and_promise_no_bytes(request_: PlanRequest, found: list[str]) -> None:
    fleet = (card("a", engine_offer()), card("b", engine_offer(10.0)), card("c", replace(engine_offer(), warm=False)))
    fleet = (*fleet, card("d", replace(engine_offer(), role=Role.EMBEDDER)))
    assert [each.node_id for each in holders(fleet, request_)] == found


def test_an_engine_changes_no_plan_and_its_memory_is_nobody_s() -> None:
    shape = ModelShape(24, 2048, 100 << 20, 300 << 20, 2048, 32768)
    own = ModelOffer("m", Role.VERIFIER, "int4", 20.0, 200.0, DIGEST, shape=shape)
    without = (card("a", own), card("b", free=2 << 30))
    shared = (card("a", own), card("b", engine_offer(500.0), engine_offer(500.0, "n"), free=2 << 30))
    assert plan(without, PlanRequest("m"), (Alone(),)) == plan(shared, PlanRequest("m"), (Alone(),))
    with pytest.raises(PlacementError):
        plan(shared, PlanRequest("n"), (Alone(),))
    with pytest.raises(PlacementError):  # an idle engine's gigabytes make no room for a model that does not fit
        plan((card("b", replace(own, warm=False), engine_offer(500.0, "n"), free=2 << 30),), PlanRequest("m"), (Alone(),))


def test_no_weights_are_fetched_from_an_engine() -> None:
    fleet = (card("me"), card("b", engine_offer()))
    assert weights_sources(Eligible(Use.GIVE_WEIGHTS, NodeId("me"), fleet), "m") == ()


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        ((engine_offer(), engine_offer()), ()),
        (
            (engine_offer(digest=digest_of_name("m", "stored")), engine_offer(quantisation="Q8_0")),
            ("unknown digest on a", DIGEST[:12], "Q8_0"),
        ),
        ((engine_offer(digest="2" * 64), engine_offer(quantisation="Q8_0")), ("222222222222", "Q4_K_M", "Q8_0", "llama-server b9000")),
    ],
)
def test_two_engines_with_other_weights_under_one_name_are_named(offers: tuple[ModelOffer, ModelOffer], words: tuple[str, ...]) -> None:
    said = different_models(card(node_id, offer) for node_id, offer in zip("ab", offers, strict=True))
    assert bool(said) == bool(words)
    assert all(word in said[0][1] for word in words)
