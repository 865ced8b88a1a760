"""A route: nodes with the very same weights, in the plan's order, and this node first where the hop is not worth it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ContextOverflow
from paceline.core.following import Following, Holding
from paceline.core.generation import GenerationRequest
from paceline.core.ids import NodeId, RequestId
from paceline.core.model import ModelRef, digest_of_name
from paceline.core.via import new_mark
from paceline.fleet.card import EngineOffer, ModelOffer, ModelShape, NodeCard, Role
from paceline.fleet.eligibility import Eligible, Use
from paceline.ways.forward.routes import Meaning, may_be_loading, open_to, routes, with_room

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
SHAPE = ModelShape(30, 576, 2_212_560, 30_081_384, 768, 8192)
ONE, OTHER = Meaning(ModelRef("1" * 64, "int4")), Meaning(ModelRef("2" * 64, "int4"))


def offer(speed: float, meaning: Meaning = ONE, name: str = "m", **changes: object) -> ModelOffer:
    base = ModelOffer(
        name, Role.VERIFIER, meaning.model.weights, speed, 10 * speed, meaning.model.digest, True, "numerics", True, 98_000_000, SHAPE
    )
    return replace(base, **changes)


def card(node_id: NodeId, *offers: ModelOffer) -> NodeCard:
    return NodeCard(node_id, 1, (f"{node_id}:1",), b"i", 120, 0, memory_total_bytes=1 << 34, memory_free_bytes=1 << 33, models=offers)


def order(own: NodeId, *cards: NodeCard, meanings: dict[str, Meaning] | None = None) -> list[str]:
    loaded = {o.model_id: Meaning(o.model) for c in cards if c.node_id == own for o in c.models if o.warm}
    found = routes(Eligible(Use.ANSWER, own, cards), loaded, meanings or {})
    return [stop.node_id for stop in found["m"].stops] if "m" in found else []


def test_the_faster_node_comes_first() -> None:
    assert order(A, card(B, offer(100)), card(C, offer(300))) == ["c", "b"]


def test_a_request_stays_unless_another_node_is_much_faster() -> None:
    assert order(A, card(A, offer(100)), card(B, offer(110))) == ["a", "b"]
    assert order(A, card(A, offer(100)), card(B, offer(300))) == ["b", "a"]


def test_two_nodes_of_one_speed_don_t_send_everything_to_one_of_them() -> None:
    cards = (card(A, offer(100)), card(B, offer(100)))
    assert order(A, *cards)[0] == "a"
    assert order(B, *cards)[0] == "b"


def test_only_models_that_run_and_verify_are_on_a_route() -> None:
    assert order(A, card(B, offer(100, warm=False))) == []
    assert order(A, card(B, offer(100, role=Role.PROPOSER))) == []
    assert order(A, card(B, offer(100, digest=""))) == []


def test_what_runs_anew_with_the_model_on_its_disk_alone_may_be_loading_it() -> None:
    digest, cold, other = ONE.model.digest, offer(100, warm=False), offer(100, OTHER, warm=False)
    lost, still_there = {B: b"another"}, {B: b"i"}
    assert may_be_loading((card(A), card(B, cold)), digest, lost)
    assert not may_be_loading((card(B, cold),), digest, still_there)
    assert not may_be_loading((card(B), card(C, cold)), digest, lost)
    assert not may_be_loading((card(B, other), card(B, offer(100)), card(B, cold, offer(100))), digest, lost)


def test_a_node_that_is_there_for_prompts_comes_last_and_still_answers_its_own_clients() -> None:
    computes = offer(300, role=Role.PREFILL)
    assert order(A, card(A, offer(100)), card(B, computes)) == ["a", "b"]
    assert order(A, card(B, computes), card(C, offer(10))) == ["c", "b"]
    assert order(A, card(B, computes)) == ["b"]
    assert order(B, card(A, offer(100)), card(B, computes)) == ["b", "a"]
    stops = routes(Eligible(Use.ANSWER, B, (card(A, computes), card(B, computes))), {}, {})["m"].stops
    assert {stop.node_id: stop.prefills for stop in stops} == {A: True, B: False}


def test_other_weights_under_the_same_name_are_another_model() -> None:
    cards = (card(A, offer(50)), card(B, offer(300, OTHER)))
    assert order(A, *cards) == ["a"]
    assert order(A, card(A, offer(50)), card(B, offer(300, Meaning(ModelRef("1" * 64, "bf16"))))) == ["a"]


def test_a_name_keeps_its_meaning_while_somebody_offers_it() -> None:
    cards = (card(B, offer(50)), card(C, offer(300, OTHER)))
    assert order(A, *cards) == ["c"]
    assert order(A, *cards, meanings={"m": ONE}) == ["b"]
    assert order(A, cards[1], meanings={"m": ONE}) == ["c"]


def test_nodes_of_unknown_speed_come_last_and_alone_they_do() -> None:
    unknown = offer(0, prefill_tokens_per_second=0)
    assert order(A, card(B, unknown), card(C, offer(10))) == ["c", "b"]
    assert order(A, card(C, unknown), card(B, unknown)) == ["b", "c"]
    assert order(B, card(A, unknown), card(B, unknown)) == ["b", "a"]


@given(st.permutations([card(A, offer(100)), card(B, offer(100)), card(C, offer(90), offer(5, OTHER, "x"))]), st.sampled_from([A, B, C]))
def test_the_order_of_cards_is_nobody_s_business(cards: list[NodeCard], own: NodeId) -> None:
    ordered = sorted(cards, key=lambda c: c.node_id)
    assert routes(Eligible(Use.ANSWER, own, tuple(cards)), {}, {}) == routes(Eligible(Use.ANSWER, own, tuple(ordered)), {}, {})


def test_a_stop_says_what_the_plan_expects_and_what_the_card_says_is_under_way() -> None:
    cards = (card(B, offer(100, under_way=4)), card(C, offer(0, prefill_tokens_per_second=0)))
    stops = {stop.node_id: stop for stop in routes(Eligible(Use.ANSWER, A, cards), {}, {})["m"].stops}
    assert (stops[B].under_way, stops[C].under_way) == (4, 0)
    assert stops[B].expected_s is not None
    assert stops[C].expected_s is None


def test_holders_known_by_name_alone_join_the_route_of_the_same_name_and_quantisation() -> None:
    by_name = offer(300, digest=digest_of_name("m", "int4"), numerics_id="")
    assert sorted(order(A, card(A, offer(100)), card(B, by_name))) == ["a", "b"]
    assert order(A, card(A, offer(100)), card(B, replace(by_name, digest=digest_of_name("m", "Q8_0"), weights="Q8_0"))) == ["a"]
    assert order(A, card(A, offer(100)), card(B, replace(by_name, tokenizer="other"))) == ["a"]


MIXED = (card(A, offer(300, numerics_id="")), card(B, offer(200)), card(C, offer(100, numerics_id="other")))


@pytest.mark.parametrize(
    ("after", "left", "exact", "expected"),
    [
        (None, (), False, "abc"),
        ("numerics", (), False, "b"),
        ("numerics", (B,), False, "ac"),
        ("other", (), False, "c"),
        ("gone", (), False, "abc"),
        ("", (), False, "abc"),
        ("", (A,), False, "bc"),
        ("numerics", (), True, "b"),
        ("numerics", (B,), True, ""),
        ("gone", (), True, ""),
        ("", (), True, ""),
    ],
)
def test_equal_numerics_come_first_and_are_all_that_an_exact_request_takes(
    after: str | None, left: tuple[NodeId, ...], exact: bool, expected: str
) -> None:
    stops = routes(Eligible(Use.ANSWER, A, MIXED), {}, {})["m"].stops
    found = open_to(stops, None if after is None else Holding(ONE.model, after), left, exact=exact)
    assert sorted(stop.node_id for stop, _ in found) == list(expected)
    assert all(how.is_announced for stop, how in found if after is not None and stop.numerics_id != after)
    assert all(how is Following.SAME for stop, how in found if after is None)


ENGINE = EngineOffer("llama-server b9000", ("ids",), "Q4_K_M", 4)


def test_a_route_says_which_engine_answers_unless_own_kernels_may() -> None:
    shared, own = offer(10, numerics_id="", shape=None, engine=ENGINE), offer(10)
    found = routes(Eligible(Use.ANSWER, A, (card(B, shared), card(C, shared))), {}, {})["m"]
    assert found.engine == ENGINE
    assert routes(Eligible(Use.ANSWER, A, (card(B, shared), card(C, own))), {}, {})["m"].engine is None


def test_a_route_has_no_engine_that_is_reached_through_the_node_that_asks_and_says_the_shortest_way() -> None:
    here, other, third = new_mark("a"), new_mark("b"), new_mark()
    back, far, near = (
        offer(10, numerics_id="", shape=None, engine=replace(ENGINE, via=via)) for via in ((here,), (other, third), (third,))
    )
    found = routes(Eligible(Use.ANSWER, A, (card(A, back), card(B, far), card(C, near))), {}, {}, mark=here)["m"]
    assert ({stop.node_id for stop in found.stops}, found.via) == ({B, C}, (third,))
    assert routes(Eligible(Use.ANSWER, A, (card(B, far), card(C, offer(1)))), {}, {}, mark=here)["m"].via == ()
    assert not routes(Eligible(Use.ANSWER, A, (card(B, back),)), {}, {}, mark=here)


def shared(speed: float = 10.0, **engine: object) -> ModelOffer:
    return offer(speed, numerics_id="", shape=None, engine=replace(ENGINE, **engine))


@pytest.mark.parametrize(
    ("prompt", "most", "so_far", "expected"),
    [
        (100, 100, 0, "abc"),
        (4000, 96, 0, "abc"),
        (4000, 97, 0, "ab"),
        (4095, None, 0, "abc"),
        (4096, None, 0, "ab"),
        (4000, 200, 95, "ab"),
        (4000, None, 96, "ab"),
        (8192, 1, 0, "b"),
        (0, 8193, 0, "b"),
        (32_000, None, 800, ""),
    ],
)
def test_a_request_goes_only_where_prompt_and_answer_fit(prompt: int, most: int | None, so_far: int, expected: str) -> None:
    cards = (card(A, offer(10)), card(B, shared(context=32_768)), card(C, shared(context=4096)))
    stops = routes(Eligible(Use.ANSWER, A, cards), {}, {})["m"].stops
    request = GenerationRequest(RequestId("r"), tuple(range(prompt)), most, so_far={0: (1,) * so_far} if so_far else {})
    found = with_room(stops, request, lambda stop: 8192 if stop.node_id == A else 0)
    assert sorted(stop.node_id for stop in found) == list(expected)


@pytest.mark.parametrize(("prompt", "most", "field"), [(9000, None, "prompt"), (8000, 500, "max_tokens")])
def test_a_request_that_fits_nowhere_is_told_the_largest_context(prompt: int, most: int | None, field: str) -> None:
    cards = (card(B, shared(context=8192)), card(C, shared(context=4096)))
    stops = routes(Eligible(Use.ANSWER, A, cards), {}, {})["m"].stops
    with pytest.raises(ContextOverflow, match="8192") as refused:
        with_room(stops, GenerationRequest(RequestId("r"), tuple(range(prompt)), most), lambda _: 0)
    assert refused.value.field == field
    assert with_room((*stops, replace(stops[0], engine=None)), GenerationRequest(RequestId("r"), (1,) * prompt, most), lambda _: 0)


def test_a_model_that_an_engine_has_to_load_comes_after_one_that_is_loaded_and_sooner() -> None:
    def found(*offers: ModelOffer) -> list[str]:
        return order(A, *(card(node_id, each) for node_id, each in zip((B, C), offers, strict=False)))

    assert found(shared(100.0, load_s=60.0), shared(10.0)) == ["c", "b"]
    assert found(shared(100.0, load_s=1.0), shared(10.0)) == ["b", "c"]
    assert found(shared(100.0, load_s=0.0), shared(100.0)) == ["c", "b"]  # estimated from its size
    assert found(shared(0.0, load_s=5.0), shared(0.0)) == ["c", "b"]
    on_disk = {
        loads: routes(
            Eligible(Use.ANSWER, A, tuple(card(node_id, shared(load_s=load_s)) for node_id, load_s in zip("bc", loads, strict=True))),
            {},
            {},
        )["m"].on_disk
        for loads in ((5.0, 5.0), (5.0, None), (0.0, 0.0))
    }
    assert on_disk == {(5.0, 5.0): True, (5.0, None): False, (0.0, 0.0): True}


AWAY = replace(ENGINE, leaves_network=True)
OUTSIDE, OUTSIDE_OTHER = (offer(900, meaning, numerics_id="", shape=None, engine=AWAY) for meaning in (ONE, OTHER))


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ((card(A, offer(1)), card(B, OUTSIDE)), "a"),
        ((card(A, offer(1)), card(B, OUTSIDE_OTHER), card(C, OUTSIDE_OTHER)), "a"),
        ((card(A, OUTSIDE), card(B, offer(1))), "b"),
        ((card(A, OUTSIDE), card(B, offer(1, numerics_id="", shape=None, engine=replace(ENGINE, plain_http=True)))), "b"),
        ((card(A, OUTSIDE), card(B, offer(1, warm=False))), "a"),
        ((card(B, OUTSIDE), card(C, OUTSIDE)), "bc"),
    ],
    ids=["own kernels", "most holders are outside", "outside at the door", "plain http at home", "only on a disk", "nothing at home"],
)
def test_an_engine_outside_is_on_a_route_only_where_nothing_at_home_has_the_name(cards: tuple[NodeCard, ...], expected: str) -> None:
    loaded = {each.model_id: Meaning(each.model) for one in cards if one.node_id == A for each in one.models if each.warm}
    for known in ({}, {"m": ONE}, {"m": OTHER}):
        found = routes(Eligible(Use.ANSWER, A, cards), loaded, known)["m"]
        assert sorted(stop.node_id for stop in found.stops) == list(expected)
        assert found.leaves == all(stop.leaves for stop in found.stops)


def test_a_request_that_began_at_home_goes_to_no_engine_outside() -> None:
    stops = routes(Eligible(Use.ANSWER, A, (card(B, OUTSIDE),)), {}, {})["m"].stops
    for after in (None, Holding(ONE.model, "numerics")):
        assert open_to(stops, after, (), exact=False) == []
        assert [stop.node_id for stop, _ in open_to(stops, after, (), exact=False, may_leave=True)] == ["b"]
