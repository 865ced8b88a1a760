"""Who runs a pipeline's layers where a person pinned machines, and after one of them is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.errors import ShardUnavailable, WeightsMismatch
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role, ShardState
from paceline.fleet.placement import plan
from paceline.fleet.plan import Pin, PlanRequest
from paceline.ways.pipeline.order import typical_request
from paceline.ways.pipeline.price import Pipelined
from paceline.ways.pipeline.routes.fleet_access import Wanted, choose
from paceline.ways.pipeline.splits import PIPELINE

GIB = 1 << 30
SHAPE = ModelShape(
    n_layers=24, hidden=2048, layer_bytes=100 << 20, edge_bytes=300 << 20, kv_bytes_per_token_per_layer=2048, max_context=32768
)
OFFER = ModelOffer("m", Role.VERIFIER, "int4", 20.0, 200.0, "d" * 64, numerics_id="n", shape=SHAPE, vocabulary="v")
NAMES = ("own", "bee", "cat", "dog")
OWN, BEE, CAT, DOG = map(NodeId, NAMES)
CARDS = [
    NodeCard(
        NodeId(name), 1, (f"{name}:1",), name.encode(), 120, 0, backend="cpu", serves_shards=True, shard_memory_bytes=8 * GIB, memory_total_bytes=16 * GIB, memory_free_bytes=8 * GIB,
        memory_bytes_per_s=50 * 10**9, models=(OFFER,),
        links=tuple(Link(NodeId(to), f"{to}:1", 0.001, 1e9) for to in NAMES if to != name),
    )
    for name in NAMES
]  # fmt: skip
REQUEST = PlanRequest(
    "d" * 64,
    "int4",
    ways=frozenset({PIPELINE}),
    orchestrator=OWN,
    orchestrator_layers=8,
    min_host_trust=Trust.MEMBER,
    numerics_id="n",
    called="m",
)
FREE = Wanted(REQUEST, LayerRange(8, 24))
PINNED = Wanted(
    replace(REQUEST, pins=(Pin(OWN, LayerRange(0, 8)), Pin(BEE, LayerRange(8, 14)), Pin(CAT, LayerRange(14, 24)))), LayerRange(8, 24)
)


def test_pins_are_kept() -> None:
    found = choose(CARDS, {}, PINNED, frozenset())
    assert found == [LayerSpan(BEE, LayerRange(8, 14)), LayerSpan(CAT, LayerRange(14, 24))]


@pytest.mark.parametrize("gone", [BEE, CAT])
def test_where_a_pinned_machine_is_lost_others_go_on(gone: NodeId) -> None:
    for cards, exclude in ((CARDS, frozenset({gone})), ([card for card in CARDS if card.node_id != gone], frozenset[NodeId]())):
        found = choose(cards, {}, PINNED, exclude)
        assert gone not in {part.node_id for part in found}
        assert found[0].layers.start == 8
        assert found[-1].layers.stop == 24


def test_where_nobody_is_left_that_is_said() -> None:
    lonely = [replace(CARDS[0], links=())]
    with pytest.raises(ShardUnavailable) as caught:
        choose(lonely, {}, PINNED, frozenset({BEE, CAT, DOG}))
    assert "No machine can run m," in caught.value.message, "people know the model by its name, not by its digest"


def test_other_weights_that_somebody_runs_are_in_nobodys_way() -> None:
    shard = replace(OFFER, role=Role.SHARD, weights="int8", warm=True, shard=ShardState(LayerRange(8, 24), 4))
    cards = [replace(card, models=(OFFER, shard)) if card.node_id == BEE else card for card in CARDS]
    assert choose(cards, {}, FREE, frozenset())[-1].layers.stop == 24
    with pytest.raises(WeightsMismatch, match="m:8-23 on bee"):
        choose([replace(card, shard_memory_bytes=1) for card in cards], {}, FREE, frozenset())


LAST = [LayerSpan(BEE, LayerRange(8, 14)), LayerSpan(CAT, LayerRange(14, 24))]


@pytest.mark.parametrize(("gone", "left"), [(BEE, CAT), (CAT, BEE)])
def test_those_of_a_route_that_are_left_keep_their_layers(gone: NodeId, left: NodeId) -> None:
    """They have no memory for others: it holds the layers they have."""
    full = [replace(card, shard_memory_bytes=0) if card.node_id == left else card for card in CARDS]
    found = choose(full, {}, FREE, frozenset({gone}), LAST)
    assert found == [LayerSpan(DOG if part.node_id == gone else part.node_id, part.layers) for part in LAST]


def test_those_that_are_left_keep_their_layers_though_one_shard_could_run_all() -> None:
    """They have the KV of what goes on."""
    shard = replace(OFFER, role=Role.SHARD, warm=True, shard=ShardState(LayerRange(8, 24), 4))
    cards = [replace(card, models=(OFFER, shard)) if card.node_id == DOG else card for card in CARDS]
    found = choose(cards, {}, FREE, frozenset({BEE}), LAST)
    assert found == [LayerSpan(DOG, LayerRange(8, 14)), LayerSpan(CAT, LayerRange(14, 24))]
    assert choose(cards, {}, FREE, frozenset({BEE})) == [LayerSpan(DOG, LayerRange(8, 24))]


def test_where_no_machine_takes_the_layers_of_a_lost_one_all_are_shared_out_anew() -> None:
    small = [replace(card, shard_memory_bytes=5 * (101 << 20)) if card.node_id == DOG else card for card in CARDS]
    found = choose(small, {}, FREE, frozenset({BEE}), LAST)
    assert found[0].layers.start == 8
    assert found[-1].layers.stop == 24
    assert LayerSpan(CAT, LayerRange(14, 24)) not in found


def test_a_context_shorter_than_a_typical_request_is_no_machine_too_few() -> None:
    shape = replace(SHAPE, max_context=300)
    cards = [replace(card, models=(replace(OFFER, shape=shape),)) for card in CARDS]
    prompt, answer = typical_request(300)
    wanted = replace(FREE, request=replace(REQUEST, prompt_tokens=prompt, answer_tokens=answer))
    lost = choose(cards, {}, wanted, frozenset())[0].node_id
    assert choose(cards, {}, wanted, frozenset({lost}))[-1].layers.stop == 24


def test_a_machine_whose_link_was_not_measured_yet_is_better_than_none() -> None:
    apart = [replace(card, links=()) for card in CARDS[:2]]
    for last in ((), [LayerSpan(CAT, LayerRange(8, 24))]):
        assert choose(apart, {}, FREE, frozenset(), last) == [LayerSpan(BEE, LayerRange(8, 24))]


def test_layers_that_this_machine_runs_for_others_are_its_last_resort() -> None:
    shard = replace(OFFER, role=Role.SHARD, warm=True, shard=ShardState(LayerRange(8, 24), 4))
    own = replace(CARDS[0], models=(OFFER, shard))
    assert choose([own, CARDS[1]], {}, FREE, frozenset()) == [LayerSpan(BEE, LayerRange(8, 24))]
    assert choose([own], {}, FREE, frozenset()) == [LayerSpan(OWN, LayerRange(8, 24))]
    with pytest.raises(ShardUnavailable):
        choose([own], {}, Wanted(replace(REQUEST, orchestrator_layers=0), LayerRange(0, 24)), frozenset())


def test_what_goes_on_is_what_the_plan_says() -> None:
    """The one search finds it: no other place chooses machines."""
    found = plan(CARDS, replace(REQUEST, exclude=frozenset({BEE}), last_route=tuple(LAST)), [Pipelined()]).chosen
    assert [(stage.node_id, stage.layers) for stage in found.stages[1:]] == [(DOG, LayerRange(8, 14)), (CAT, LayerRange(14, 24))]


def test_a_spare_that_computes_other_bytes_takes_no_lost_span_of_an_exact_pipeline() -> None:
    """What is known of machines may come after a route: none is mixed with those that are left."""
    other = replace(OFFER, numerics_id="another")
    cards = [replace(card, models=(other,)) if card.node_id == DOG else card for card in CARDS]
    for exact, expected in ((True, [(CAT, 8, 24)]), (False, [(DOG, 8, 14), (CAT, 14, 24)])):
        unsaid = replace(FREE, request=replace(REQUEST, numerics_id="", exact=exact))
        spans = choose(cards, {}, unsaid, frozenset({BEE}), LAST)
        assert [(span.node_id, span.layers.start, span.layers.stop) for span in spans] == expected
