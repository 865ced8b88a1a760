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
from tests.sampling import examples

from paceline.core.errors import ImpossiblePin, PlacementError
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange
from paceline.fleet.card import Device, Link, ModelOffer, ModelShape, NodeCard, Role, ShardState
from paceline.fleet.machines import DECODE_SHARE, FREE_SHARE, Links, free_for_layers, groups, live_cards, matching_offers, stage_machines
from paceline.fleet.placement import explain
from paceline.fleet.placement import figures as figures_of
from paceline.fleet.plan import ALONE, Constraint, Objective, Pin, Plan, PlanRequest, Way
from paceline.node.ways import WAYS, plan
from paceline.ways.draft.price import DRAFT, expected_tokens
from paceline.ways.pipeline.splits import PIPELINE, arranged, balanced, pipelines, split
from paceline.ways.tensor.price import TENSOR

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
        row_bytes=st.integers(0, 1 << 32),
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
        serves_shards=st.booleans(),
        shard_memory_bytes=st.sampled_from([0, GIB, (1 << 64) - 1]),
    )


fleets = st.lists(st.sampled_from(NAMES), max_size=5).flatmap(lambda names: st.tuples(*(cards(name) for name in names))).map(list)
spans = st.none() | st.builds(LayerRange, st.integers(-1, 30), st.integers(-1, 30))
requests = st.builds(
    PlanRequest,
    model=st.sampled_from(["m", "m", "d" * 64, "d" * 12, "gone", ""]),
    weights=st.sampled_from(["", "int4"]),
    prompt_tokens=st.sampled_from([0, 1, 512, 5000, 40000]),
    answer_tokens=st.sampled_from([0, 1, 256]),
    ways=st.sets(st.sampled_from([each.way for each in WAYS])).map(frozenset),
    pins=st.just(()) | st.lists(st.builds(Pin, st.sampled_from([*NAMES, NodeId("gone")]), spans), max_size=3).map(tuple),
    proposer=st.none() | st.sampled_from([*NAMES, NodeId("gone")]),
    acceptance=st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.0, math.nan]),
    objective=st.sampled_from(Objective),
    streams=st.sampled_from([1, 1, 2, 16, 0, 1 << 40]),
    orchestrator=st.none() | st.sampled_from([*NAMES, NodeId("gone")]),
    exclude=st.sets(st.sampled_from(NAMES), max_size=1).map(frozenset),
    min_host_trust=st.sampled_from(Trust),
    numerics_id=st.sampled_from(["", "", "n"]),
)


def outcome(view: list[NodeCard], request: PlanRequest) -> Plan | tuple[str, str, str]:
    try:
        return plan(view, request)
    except PlacementError as error:
        return (type(error).__name__, error.message, error.hint)


@settings(max_examples=examples(80), deadline=None)
@given(fleets, requests, st.randoms(use_true_random=False))
def test_any_order_of_any_cards_gives_one_plan_or_one_error(view: list[NodeCard], request: PlanRequest, shuffle: random.Random) -> None:
    shuffled = list(view)
    shuffle.shuffle(shuffled)
    first, second = outcome(view, request), outcome(shuffled, request)
    assert first == second
    if isinstance(first, Plan):
        check(first, request)


def check(made: Plan, request: PlanRequest) -> None:
    """What holds of every plan."""
    for choice in (made.chosen, *made.runners_up):
        numbers = (choice.estimate.tokens_per_s, choice.estimate.ttft_s, choice.estimate.total_s)
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert choice.way in request.ways
        assert (choice.way == PIPELINE) == (len(choice.stages) > 1)
        assert (choice.way == DRAFT) == (choice.draft is not None)
        assert len({stage.node_id for stage in choice.stages}) == len(choice.stages)
        assert not request.exclude & set(choice.node_ids)
        if choice.way == PIPELINE:
            assert request.orchestrator in {None, choice.stages[0].node_id}
        end = 0
        for place, stage in enumerate(choice.stages):
            empty = place == 0 and request.orchestrator is not None and choice.way == PIPELINE
            assert stage.layers.start == end <= stage.layers.stop - (not empty)
            end = stage.layers.stop
        if request.pins:
            heads = set() if choice.way != PIPELINE or request.orchestrator is None else {request.orchestrator}
            assert {stage.node_id for stage in choice.stages} - heads == {pin.node_id for pin in request.pins} - heads
            for pin in request.pins:
                assert pin.layers in {None, *(stage.layers for stage in choice.stages if stage.node_id == pin.node_id)}
        if request.proposer is not None:
            assert choice.draft is not None
            assert choice.draft.node_id == request.proposer


strangers = cards(NodeId("zebra")).map(lambda card: replace(card, models=(), links=()))


@settings(max_examples=examples(40), deadline=None)
@given(fleets, requests, strangers)
def test_a_machine_that_can_take_no_part_changes_nothing(view: list[NodeCard], request: PlanRequest, stranger: NodeCard) -> None:
    try:
        before = plan(view, request)
    except PlacementError as error:
        with pytest.raises(type(error)):
            plan([*view, stranger], request)
        return
    assert plan([stranger, *view], request) == before


@settings(max_examples=examples(40), deadline=None)
@given(fleets, st.sampled_from([each.way for each in WAYS]), st.floats(1.0, 100.0), st.floats(1.01, 50.0))
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
            assert twin in order[:place] or way == PIPELINE
    if way != DRAFT:
        assert not ("bee" in order[0] and "ant" not in order[0])


# ---------------------------------------------------------------------------------------------------------- pipelines


@settings(max_examples=examples(40), deadline=None)
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
    found = pipelines(group, known.between, request)
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


@given(
    st.lists(st.tuples(st.integers(0, 12), seconds, st.sampled_from([0, 1])), min_size=1, max_size=4), st.integers(0, 12), st.floats(0, 20)
)
def test_no_slowest_stage_is_faster(machines: list[tuple[int, float, int]], n_layers: int, edge: float) -> None:
    room, layer, least = (list(column) for column in zip(*machines, strict=True))
    extra = [edge, *(0.0 for _ in machines[1:])]

    def slowest(layers: tuple[int, ...] | list[int]) -> float:
        return max(n * each + more for n, each, more in zip(layers, layer, extra, strict=True))

    ranges = (range(fewest, min(most, n_layers) + 1) for fewest, most in zip(least, room, strict=True))
    every = [layers for layers in product(*ranges) if sum(layers) == n_layers]
    found = balanced(n_layers, room, layer, extra, least)
    assert bool(found) == bool(every)
    if every:
        assert tuple(found) in every
        best = min(map(slowest, every))
        assert slowest(found) == pytest.approx(best, rel=1e-8)
        assert math.fsum(map(mul, found, layer)) <= min(math.fsum(map(mul, each, layer)) for each in every if slowest(each) <= best) * (
            1 + 1e-8
        )


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.sampled_from(Objective), st.sampled_from([1, 3, 16]))
def test_no_split_of_a_pipeline_is_better_even_where_its_head_may_run_no_layers(
    data: st.DataObject, objective: Objective, streams: int
) -> None:
    shape = replace(SHAPE, n_layers=data.draw(st.integers(1, 9)), edge_bytes=data.draw(st.sampled_from([0, 300 << 20, 2 * GIB])))
    names = NAMES[: data.draw(st.integers(2, 3))]
    request = PlanRequest(
        "m",
        prompt_tokens=data.draw(st.sampled_from([16, 4000])),
        answer_tokens=64,
        orchestrator=names[0],
        objective=objective,
        streams=streams,
    )
    view = [
        node(
            name,
            offer(shape=shape, tokens_per_second=data.draw(st.floats(1, 60)), prefill_tokens_per_second=data.draw(st.floats(10, 900))),
            free=data.draw(st.integers(0, 3 * GIB)),
            links={other: (0.001, 1e8) for other in names if other != name},
            serves_shards=True,
            shard_memory_bytes=data.draw(st.integers(0, 3 * GIB)),
        )
        for name in names
    ]
    by_id = live_cards(view)
    (group,) = groups(matching_offers(by_id, request), request)
    order = stage_machines(group, request)
    assert [machine.node_id for machine in order] == names
    link = Links(by_id).between
    room = [machine.holds(edges=place == 0) for place, machine in enumerate(order)]
    ranges = (range(place > 0, most + 1) for place, most in enumerate(room))
    every = [layers for layers in product(*ranges) if sum(layers) == shape.n_layers and order[0].holds_edges]
    found = arranged(order, link, request)
    assert (found is not None) == bool(every)
    if found is not None:
        assert found.layers in every
        if objective is Objective.LATENCY:
            priced_all = [arranged(order, link, request, layers) for layers in every]
            assert found.estimate.total_s == pytest.approx(min(each.estimate.total_s for each in priced_all if each is not None), rel=1e-8)
        for place, (machine, n) in enumerate(zip(order, found.layers, strict=True)):
            kv = 2048 * (request.prompt_tokens + 64) * streams
            least = n * (shape.layer_bytes + kv) + (shape.edge_bytes if place == 0 else 0)
            assert least <= machine.card.memory_free_bytes
            assert place == 0 or least <= machine.card.shard_memory_bytes


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


def test_streams_side_by_side_read_the_weights_once() -> None:
    view = [node("ant", offer(shape=replace(SHAPE, kv_bytes_per_token_per_layer=0)))]
    request = PlanRequest("m", prompt_tokens=100, answer_tokens=11, objective=Objective.THROUGHPUT, streams=16, ways=frozenset({ALONE}))
    estimate = plan(view, request).chosen.estimate
    layers = 24 * SHAPE.layer_bytes
    row = (1 + SHAPE.edge_bytes / layers) / 200
    assert estimate.tokens_per_s == pytest.approx(16 / (1 / 20 + 15 * row))
    assert estimate.ttft_s == pytest.approx(16 * 100 / 200)
    one = replace(request, streams=1)
    assert plan(view, one).chosen == plan(view, replace(one, objective=Objective.LATENCY)).chosen


def test_the_slowest_stage_sets_the_pace_unless_the_way_is_longer() -> None:
    """Two like machines: with a link that costs nothing two batches keep both at work; with a slow one each batch waits for its own way."""
    shape = replace(SHAPE, kv_bytes_per_token_per_layer=0, edge_bytes=0)
    request = PlanRequest("m", prompt_tokens=16, answer_tokens=101, objective=Objective.THROUGHPUT, streams=16, ways=frozenset({PIPELINE}))
    batch = 12 / 24 * (1 / 20 + 7 / 200)  # of half the layers and half the streams
    for rtt, expected in ((1e-7, 2 * batch), (1.0, 2 * batch + 1.0)):
        view = [
            node("ant", offer(shape=shape), links={"bee": (rtt, 1e15)}),
            node("bee", offer(shape=shape)),
        ]
        chosen = plan(view, request).chosen
        assert [len(stage.layers) for stage in chosen.stages] == [12, 12]
        assert chosen.estimate.tokens_per_s == pytest.approx(16 / expected, rel=1e-5)


@pytest.mark.parametrize(("acceptance", "length", "expected"), [(0.0, 7, 1.0), (1.0, 7, 8.0), (0.5, 3, 1.875)])
def test_expected_tokens_of_a_draft(acceptance: float, length: int, expected: float) -> None:
    assert expected_tokens(acceptance, length) == expected


def test_a_draft_pays_where_it_is_accepted_and_not_where_it_is_not() -> None:
    fleet = [
        node("ant", offer(tokens_per_second=5.0), links={"bee": (0.001, 1e8)}),
        node("bee", offer(model_id="small", role=Role.PROPOSER, tokens_per_second=1000.0)),
    ]
    accepted = plan(fleet, PlanRequest("m", acceptance=0.9)).chosen
    assert (accepted.way, accepted.node_ids) == (DRAFT, ("ant", "bee"))
    assert plan(fleet, PlanRequest("m", acceptance=0.0)).chosen.way == ALONE


def test_another_machine_drafts_rather_than_the_verifier() -> None:
    small = offer(model_id="small", role=Role.PROPOSER, tokens_per_second=1000.0)
    fleet = [node("ant", offer(), small, links={"bee": (0.001, 1e8)}), node("bee", small)]
    draft = plan(fleet, PlanRequest("m", ways=frozenset({DRAFT}))).chosen.draft
    assert draft is not None
    assert draft.node_id == "bee"
    alone = plan(fleet[:1], PlanRequest("m", ways=frozenset({DRAFT}))).chosen
    assert alone.node_ids == ("ant",)


# -------------------------------------------------------------------------------------------------------------- the rest


def test_memory_binds_where_a_faster_machine_lacks_it() -> None:
    made = plan([node("ant", offer()), node("bee", offer(tokens_per_second=90.0), free=GIB)], PlanRequest("m"))
    assert made.chosen.node_ids == ("ant",)
    assert made.constraint is Constraint.MEMORY
    assert made.because.startswith("bee alone would do")


def test_a_warm_model_has_its_memory_already() -> None:
    assert plan([node("ant", offer(warm=True), free=0)], PlanRequest("m")).chosen.way == ALONE
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
    assert plan(fleet, PlanRequest("m")).chosen.way == PIPELINE


def test_a_newer_card_of_a_node_counts() -> None:
    old, new = node("ant", offer()), replace(node("ant"), version=2)
    with pytest.raises(PlacementError):
        plan([new, old], PlanRequest("m"))


def test_an_impossible_pin_is_no_silent_fallback() -> None:
    fleet = [node("ant", offer()), node("bee", offer(), free=GIB)]
    with pytest.raises(ImpossiblePin, match=r"bee is pinned, but needs") as caught:
        plan(fleet, PlanRequest("m", pins=(Pin(NodeId("bee")),)))
    assert caught.value.constraint == Constraint.MEMORY


@pytest.mark.parametrize("pins", [(Pin(NodeId("ant")), Pin(NodeId("bee"))), (Pin(NodeId("ant"), LayerRange(0, 12)), Pin(NodeId("bee")))])
@pytest.mark.parametrize("ways", [{ALONE}, {ALONE, TENSOR}, {TENSOR, DRAFT}])
def test_several_pinned_machines_need_a_way_that_takes_pins(ways: set[Way], pins: tuple[Pin, ...]) -> None:
    with pytest.raises(ImpossiblePin, match="only a pipeline"):
        plan(sharing(), PlanRequest("m", ways=frozenset(ways), pins=pins))


def test_pinned_machines_may_share_layers_if_no_other_way_is_allowed() -> None:
    with pytest.raises(ImpossiblePin, match="Tensor ranks"):
        plan(sharing(), PlanRequest("m", ways=frozenset({TENSOR}), pins=(Pin(NodeId("ant"), LayerRange(0, 12)), Pin(NodeId("bee")))))


# ----------------------------------------------------------------------------------------------------------- orchestrators


def sharing(**changes: dict[str, object]) -> list[NodeCard]:
    """Three machines that hold half the model each; changes by name."""
    others = {"ant": ("bee", "cat"), "bee": ("ant", "cat"), "cat": ("ant", "bee")}
    return [
        replace(
            node(name, offer(), free=2 * GIB, links=dict.fromkeys(to, (0.001, 1e8)), serves_shards=True, shard_memory_bytes=2 * GIB),
            **changes.get(name, {}),
        )
        for name, to in others.items()
    ]


ORCHESTRATED = PlanRequest("m", ways=frozenset({PIPELINE}), orchestrator=NodeId("ant"))


def test_that_files_are_still_being_read_is_said() -> None:
    ant = node("ant", offer(digest=""), free=1 << 20, serves_shards=True, shard_memory_bytes=1 << 20)
    with pytest.raises(PlacementError) as refused:
        plan([ant, node("bee", serves_shards=True)], PlanRequest("m"))
    assert "Its files are still being read on ant" in refused.value.hint


@pytest.mark.parametrize("known", ["", "d1"], ids=["by no machine", "by one of two"])
def test_that_files_are_still_being_read_is_said_to_who_pins_machines(known: str) -> None:
    ant = node("ant", offer(digest=known), serves_shards=True)
    with pytest.raises(ImpossiblePin, match=r"is pinned, and can't share m yet") as refused:
        plan([ant, node("bee", offer(digest=""), serves_shards=True)], PlanRequest("m", pins=(Pin(NodeId("ant")), Pin(NodeId("bee")))))
    assert f"Its files are still being read on {'bee' if known else 'ant'}" in refused.value.hint


def test_a_file_that_no_node_was_told_of_is_said_to_be_one() -> None:
    with pytest.raises(PlacementError, match=r"No machine that is seen here has the model 'big.gguf'") as refused:
        plan(sharing(), PlanRequest("big.gguf"))
    assert refused.value.hint.startswith("Offered: m. ")
    assert "paceline up --model" in refused.value.hint


def test_an_orchestrator_goes_first_even_where_it_holds_nothing_but_the_edges() -> None:
    made = plan(sharing(ant={"memory_free_bytes": SHAPE.edge_bytes * 6 // 5}), ORCHESTRATED)
    assert made.chosen.stages[0].node_id == "ant"
    assert made.chosen.stages[0].layers == LayerRange(0, 0)
    assert made.chosen.stages[-1].layers.stop == 24
    assert "ant [embedding and head] -> " in next(line for line in explain(made) if line.startswith("plan: "))


@pytest.mark.parametrize(
    ("change", "request_change"),
    [
        ({"serves_shards": False}, {}),
        ({"shard_memory_bytes": 0}, {}),
        ({}, {"exclude": frozenset({NodeId("bee")})}),
        ({}, {"min_host_trust": Trust.MEMBER}),
        ({"models": (offer(numerics_id="o"),)}, {"numerics_id": "n"}),
    ],
)
def test_who_may_not_hold_layers_for_others_holds_none(change: dict[str, object], request_change: dict[str, object]) -> None:
    trust = {NodeId("bee"): Trust.GUEST, NodeId("ant"): Trust.GUEST}
    before = plan(sharing(), ORCHESTRATED, trust)
    assert any("bee" in choice.node_ids for choice in (before.chosen, *before.runners_up))
    made = plan(sharing(bee=change), replace(ORCHESTRATED, **request_change), trust)
    assert [choice.node_ids for choice in (made.chosen, *made.runners_up)] == [("ant", "cat")]


@pytest.mark.parametrize("exact", [False, True])
def test_unlike_machines_share_layers_unless_the_request_is_exact(*, exact: bool) -> None:
    made = plan(sharing(bee={"models": (offer(numerics_id="o"),)}), replace(ORCHESTRATED, exact=exact))
    found = [made.chosen, *made.runners_up]
    assert any(choice.is_unlike for choice in found) != exact
    assert any(not choice.is_unlike for choice in found)
    assert any("unlike machines" in note for note in made.notes) == made.chosen.is_unlike


@pytest.mark.parametrize("numerics_id", ["n", "o"])
def test_an_exact_plan_says_what_it_costs(numerics_id: str) -> None:
    faster = offer(tokens_per_second=400.0, prefill_tokens_per_second=9000.0, numerics_id=numerics_id)
    view = sharing(bee={"models": (faster,)})
    fastest, exact = plan(view, ORCHESTRATED), plan(view, replace(ORCHESTRATED, exact=True))
    (note,) = [note for note in exact.notes if "--exact" in note]
    costs = fastest.chosen.estimate.total_s < exact.chosen.estimate.total_s
    assert ("costs nothing" in note) != costs
    assert costs == fastest.chosen.is_unlike
    assert not costs or figures_of(fastest.chosen) in note


def test_a_holder_that_promises_no_bytes_is_in_no_exact_plan() -> None:
    foreign, own = node("ant", offer(warm=True, numerics_id="", tokens_per_second=90.0)), node("bee", offer(warm=True))
    request = PlanRequest("m", exact=True)
    assert plan((foreign, own), request).chosen.node_ids == ("bee",)
    assert plan((foreign, own), replace(request, exact=False)).chosen.node_ids == ("ant",)
    with pytest.raises(PlacementError, match="promises"):
        plan((foreign,), request)


@pytest.mark.parametrize("digest", ["d" * 64, ""])
def test_what_machines_could_do_that_compute_other_bytes_is_said(digest: str) -> None:
    """Also of one that knows of its own weights no digest yet, and has layers of others'."""
    shard = offer(role=Role.SHARD, numerics_id="o", warm=True, shard=ShardState(LayerRange(12, 24), 4))
    other: dict[str, object] = {"models": (offer(numerics_id="o", digest=digest), shard)}
    with pytest.raises(PlacementError) as refused:
        plan(sharing(bee=other, cat=other), replace(ORCHESTRATED, numerics_id="n", orchestrator_layers=12, exact=True))
    assert refused.value.hint == "Machines that compute other bytes than one another could share it: leave out --exact."


def test_a_machine_that_has_run_layers_is_known_by_their_bytes() -> None:
    shard = offer(role=Role.SHARD, numerics_id="o", warm=True, shard=ShardState(LayerRange(12, 24), 4))
    view = sharing(bee={"models": (offer(numerics_id=""), shard)}, cat={"serves_shards": False})
    assert plan(view, ORCHESTRATED).chosen.is_unlike
    with pytest.raises(PlacementError):
        plan(view, replace(ORCHESTRATED, exact=True))


def test_an_orchestrator_alone_says_what_is_missing() -> None:
    view = sharing(bee={"serves_shards": False}, cat={"serves_shards": False})
    with pytest.raises(PlacementError, match=r"No other machines serve shards of it now: start them"):
        plan(view, ORCHESTRATED)
    with pytest.raises(PlacementError, match="No other machines that are trusted enough serve"):
        plan(sharing(), replace(ORCHESTRATED, min_host_trust=Trust.TRUSTED))
    with pytest.raises(PlacementError, match="gone is to orchestrate and is not in the fleet"):
        plan(view, replace(ORCHESTRATED, orchestrator=NodeId("gone")))


def test_pins_leave_the_orchestrator_first() -> None:
    bee, cat = Pin(NodeId("bee")), Pin(NodeId("cat"), LayerRange(0, 12))
    chosen = plan(sharing(), replace(ORCHESTRATED, pins=(bee, cat))).chosen
    assert [(stage.node_id, stage.layers) for stage in chosen.stages] == [
        ("ant", LayerRange(0, 0)),
        ("cat", LayerRange(0, 12)),
        ("bee", LayerRange(12, 24)),
    ]
    both = plan(sharing(), replace(ORCHESTRATED, pins=(bee, Pin(NodeId("ant"))))).chosen
    assert both.node_ids == ("ant", "bee")
    alone = plan(sharing(bee={"memory_free_bytes": 8 * GIB, "shard_memory_bytes": 8 * GIB}), replace(ORCHESTRATED, pins=(bee,))).chosen
    assert [stage.layers for stage in alone.stages] == [LayerRange(0, 0), LayerRange(0, 24)]


def test_layers_that_an_orchestrator_keeps_are_pinned_to_it() -> None:
    bee, cat = Pin(NodeId("bee"), LayerRange(6, 15)), Pin(NodeId("cat"), LayerRange(15, 24))
    asked = replace(ORCHESTRATED, orchestrator_layers=6, pins=(bee, cat))
    spans = [(stage.node_id, stage.layers) for stage in plan(sharing(), asked).chosen.stages]
    assert spans == [("ant", LayerRange(0, 6)), ("bee", LayerRange(6, 15)), ("cat", LayerRange(15, 24))]
    free = plan(sharing(), replace(asked, pins=(Pin(NodeId("bee")), cat))).chosen
    assert [len(stage.layers) for stage in free.stages] == [6, 9, 9]


@pytest.mark.parametrize(
    ("change", "request_change", "why"),
    [
        ({"serves_shards": False}, {}, "serves no shards now"),
        ({}, {"min_host_trust": Trust.MEMBER}, "is not trusted enough"),
        ({"models": (offer(numerics_id="o"),)}, {"numerics_id": "n"}, "computes other bytes"),
    ],
)
def test_why_a_pinned_machine_holds_no_layers_is_said(change: dict[str, object], request_change: dict[str, object], why: str) -> None:
    asked = replace(ORCHESTRATED, pins=(Pin(NodeId("bee")), Pin(NodeId("cat"))), **request_change)
    with pytest.raises(ImpossiblePin, match=f"^bee is pinned, but {why}"):
        plan(sharing(bee=change), asked, {NodeId("bee"): Trust.GUEST})


def test_loaded_layers_are_no_whole_model_but_make_a_stage_warm() -> None:
    loaded = offer(role=Role.SHARD, warm=True, shard=ShardState(LayerRange(0, 24), 4))
    view = sharing(bee={"models": (offer(), loaded)}, cat={"models": (loaded,)})
    stages = plan(view, ORCHESTRATED).chosen.stages
    assert [(stage.node_id, stage.warm) for stage in stages] == [("ant", False), ("bee", True)]
    fetched = plan(view, replace(ORCHESTRATED, exclude=frozenset({NodeId("bee")}))).chosen
    assert fetched.stages[1].fetch_from == "ant"
    assert fetched.stages[1].fetch_bytes == len(fetched.stages[1].layers) * SHAPE.layer_bytes
    assert fetched.estimate.measured


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("held", [0, 5, 9])
def test_an_orchestrator_that_has_loaded_layers_runs_exactly_those(objective: Objective, held: int) -> None:
    request = replace(ORCHESTRATED, objective=objective, orchestrator_layers=held)
    made = plan(sharing(), request)
    for choice in (made.chosen, *made.runners_up):
        assert choice.stages[0].node_id == "ant"
        assert len(choice.stages[0].layers) == held
        assert choice.stages[-1].layers.stop == SHAPE.n_layers


@pytest.mark.parametrize("asked", [PlanRequest("m", prompt_tokens=100, answer_tokens=28), PlanRequest("m", kv_tokens=4096, rows=800)])
def test_a_stage_has_room_for_the_rows_of_a_batch_and_the_least_kv(asked: PlanRequest) -> None:
    heavy = replace(SHAPE, row_bytes=100_000)
    card = node("ant", offer(shape=heavy), serves_shards=True, shard_memory_bytes=GIB)
    machine = replace(groups([(card, card.models[0])], asked)[0][0], room_bytes=GIB)
    kv = 2048 * max(asked.prompt_tokens + asked.answer_tokens, asked.kv_tokens)
    fits = (GIB - asked.rows * 100_000) // (heavy.layer_bytes + kv)
    assert machine.holds(edges=False) == fits == {512: 9, 800: 8}[asked.rows]
    assert machine.needs(fits, edges=False) <= GIB < machine.needs(fits + 1, edges=False)


# ---------------------------------------------------------------------------------------------------- a GPU beside processors

PROCESSORS = Device("cpu-avx512bf16", "some processor", 16 * GIB, 2 * GIB, 50 * 10**9, 2 * GIB, ("int4", "stored"))


def with_gpu(name: str, *offers: ModelOffer, **more: object) -> NodeCard:
    """Its card names a GPU that runs bf16; other formats run on its processors."""
    return node(
        name, *offers, free=24 * GIB, memory_bytes_per_s=900 * 10**9, backend="torch-cuda", serves_shards=True,
        shard_memory_bytes=20 * GIB, devices=(PROCESSORS,), links={"ant": (1e-4, 1e9), "bee": (1e-4, 1e9)}, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("weights", "room", "rate"), [("bf16", 24 * GIB, 900e9), ("int4", 2 * GIB, 50e9)])
def test_a_machine_is_planned_with_the_device_that_runs_the_format(weights: str, room: int, rate: float) -> None:
    card = with_gpu("ant", offer(weights=weights, tokens_per_second=0.0, prefill_tokens_per_second=0.0))
    ((machine,),) = groups(matching_offers({card.node_id: card}, PlanRequest("m")), PlanRequest("m"))
    assert machine.room_bytes == int(room * FREE_SHARE)
    whole = SHAPE.n_layers * SHAPE.layer_bytes + SHAPE.edge_bytes
    assert whole / (rate * DECODE_SHARE) <= machine.token_s < 1.2 * whole / (rate * DECODE_SHARE)


def test_a_pipeline_gives_a_machine_with_a_gpu_no_more_layers_than_its_processors_hold() -> None:
    here = node("ant", offer(), free=GIB, links={"bee": (1e-4, 1e9)})
    there = with_gpu("bee", offer())
    there = replace(there, devices=(replace(PROCESSORS, memory_free_bytes=GIB, shard_memory_bytes=GIB),))
    request = PlanRequest("m", ways=frozenset({PIPELINE}), orchestrator=NodeId("ant"), prompt_tokens=16, answer_tokens=16)
    with pytest.raises(PlacementError):  # 24 layers of 100 MiB and edges are 2.6 GiB, and 0.9 are to be had on each
        plan([here, there], request)
    enough = replace(there, devices=(replace(PROCESSORS, memory_free_bytes=3 * GIB, shard_memory_bytes=3 * GIB),))
    assert sum(len(stage.layers) for stage in plan([here, enough], request).chosen.stages) == 24


def test_what_is_idle_on_a_gpu_makes_no_room_on_processors() -> None:
    idle = ModelOffer("other", Role.SHARD, "bf16", warm=True, shard=ShardState(LayerRange(0, 4), 4, memory_bytes=9 * GIB))
    for weights, more in (("int4", 0), ("bf16", 9 * GIB)):
        cards = [node("ant", offer(weights=weights)), replace(with_gpu("bee"), models=(offer(weights=weights), idle))]
        request = PlanRequest("m", orchestrator=NodeId("ant"))
        (group,) = groups(matching_offers({card.node_id: card for card in cards}, request), request)
        host = stage_machines(group, request)[1]
        assert host.room_bytes == free_for_layers(host.card) + more
