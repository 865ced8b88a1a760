"""Laws of placement over any fleet, and what keeps a plan."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import permutations, product
from operator import mul

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ImpossiblePin, PlacementError
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet import cost
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role
from paceline.fleet.machines import Links, groups, live_cards, matching_offers
from paceline.fleet.pipelines import arranged, pipelines, split
from paceline.fleet.placement import plan, still_holds, why_broken
from paceline.fleet.plan import Constraint, Pin, Plan, PlanRequest, Way

GIB = 1 << 30
SHAPE = ModelShape(
    n_layers=24, hidden=2048, layer_bytes=100 << 20, edge_bytes=300 << 20, kv_bytes_per_token_per_layer=2048, max_context=32768
)
NAMES = [NodeId(name) for name in ("ant", "bee", "cat", "dog", "elk")]


def offer(**changes: object) -> ModelOffer:
    base = ModelOffer("m", Role.VERIFIER, "int4", 20.0, 200.0, "d" * 64, numerics_id="n", shape=SHAPE, vocabulary="v")
    return replace(base, **changes)


def node(
    name: str, *offers: ModelOffer, free: int = 8 * GIB, links: dict[str, tuple[float, float]] | None = None, **changes: object
) -> NodeCard:
    base = NodeCard(
        NodeId(name), 1, (f"{name}:1",), name.encode(), 120, 0, backend="cpu", memory_total_bytes=16 * GIB, memory_free_bytes=free,
        memory_bytes_per_s=50 * 10**9, models=offers,
        links=tuple(Link(NodeId(to), f"{to}:1", rtt, rate) for to, (rtt, rate) in (links or {}).items()),
    )  # fmt: skip
    return replace(base, **changes)


# ------------------------------------------------------------------------------------------------------------ any fleet

figures = st.one_of(st.sampled_from([0.0, 5.0, 20.0, 21.0, 80.0, 1e-12, 1e300, math.nan, math.inf, -1.0]), st.floats(0.1, 1e6))
shapes = st.one_of(
    st.just(SHAPE),
    st.builds(
        ModelShape,
        n_layers=st.integers(0, 40),
        hidden=st.integers(0, 4096),
        layer_bytes=st.integers(0, 1 << 64),
        edge_bytes=st.integers(0, 1 << 40),
        kv_bytes_per_token_per_layer=st.integers(0, 1 << 20),
        max_context=st.integers(0, 1 << 31),
    ),
    st.none(),
)
offers = st.builds(
    ModelOffer,
    model_id=st.sampled_from(["m", "m", "m", "other", "lookup"]),
    role=st.sampled_from([Role.VERIFIER, Role.VERIFIER, Role.PROPOSER, Role.SHARD, Role.EMBEDDER]),
    weights=st.sampled_from(["int4", "int4", "bf16", ""]),
    tokens_per_second=figures,
    prefill_tokens_per_second=figures,
    digest=st.sampled_from(["d" * 64, "d" * 64, "e" * 64, ""]),
    warm=st.booleans(),
    numerics_id=st.sampled_from(["", "n", "o"]),
    shape=shapes,
    vocabulary=st.sampled_from(["", "v"]),
)
links = st.builds(Link, to=st.sampled_from(NAMES), address=st.just("x:1"), rtt_s=figures, bytes_per_s=figures)


def cards(name: NodeId) -> st.SearchStrategy[NodeCard]:
    return st.builds(
        NodeCard,
        node_id=st.just(name),
        version=st.integers(1, 2),
        addresses=st.just(("x:1",)),
        instance=st.just(b"i"),
        ttl_s=st.just(120),
        announced_at=st.just(0),
        backend=st.sampled_from(["", "cpu"]),
        memory_total_bytes=st.integers(0, (1 << 64) - 1) | st.just(16 * GIB),
        memory_free_bytes=st.integers(0, (1 << 64) - 1) | st.integers(0, 8 * GIB),
        memory_bytes_per_s=st.sampled_from([0, 10**10, (1 << 64) - 1]),
        models=st.lists(offers, max_size=3).map(tuple),
        links=st.lists(links, max_size=4).map(tuple),
        leaving=st.sampled_from([False, False, False, True]),
    )


fleets = st.lists(st.sampled_from(NAMES), max_size=5).flatmap(lambda names: st.tuples(*(cards(name) for name in names))).map(list)
spans = st.none() | st.builds(LayerRange, st.integers(-1, 30), st.integers(-1, 30))
requests = st.builds(
    PlanRequest,
    model=st.sampled_from(["m", "m", "d" * 64, "d" * 12, "gone", ""]),
    weights=st.sampled_from(["", "int4"]),
    prompt_tokens=st.sampled_from([0, 1, 512, 5000, 40000]),
    answer_tokens=st.sampled_from([0, 1, 256]),
    ways=st.sets(st.sampled_from(list(Way))).map(frozenset),
    pins=st.just(()) | st.lists(st.builds(Pin, st.sampled_from([*NAMES, NodeId("gone")]), spans), max_size=3).map(tuple),
    proposer=st.none() | st.sampled_from([*NAMES, NodeId("gone")]),
    acceptance=st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan]),
)


def outcome(view: list[NodeCard], request: PlanRequest) -> Plan | tuple[str, str, str]:
    try:
        return plan(view, request)
    except PlacementError as error:
        return (type(error).__name__, error.message, error.hint)


@settings(max_examples=80, deadline=None)
@given(fleets, requests, st.randoms(use_true_random=False))
def test_any_order_of_any_cards_gives_one_plan_or_one_error(view: list[NodeCard], request: PlanRequest, shuffle: random.Random) -> None:
    shuffled = list(view)
    shuffle.shuffle(shuffled)
    first, second = outcome(view, request), outcome(shuffled, request)
    assert first == second
    if isinstance(first, Plan):
        check(first, request)
        assert still_holds(first, view)


def check(made: Plan, request: PlanRequest) -> None:
    """What holds of every plan."""
    for choice in (made.chosen, *made.runners_up):
        numbers = (choice.estimate.tokens_per_s, choice.estimate.ttft_s, choice.estimate.total_s)
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert choice.way in request.ways
        assert (choice.way is Way.PIPELINE) == (len(choice.stages) > 1)
        assert (choice.way is Way.DRAFT) == (choice.draft is not None)
        assert len({stage.node_id for stage in choice.stages}) == len(choice.stages)
        end = 0
        for stage in choice.stages:
            assert stage.layers.start == end < stage.layers.stop
            end = stage.layers.stop
        if request.pins:
            assert {stage.node_id for stage in choice.stages} == {pin.node_id for pin in request.pins}
            for pin in request.pins:
                assert pin.layers in {None, *(stage.layers for stage in choice.stages if stage.node_id == pin.node_id)}
        if request.proposer is not None:
            assert choice.draft is not None
            assert choice.draft.node_id == request.proposer


strangers = cards(NodeId("zebra")).map(lambda card: replace(card, models=(), links=()))


@settings(max_examples=40, deadline=None)
@given(fleets, requests, strangers)
def test_a_machine_that_can_take_no_part_changes_nothing(view: list[NodeCard], request: PlanRequest, stranger: NodeCard) -> None:
    try:
        before = plan(view, request)
    except PlacementError as error:
        with pytest.raises(type(error)):
            plan([*view, stranger], request)
        return
    assert plan([stranger, *view], request) == before


@settings(max_examples=40, deadline=None)
@given(fleets, st.sampled_from(list(Way)), st.floats(1.0, 100.0), st.floats(1.01, 50.0))
def test_a_faster_machine_is_never_below_its_slower_twin(view: list[NodeCard], way: Way, decode: float, times: float) -> None:
    """Among all choices that differ only in which of the two runs layers or drafts; of other weights their speed would not be known."""
    others = [
        replace(card, links=(), models=tuple(replace(model, digest="d" * 64, shape=SHAPE) for model in card.models))
        for card in view
        if card.node_id not in {"ant", "bee"}
    ]
    reach = dict.fromkeys(("cat", "dog", "elk"), (0.001, 100000000.0))
    pair = [
        node("bee", offer(tokens_per_second=decode), offer(role=Role.PROPOSER, tokens_per_second=decode), free=4 * GIB, links=reach),
        node("ant", offer(tokens_per_second=decode * times), offer(role=Role.PROPOSER, tokens_per_second=decode * times), free=4 * GIB, links=reach),
    ]  # fmt: skip
    result = outcome([*others, *pair], PlanRequest("m", weights="int4", ways=frozenset({way})))
    assume(isinstance(result, Plan))
    assert isinstance(result, Plan)
    swap = {NodeId("ant"): NodeId("bee"), NodeId("bee"): NodeId("ant")}
    order = [choice.node_ids for choice in (result.chosen, *result.runners_up)]
    for place, ids in enumerate(order):
        if "bee" in ids and "ant" not in ids:
            twin = tuple(swap.get(node_id, node_id) for node_id in ids)
            assert twin in order[:place] or way is Way.PIPELINE
    if way is not Way.DRAFT:
        assert not ("bee" in order[0] and "ant" not in order[0])


# ---------------------------------------------------------------------------------------------------------- pipelines


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_of_up_to_four_machines_every_pipeline_was_looked_at(data: st.DataObject) -> None:
    names = NAMES[: data.draw(st.integers(2, 4))]
    request = PlanRequest("m", prompt_tokens=data.draw(st.sampled_from([16, 4000])), answer_tokens=64)
    view = [
        node(
            name,
            offer(tokens_per_second=data.draw(st.floats(1, 60)), prefill_tokens_per_second=data.draw(st.floats(10, 900))),
            free=data.draw(st.integers(GIB // 2, 3 * GIB)),
            links={other: (data.draw(st.floats(1e-4, 0.05)), data.draw(st.floats(1e6, 1e9))) for other in names if other != name},
        )
        for name in names
    ]
    by_id = live_cards(view)
    (group,) = groups(matching_offers(by_id, request), request)
    known = Links(by_id)
    found = pipelines(group, known, request)
    every = [
        best
        for count in range(2, len(names) + 1)
        for order in permutations(group, count)
        if (best := arranged(order, known.between, request)) is not None
    ]
    assert bool(found) == bool(every)
    if every:
        assert min(best.estimate.total_s for best in found) == min(best.estimate.total_s for best in every)


def machines(*rooms_and_rates: tuple[float, float]) -> list[object]:
    view = [
        node(NAMES[place], offer(tokens_per_second=rate), free=int(room * (SHAPE.layer_bytes + 2048 * 768) / 0.9) + 1)
        for place, (room, rate) in enumerate(rooms_and_rates)
    ]
    by_id = live_cards(view)
    request = PlanRequest("m")
    return next(iter(groups(matching_offers(by_id, request), request)))


def test_layers_go_to_the_fastest_where_only_each_token_counts() -> None:
    assert split(24, [30, 30], [2.0, 1.0], [2.0, 1.0], waits=0) == [1, 23]
    assert split(24, [30, 20], [2.0, 1.0], [2.0, 1.0], waits=0) == [4, 20]
    assert split(24, [10, 10], [2.0, 1.0], [2.0, 1.0], waits=0) == []
    assert split(24, [30, 0], [1.0, 1.0], [1.0, 1.0], waits=0) == []


def test_layers_are_shared_by_speed_where_the_slowest_stage_counts() -> None:
    assert split(24, [30, 30], [2.0, 1.0], [2.0, 1.0], waits=1000) == [8, 16]
    assert split(24, [30, 10], [2.0, 1.0], [2.0, 1.0], waits=1000) == [14, 10]
    assert split(24, [30, 30, 30], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], waits=1000) == [8, 8, 8]
    assert split(24, [30, 30], [2.0, 1.0], [2.0, 1.0], waits=1000, floor=100.0) == [1, 23]


seconds = st.floats(0.01, 10.0)
stages = st.lists(st.tuples(st.integers(0, 12), seconds, seconds), min_size=1, max_size=4)


@given(stages, st.integers(1, 12), st.integers(0, 20), st.floats(0.0, 5.0))
def test_no_split_is_better(machines: list[tuple[int, float, float]], n_layers: int, waits: int, floor: float) -> None:
    room, each, busy = (list(column) for column in zip(*machines, strict=True))

    def price(layers: tuple[int, ...] | list[int]) -> float:
        return math.fsum(map(mul, layers, each)) + waits * max(floor, *map(mul, layers, busy))

    every = [layers for layers in product(*(range(1, min(most, n_layers) + 1) for most in room)) if sum(layers) == n_layers]
    found = split(n_layers, room, each, busy, waits, floor)
    assert bool(found) == bool(every)
    if every:
        assert tuple(found) in every
        assert price(found) == pytest.approx(min(map(price, every)), rel=1e-8)


def test_the_first_stage_has_room_for_the_edges_too() -> None:
    with_edges, without = machines((10, 10), (30, 20))
    assert with_edges.holds(edges=True) == 7
    assert with_edges.holds(edges=False) == 10
    assert without.holds(edges=False) == 24


# ------------------------------------------------------------------------------------------------------- the cost model


def priced(prompt: int = 100, answer: int = 11, **changes: object) -> tuple[Plan, PlanRequest]:
    request = PlanRequest("m", prompt_tokens=prompt, answer_tokens=answer)
    return plan([node("ant", offer(shape=replace(SHAPE, kv_bytes_per_token_per_layer=0), **changes))], request), request


def test_alone_costs_what_was_measured() -> None:
    made, _ = priced()
    estimate = made.chosen.estimate
    assert estimate.tokens_per_s == pytest.approx(20.0)
    assert estimate.ttft_s == pytest.approx(100 / 200)
    assert estimate.total_s == pytest.approx(0.5 + 10 / 20)
    assert estimate.measured
    assert (estimate.latency_s, estimate.bandwidth_s) == (0, 0)


def test_what_was_not_measured_is_taken_from_the_memory_s_rate() -> None:
    made, _ = priced(tokens_per_second=0.0, prefill_tokens_per_second=0.0)
    weights = 24 * SHAPE.layer_bytes + SHAPE.edge_bytes
    assert made.chosen.estimate.tokens_per_s == pytest.approx(0.5 * 50e9 / weights)
    assert not made.chosen.estimate.measured
    assert any("not all speeds" in note for note in made.notes)


def test_kv_is_read_for_each_token() -> None:
    request = PlanRequest("m", prompt_tokens=10_000, answer_tokens=2)
    estimate = plan([node("ant", offer())], request).chosen.estimate
    assert 1 / estimate.tokens_per_s == pytest.approx(1 / 20 + 24 * 2048 * 10_001 / (0.65 * 50e9))
    rows = 10_000 * (1 / 200 + 24 * 2048 / (0.65 * 50e9) * 0.15 * (10_000 - 512) / 2)
    assert estimate.ttft_s == pytest.approx(rows)


def test_a_pipeline_s_parts() -> None:
    fleet = [
        node("ant", offer(), free=2 * GIB, links={"bee": (0.01, 1e6)}),
        node("bee", offer(), free=2 * GIB),
    ]
    request = PlanRequest("m", prompt_tokens=1024, answer_tokens=101)
    chosen = plan(fleet, request).chosen
    estimate = chosen.estimate
    token = 1 / 20 + 24 * 2048 * (1024 + 50.5) / (0.65 * 50e9) + 2 * (0.005 + 2 * 2048 / 1e6)
    assert 1 / estimate.tokens_per_s == pytest.approx(token, rel=1e-3)
    assert estimate.total_s == pytest.approx(estimate.ttft_s + 100 * token, rel=1e-3)
    assert estimate.latency_s == pytest.approx(101 * 0.01)
    chunk = 512 * 2 * 2048 / 1e6
    assert estimate.bandwidth_s >= 100 * 2 * 2 * 2048 / 1e6 + 2 * chunk * 0.99


@pytest.mark.parametrize(("acceptance", "length", "expected"), [(0.0, 7, 1.0), (1.0, 7, 8.0), (0.5, 3, 1.875)])
def test_expected_tokens_of_a_draft(acceptance: float, length: int, expected: float) -> None:
    assert cost.expected_tokens(acceptance, length) == expected


def test_a_draft_pays_where_it_is_accepted_and_not_where_it_is_not() -> None:
    fleet = [
        node("ant", offer(tokens_per_second=5.0), links={"bee": (0.001, 1e8)}),
        node("bee", ModelOffer("lookup", Role.PROPOSER, "")),
    ]
    accepted = plan(fleet, PlanRequest("m", acceptance=0.9)).chosen
    assert (accepted.way, accepted.node_ids) == (Way.DRAFT, ("ant", "bee"))
    assert plan(fleet, PlanRequest("m", acceptance=0.0)).chosen.way is Way.ALONE


def test_another_machine_drafts_rather_than_the_verifier() -> None:
    lookup = ModelOffer("lookup", Role.PROPOSER, "")
    fleet = [node("ant", offer(), lookup, links={"bee": (0.001, 1e8)}), node("bee", lookup)]
    draft = plan(fleet, PlanRequest("m", ways=frozenset({Way.DRAFT}))).chosen.draft
    assert draft is not None
    assert draft.node_id == "bee"
    alone = plan(fleet[:1], PlanRequest("m", ways=frozenset({Way.DRAFT}))).chosen
    assert alone.node_ids == ("ant",)


# ----------------------------------------------------------------------------------------------------- what keeps a plan


def draft_fleet() -> list[NodeCard]:
    return [node("ant", offer(), links={"bee": (0.001, 1e8)}), node("bee", ModelOffer("lookup", Role.PROPOSER, ""))]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"leaving": True}, "ant is gone"),
        ({"instance": b"other"}, "ant started anew"),
        ({"models": ()}, "ant no longer has m"),
        ({"models": (offer(numerics_id="o"),)}, "ant computes other bytes"),
        ({"models": (offer(digest="f" * 64),)}, "ant no longer has m"),
        ({"memory_free_bytes": 0, "links": ()}, None),
        ({"models": (offer(tokens_per_second=1.0, warm=True),)}, None),
    ],
)
def test_a_request_keeps_its_plan_unless_it_breaks(change: dict[str, object], reason: str | None) -> None:
    ant, bee = draft_fleet()
    kept = plan([ant, bee], PlanRequest("m", acceptance=0.9))
    broken = why_broken(kept, [replace(ant, **change), bee])
    assert (broken is None) == (reason is None)
    assert still_holds(kept, [replace(ant, **change), bee]) == (reason is None)
    assert reason is None or reason in str(broken)


@pytest.mark.parametrize("change", [{"leaving": True}, {"instance": b"other"}, {"models": ()}])
def test_a_drafting_machine_is_part_of_the_plan(change: dict[str, object]) -> None:
    ant, bee = draft_fleet()
    kept = plan([ant, bee], PlanRequest("m", acceptance=0.9))
    assert "bee" in str(why_broken(kept, [ant, replace(bee, **change)]))


def test_a_better_machine_breaks_no_plan() -> None:
    fleet = [node("ant", offer())]
    kept = plan(fleet, PlanRequest("m"))
    better = [*fleet, node("bee", offer(tokens_per_second=900.0))]
    assert still_holds(kept, better)
    assert plan(better, PlanRequest("m")).chosen.node_ids == ("bee",)


# -------------------------------------------------------------------------------------------------------------- the rest


def test_memory_binds_where_a_faster_machine_lacks_it() -> None:
    made = plan([node("ant", offer()), node("bee", offer(tokens_per_second=90.0), free=GIB)], PlanRequest("m"))
    assert made.chosen.node_ids == ("ant",)
    assert made.constraint is Constraint.MEMORY
    assert made.because.startswith("bee alone would do")


def test_a_warm_model_has_its_memory_already() -> None:
    assert plan([node("ant", offer(warm=True), free=0)], PlanRequest("m")).chosen.way is Way.ALONE
    with pytest.raises(PlacementError, match="needs") as caught:
        plan([node("ant", offer(), free=0)], PlanRequest("m"))
    assert caught.value.constraint == Constraint.MEMORY


def test_weights_that_nobody_could_name_are_not_shared() -> None:
    fleet = [node("ant", offer(digest=""), free=2 * GIB, links={"bee": (0.001, 1e8)}), node("bee", offer(digest=""), free=2 * GIB)]
    with pytest.raises(PlacementError):
        plan(fleet, PlanRequest("m"))


def test_the_same_weights_under_another_name_are_the_same() -> None:
    fleet = [
        node("ant", offer(), free=2 * GIB, links={"bee": (0.001, 1e8)}),
        node("bee", offer(model_id="my-copy"), free=2 * GIB),
    ]
    assert plan(fleet, PlanRequest("m")).chosen.way is Way.PIPELINE


def test_a_newer_card_of_a_node_counts() -> None:
    old, new = node("ant", offer()), replace(node("ant"), version=2)
    with pytest.raises(PlacementError):
        plan([new, old], PlanRequest("m"))


def test_an_impossible_pin_is_no_silent_fallback() -> None:
    fleet = [node("ant", offer()), node("bee", offer(), free=GIB)]
    with pytest.raises(ImpossiblePin, match=r"bee is pinned, but needs") as caught:
        plan(fleet, PlanRequest("m", pins=(Pin(NodeId("bee")),)))
    assert caught.value.constraint == Constraint.MEMORY
