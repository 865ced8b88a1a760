"""What a way of spreading work says of itself to be planned, and what it says that from.

Law: a price is pure. Equal views give equal choices, whichever node asks, and the order of cards does not matter.
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
"""Of a link that was not measured, where a pin or need wants it: a poor Wi-Fi."""


@dataclass(frozen=True, slots=True)
class PricedFleet:
    """A view, as ways price it for one request."""

    cards: Mapping[NodeId, NodeCard]
    links: Links
    request: PlanRequest
    barred: frozenset[NodeId]
    """Nodes that may hold no layers for others."""
    trust: Mapping[NodeId, Trust]
    """What certificates say of nodes; those left out are members."""
    in_need: bool = False
    """Nothing was found without assumptions, and the request allows some."""

    def link(self, sender: NodeId, receiver: NodeId) -> Link | None:
        """The link between two nodes. One that was not measured is assumed to be poor where a person pinned machines, or in need; else it is None."""
        measured = self.links.between(sender, receiver)
        if measured is None and (self.request.is_pinned or self.in_need):
            return Link(receiver, "", ASSUMED_RTT_S, ASSUMED_BYTES_PER_S)
        return measured


def still_read(machines: Sequence[Machine]) -> str:
    """A hint, where no digest of the model is known."""
    where = " and ".join(sorted({machine.node_id for machine in machines})[:4])
    return f"Its files are still being read on {where}, and until that is done no other machine can share it: ask again in a minute."


class PricesWay(ABC):
    """One way of spreading work, for the plan. `Alone` is the plainest; a registered list of them is what `placement.plan` searches."""

    way: ClassVar[Way]
    spreads: ClassVar[bool] = False
    """Whether several machines run layers."""
    drafts: ClassVar[bool] = False
    """Whether a machine proposes tokens."""

    @abstractmethod
    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        """The choices worth naming.

        Args:
            machines: nodes that have the very same weights, or would fetch them.

        Raises:
            ImpossiblePin: the person's pins can't be kept in this way.
        """

    def spares(self, fleet: PricedFleet, chosen: Choice) -> tuple[LayerSpan, ...]:
        """Machines that should be ready for the loss of one of a choice."""
        del fleet, chosen
        return ()


class Alone(PricesWay):
    """One machine runs all of it: the node that serves, where the request names it."""

    way = ALONE

    def price(self, fleet: PricedFleet, machines: Sequence[Machine]) -> list[Choice]:
        request = fleet.request
        if request.proposer is not None or request.is_spread_by_pins:
            return []
        return [choices.alone(machine, request) for machine in whole_machines(fleet, machines)]


def whole_machines(fleet: PricedFleet, machines: Sequence[Machine]) -> list[Machine]:
    """Those that may run all of the model for the request.

    Raises:
        ImpossiblePin: the one that is pinned can't.
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
    """The machine that a pin names.

    Raises:
        ImpossiblePin: it has not the weights, and can't get them, or not yet.
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
        f"{pin.node_id} is pinned, but has not the same weights of {model} as the others", "Pull the model there, or pin another machine."
    )


def check_range(pin: Pin, machine: Machine) -> None:
    """Check that a model has the layers that a pin names.

    Raises:
        ImpossiblePin: it has not.
    """
    span, n_layers = pin.layers, machine.shape.n_layers
    if span is not None and not 0 <= span.start < span.stop <= n_layers:
        raise ImpossiblePin(
            f"{pin.node_id} is pinned to layers {span.words} of a model with {n_layers}", f"Layers are 0 to {n_layers - 1}."
        )
