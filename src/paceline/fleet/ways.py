"""Interface between the planner and the ways to spread work, and the plainest way, `Alone`.

Law: a price is pure. Equal views give equal choices on every node, and the order of cards does not matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.errors import ImpossiblePin
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet import choices
from paceline.fleet.card import Link, NodeCard
from paceline.fleet.machines import Links, Machine
from paceline.fleet.plan import ALONE, Choice, Pin, PlanRequest, Way

ASSUMED_RTT_S, ASSUMED_BYTES_PER_S = 5e-3, 1e7
"""Figures of a poor Wi-Fi, for a link that was not measured. They are used if a person pinned the machines or nothing else was found."""


@dataclass(frozen=True, slots=True)
class PricedFleet:
    """A view of the fleet with everything that ways need to price one request."""

    cards: Mapping[NodeId, NodeCard]
    links: Links
    request: PlanRequest
    barred: frozenset[NodeId]
    """Nodes that may not hold layers for others."""
    trust: Mapping[NodeId, Trust]
    """Trust of nodes by their certificates; a node that is missing here is a member."""
    in_need: bool = False
    """True in a search that may use assumptions: the last route is to be kept, or nothing was found without them and the request allows them."""

    def link(self, sender: NodeId, receiver: NodeId) -> Link | None:
        """Return the link between two nodes. A link that was not measured counts as poor if a person pinned machines or `in_need` is set; otherwise the
        result is None.
        """
        measured = self.links.between(sender, receiver)
        if measured is None and (self.request.is_pinned or self.in_need):
            return Link(receiver, "", ASSUMED_RTT_S, ASSUMED_BYTES_PER_S)
        return measured


def still_read(machines: Sequence[Machine]) -> str:
    """Return a hint for a model that has no known digest."""
    where = " and ".join(sorted({machine.node_id for machine in machines})[:4])
    return f"Its files are still being read on {where}, and until that is done no other machine can share it: ask again in a minute."


class PricesWay(ABC):
    """A way to spread work, for the planner. `placement.plan` searches a registered list of them."""

    way: ClassVar[Way]
    spreads: ClassVar[bool] = False
    """True if several machines run layers."""
    drafts: ClassVar[bool] = False
    """True if a machine proposes tokens."""

    @abstractmethod
    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        """Return the choices that this way offers.

        Args:
            fleet: the view and the request.
            machines: nodes that have the very same weights, or would fetch them.

        Raises:
            ImpossiblePin: the pins can't be kept in this way.
        """

    def takes_pins(self, request: PlanRequest) -> bool:
        """Return whether several machines that a person pinned for `request` may run it in this way."""
        del request
        return self.spreads

    def spares(self, fleet: PricedFleet, chosen: Choice) -> tuple[LayerSpan, ...]:
        """Return machines that should load spans in advance, in case a machine of the choice is lost."""
        del fleet, chosen
        return ()


class Alone(PricesWay):
    """Way in which one machine runs all of the request: the serving node, if the request names one."""

    way = ALONE

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        request = fleet.request
        if request.proposer is not None or request.is_spread_by_pins:
            return []
        return [choices.alone(machine, request) for machine in whole_machines(fleet, machines)]


def whole_machines(fleet: PricedFleet, machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines that may run all of the model for the request.

    Raises:
        ImpossiblePin: the pinned machine can't.
    """
    request = fleet.request
    if not request.pins:
        wanted = {machine.node_id for machine in machines} if request.orchestrator is None else {request.orchestrator}
        return [machine for machine in machines if machine.node_id in wanted and choices.unfit(machine, request) is None]
    (pin,) = request.pins
    machine = pinned_machine(pin, machines, fleet)
    if pin.layers is not None and pin.layers != LayerRange(0, machine.shape.n_layers):
        check_range(pin, machine)
        raise ImpossiblePin(
            f"{pin.node_id} is pinned to layers {pin.layers.words}, and no machine to the rest of {machine.shape.n_layers}",
            "Pin those too.",
        )
    reason = choices.unfit(machine, request)
    if reason is not None:
        raise ImpossiblePin(f"{pin.node_id} is pinned, but {reason.why}", "Pin more machines, or others.", constraint=reason.constraint)
    return [machine]


def pinned_machine(pin: Pin, machines: Sequence[Machine], fleet: PricedFleet) -> Machine:
    """Return the machine that a pin names.

    Raises:
        ImpossiblePin: it has not got the weights, and can't fetch them, or can't yet.
    """
    machine = next((each for each in machines if each.node_id == pin.node_id), None)
    if machine is not None:
        return machine
    model, why = fleet.request.title, f"{pin.node_id} is pinned, and can't share {fleet.request.title} yet"
    if machines and not any(each.offer.digest for each in machines):
        raise ImpossiblePin(why, still_read(machines), awaited=f"the files of {model} are still being read")
    if machines and not any(fleet.links.between(each.node_id, pin.node_id) for each in machines):
        others = " or ".join(sorted({each.node_id for each in machines})[:4])
        raise ImpossiblePin(f"{why}: no link between it and {others} is measured", "Ask again in a minute, or pull the model there.")
    raise ImpossiblePin(
        f"{pin.node_id} is pinned, but does not have the same weights of {model} as the others",
        "Pull the model there, or pin another machine.",
    )


def check_range(pin: Pin, machine: Machine) -> None:
    """Check that a model has the layers that a pin names.

    Raises:
        ImpossiblePin: it has not got them.
    """
    span, n_layers = pin.layers, machine.shape.n_layers
    if span is not None and not 0 <= span.start < span.stop <= n_layers:
        raise ImpossiblePin(
            f"{pin.node_id} is pinned to layers {span.words} of a model with {n_layers}", f"Layers are 0 to {n_layers - 1}."
        )
