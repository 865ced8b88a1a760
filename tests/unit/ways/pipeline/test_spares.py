"""Which machines outside a pipeline load which of its spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.unit.ways.pipeline.routes.test_choosing import BEE, CARDS, CAT, DOG, GIB, OFFER, OWN
from tests.unit.ways.pipeline.routes.test_choosing import REQUEST as FREE

from paceline.core.errors import PlacementError
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet.card import NodeCard, Role, ShardState
from paceline.fleet.placement import explain
from paceline.fleet.plan import Pin
from paceline.node.ways import plan
from paceline.ways.pipeline.cover import spares_for

BEES, CATS = LayerRange(8, 12), LayerRange(12, 24)
ELK = NodeId("elk")
FIVE = [*CARDS, replace(CARDS[3], node_id=ELK, instance=b"elk", memory_total_bytes=12 * GIB)]
REQUEST = replace(FREE, pins=(Pin(OWN), Pin(BEE, BEES), Pin(CAT, CATS)))


def changed(name: NodeId, **changes: object) -> list[NodeCard]:
    return [replace(card, **changes) if card.node_id == name else card for card in FIVE]  # type: ignore[arg-type]


def shard(layers: LayerRange, *, warm: bool = True, percent: int = 0) -> tuple[object, ...]:
    return (OFFER, replace(OFFER, role=Role.SHARD, warm=warm, shard=ShardState(layers, 4, loaded_percent=percent)))


def spares(cards: Sequence[NodeCard]) -> dict[NodeId, LayerRange]:
    found = {spare.node_id: spare.layers for spare in plan(cards, REQUEST).spares}
    assert found == {spare.node_id: spare.layers for spare in plan(cards[::-1], REQUEST).spares}, "the order of cards is nobody's business"
    return found


def test_each_span_has_a_spare_as_far_as_there_are_machines() -> None:
    assert spares(FIVE) == {DOG: CATS, ELK: BEES}
    assert spares(CARDS) == {DOG: CATS}
    assert spares(CARDS[:3]) == {}


def test_the_plan_that_is_printed_names_them() -> None:
    assert "  dog is spare for layers 12 to 23" in list(explain(plan(CARDS, REQUEST)))


@pytest.mark.parametrize("warm", [True, False])
def test_a_machine_that_has_a_span_or_loads_it_stays_its_spare(warm: bool) -> None:
    models = shard(BEES, warm=warm)
    assert spares(changed(DOG, models=models, shard_memory_bytes=0)) == {DOG: BEES, ELK: CATS}


def test_machines_without_memory_or_trust_are_no_spares() -> None:
    span_bytes = len(CATS) * OFFER.shape.layer_bytes  # type: ignore[union-attr]
    assert spares(changed(DOG, shard_memory_bytes=span_bytes)) == {DOG: BEES, ELK: CATS}
    assert spares(changed(DOG, shard_memory_bytes=GIB // 8)) == {ELK: CATS}
    trust = {DOG: Trust.GUEST}
    found = spares_for(FIVE, REQUEST, [BEES, CATS], frozenset({BEE, CAT}), trust)
    assert found == (LayerSpan(ELK, CATS),)


def test_layers_that_are_idle_make_way_for_a_stage_and_not_for_a_spare() -> None:
    idle = replace(OFFER, role=Role.SHARD, digest="e" * 64, warm=True, shard=ShardState(LayerRange(0, 24), 4, memory_bytes=4 * GIB))
    cards = changed(DOG, models=(OFFER, idle), shard_memory_bytes=0)
    assert DOG not in spares(cards)
    pinned = replace(REQUEST, pins=(Pin(OWN), Pin(DOG, BEES), Pin(CAT, CATS)))
    assert [stage.node_id for stage in plan(cards, pinned).chosen.stages] == [OWN, DOG, CAT]
    busy = replace(idle, shard=replace(idle.shard, streams=1))  # type: ignore[type-var]
    with pytest.raises(PlacementError):
        plan(changed(DOG, models=(OFFER, busy), shard_memory_bytes=0), pinned)
