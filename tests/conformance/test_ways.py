"""Every way of this repository under the one suite, and what breaks its laws is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from tests.conformance.suites.way import WaySuite
from tests.sampling import examples
from tests.unit.ways.mirror.price import Mirrored

from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.machines import Machine
from paceline.fleet.plan import Choice
from paceline.fleet.ways import Alone, PricedFleet, PricesWay
from paceline.node.ways import WAYS


@pytest.mark.parametrize("way", [*WAYS, Mirrored()], ids=lambda way: way.way)
class TestWays(WaySuite):
    fleets = examples(WaySuite.fleets)


class Wilful(Alone):
    """Pins are not looked at."""

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        return super().price(replace(fleet, request=replace(fleet.request, pins=())), machines)


class Hasty(Alone):
    """The first card counts."""

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        found = super().price(fleet, machines)
        return [replace(choice, stages=(replace(choice.stages[0], numerics_id=repr(self._first(fleet))),)) for choice in found]

    def _first(self, fleet: PricedFleet) -> NodeId:
        return max(fleet.cards.values(), key=lambda card: (card.node_id == "zebra", card.memory_free_bytes)).node_id


class Boastful(Alone):
    """All of it was measured."""

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        return [replace(choice, estimate=replace(choice.estimate, measured=True)) for choice in super().price(fleet, machines)]


class Partial(Alone):
    """The last layer is nobody's."""

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        return [
            replace(choice, stages=(replace(choice.stages[0], layers=LayerRange(0, machines[0].shape.n_layers - 1)),))
            for choice in super().price(fleet, machines)
        ]


@pytest.mark.parametrize(
    ("way", "law"),
    [
        (Wilful(), WaySuite.test_pins_are_kept_or_refused),
        (Hasty(), WaySuite.test_a_node_that_can_take_no_part_changes_no_price),
        (Boastful(), WaySuite.test_what_is_estimated_is_not_called_measured),
        (Partial(), WaySuite.test_every_choice_can_be_run),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_a_way_that_breaks_a_law_is_found(way: PricesWay, law: Callable[[WaySuite, PricesWay], None]) -> None:
    with pytest.raises(AssertionError):
        law(WaySuite(), way)
