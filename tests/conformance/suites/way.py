"""What every `PricesWay` must do, however it spreads a request.

Subclass `WaySuite` in a test module that has a fixture `way`. Its choices are looked at over seeded fleets of one to six nodes, of all kinds: with and
without measured speeds, links, memory, warm layers, draft models, guests, an orchestrator, pins.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from paceline.core.errors import ImpossiblePin, PlacementError
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange
from paceline.fleet.card import DividedShape, Link, ModelOffer, ModelShape, NodeCard, Role, ShardState
from paceline.fleet.machines import Links, barred_hosts, could_share, groups, live_cards, matching_offers
from paceline.fleet.placement import plan
from paceline.fleet.plan import Choice, Pin, PlanRequest
from paceline.fleet.ways import PricedFleet, PricesWay

GIB = 1 << 30
SHAPE = ModelShape(
    n_layers=24,
    hidden=2048,
    layer_bytes=100 << 20,
    edge_bytes=300 << 20,
    kv_bytes_per_token_per_layer=2048,
    max_context=32768,
    divided=DividedShape(8, 5632, 32000, 30 << 20),
)
NAMES = tuple(map(NodeId, ("ant", "bee", "cat", "dog", "elk", "fox")))


class WaySuite:
    """A price is pure, its choices can be run, and pins and trust are kept."""

    fleets: ClassVar[int] = 200
    """How many seeded fleets each test prices."""

    def test_a_price_depends_on_the_view_alone(self, way: PricesWay) -> None:
        for seed in range(self.fleets):
            cards, request = _fleet(seed)
            shuffled = random.Random(seed).sample(cards, len(cards))
            assert _sorted(_priced(way, cards, request)) == _sorted(_priced(way, shuffled, request)), f"fleet {seed}"

    def test_a_node_that_can_take_no_part_changes_no_price(self, way: PricesWay) -> None:
        other = NodeCard(NodeId("zebra"), 1, ("zebra:1",), b"zebra", 120, 0)
        for seed in range(self.fleets):
            cards, request = _fleet(seed)
            assert _sorted(_priced(way, [other, *cards], request)) == _sorted(_priced(way, cards, request)), f"fleet {seed}"

    def test_every_choice_can_be_run(self, way: PricesWay) -> None:
        seen = 0
        for cards, request, choices in _all(way, self.fleets):
            ids = {card.node_id for card in cards}
            for choice in choices:
                seen += 1
                expected = choice.estimate
                assert choice.way == way.way
                assert all(math.isfinite(each) and each > 0 for each in (expected.tokens_per_s, expected.ttft_s, expected.total_s)), (
                    f"no estimate: {choice}"
                )
                stages = [stage.node_id for stage in choice.stages]
                assert len(set(stages)) == len(stages), f"a node twice: {choice}"
                assert set(choice.node_ids) <= ids
                assert way.spreads or len(stages) == 1
                assert (choice.draft is not None) == way.drafts
                assert {layer for stage in choice.stages for layer in range(stage.layers.start, stage.layers.stop)} == set(
                    range(SHAPE.n_layers)
                ), f"layers: {choice}"
                assert request.orchestrator in {None, stages[0]}, f"it begins elsewhere: {choice}"
        assert seen, "none of the fleets has a choice of this way"

    def test_what_is_estimated_is_not_called_measured(self, way: PricesWay) -> None:
        for cards, _, choices in _all(way, self.fleets):
            unmeasured = {card.node_id for card in cards if not any(offer.tokens_per_second for offer in card.models)}
            for choice in choices:
                assert not (choice.estimate.measured and unmeasured & set(choice.node_ids)), f"{choice}"

    def test_guests_hold_no_layers_where_members_are_asked_for(self, way: PricesWay) -> None:
        for cards, request, _ in _all(way, self.fleets):
            trust = {card.node_id: Trust.GUEST for card in cards if card.node_id != request.orchestrator}
            for choice in _priced(way, cards, replace(request, min_host_trust=Trust.MEMBER), trust):
                assert len(choice.stages) == 1 or {stage.node_id for stage in choice.stages} <= {request.orchestrator}, f"{choice}"

    def test_pins_are_kept_or_refused(self, way: PricesWay) -> None:
        for cards, request, _ in _all(way, self.fleets):
            pins = tuple(Pin(card.node_id) for card in cards)
            wanted = [pins[:1], pins[:2], pins[:3]]
            if pins[1:]:
                wanted.append((Pin(pins[0].node_id, LayerRange(0, 1)), pins[1]))
            for each in wanted:
                try:
                    choices = _priced(way, cards, replace(request, pins=each, orchestrator=None))
                except ImpossiblePin:
                    continue
                for choice in choices:
                    layers = {stage.node_id: stage.layers for stage in choice.stages}
                    assert set(layers) == {pin.node_id for pin in each}, f"{choice}"
                    assert all(pin.layers in {None, layers[pin.node_id]} for pin in each), f"{choice}"

    def test_spares_stand_outside_of_what_was_chosen(self, way: PricesWay) -> None:
        for cards, request, choices in _all(way, self.fleets):
            for choice in choices:
                for spare in way.spares(_view(cards, request), choice):
                    assert spare.node_id not in choice.node_ids
                    assert spare.node_id in {card.node_id for card in cards}

    def test_the_plan_is_one_of_its_choices(self, way: PricesWay) -> None:
        for cards, request, choices in _all(way, self.fleets):
            try:
                made = plan(cards, replace(request, ways=frozenset({way.way})), [way])
            except PlacementError:
                assert not choices, "there are choices, and the plan has none"
            else:
                assert made.chosen in choices


def _all(way: PricesWay, fleets: int) -> Iterator[tuple[Sequence[NodeCard], PlanRequest, list[Choice]]]:
    """Seeded fleets and what a way offers in them."""
    for seed in range(fleets):
        cards, request = _fleet(seed)
        yield cards, request, _priced(way, cards, request)


def _view(cards: Sequence[NodeCard], request: PlanRequest, trust: dict[NodeId, Trust] | None = None) -> PricedFleet:
    by_id = live_cards(cards)
    return PricedFleet(by_id, Links(by_id), request, barred_hosts(by_id, request, trust or {}), trust or {})


def _priced(way: PricesWay, cards: Sequence[NodeCard], request: PlanRequest, trust: dict[NodeId, Trust] | None = None) -> list[Choice]:
    """Choices among nodes that have the weights; with those that would fetch them only where there are none, or where nodes are pinned."""
    fleet = _view(cards, replace(request, ways=frozenset({way.way})), trust)
    having = groups(matching_offers(fleet.cards, fleet.request), fleet.request)
    found: list[Choice] = []
    for fetching in (True,) if request.pins else (False, True):
        for group in having:
            more = could_share(group, fleet.cards, fleet.links.between, fleet.request) if fetching else []
            found += way.price(fleet, [*group, *more])
        if found:
            break
    return found


def _sorted(choices: Sequence[Choice]) -> list[str]:
    return sorted(map(repr, choices))


def _fleet(seed: int) -> tuple[list[NodeCard], PlanRequest]:
    """A fleet in which the first node has the model, and a request to it."""
    draw = random.Random(seed)
    names = NAMES[: draw.randint(1, len(NAMES))]
    cards = [_card(draw, name, names, always=place == 0) for place, name in enumerate(names)]
    request = PlanRequest(
        "m",
        prompt_tokens=draw.choice((16, 512, 8000)),
        answer_tokens=draw.choice((1, 256)),
        orchestrator=draw.choice((None, names[0])),
        acceptance=draw.choice((None, 0.5, 0.9)),
        streams=draw.choice((1, 4)),
    )
    return cards, request


def _card(draw: random.Random, name: NodeId, names: Sequence[NodeId], *, always: bool) -> NodeCard:
    speed = draw.choice((0.0, draw.uniform(1.0, 100.0)))
    offers = [
        ModelOffer(
            "m", Role.VERIFIER, "int4", speed, 10 * speed, "d" * 64, warm=draw.random() < 0.3, numerics_id="n", shape=SHAPE, vocabulary="v"
        )
    ]  # fmt: skip
    if not always and draw.random() < 0.2:
        offers = []
    if draw.random() < 0.5:
        offers.append(ModelOffer("small", Role.PROPOSER, "int4", 4 * speed, 0.0, "e" * 64, warm=True, vocabulary="v", shape=SHAPE))
    if draw.random() < 0.3:
        start = draw.randint(0, SHAPE.n_layers - 1)
        shard = ShardState(LayerRange(start, SHAPE.n_layers), 4, memory_bytes=GIB)
        offers.append(
            ModelOffer("m", Role.SHARD, "int4", speed, 10 * speed, "d" * 64, warm=True, numerics_id="n", shape=SHAPE, shard=shard)
        )
    reach = [other for other in names if other != name and draw.random() < 0.8]
    return NodeCard(
        name, 1, (f"{name}:1",), name.encode(), 120, 0, backend="cpu", memory_total_bytes=16 * GIB,
        memory_free_bytes=draw.choice((GIB, 3 * GIB, 12 * GIB)), memory_bytes_per_s=50 * 10**9, models=tuple(offers),
        links=tuple(Link(to, f"{to}:1", draw.choice((1e-4, 5e-3)), draw.choice((1e7, 1e9))) for to in reach),
        serves_shards=draw.random() < 0.8, shard_memory_bytes=draw.choice((GIB, 8 * GIB)),
    )  # fmt: skip
