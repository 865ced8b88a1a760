"""A node as its pipelines see it, and the plan that it makes for one: when it opens, and when it is to go on after a loss. What belongs to the event loop
is asked there, whichever thread asks; `choose` is pure.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import grpc.aio

from paceline.core.background import Background
from paceline.core.errors import FleetError, PlacementError, ShardUnavailable
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet.card import NodeCard
from paceline.fleet.eligibility import FleetView, Use
from paceline.fleet.machines import barred_hosts
from paceline.fleet.placement import plan
from paceline.fleet.plan import PlanRequest
from paceline.net.member.node import FleetNode
from paceline.ways.pipeline.cover import asked_of_shards, other_weights
from paceline.ways.pipeline.price import Pipelined

ANSWER_S = 5.0


class FleetAccess(Protocol):
    """What pipelines need of their node."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def background(self) -> Background: ...
    def cards(self) -> Sequence[NodeCard]: ...
    def trust(self) -> dict[NodeId, Trust]: ...
    def channel(self, node_id: NodeId) -> grpc.aio.Channel: ...
    def order(self, addresses: Sequence[str]) -> tuple[str, ...]: ...
    def found_wrong(self, node_id: NodeId, why: str) -> None: ...
    def wait_for_change(self, seconds: float) -> None: ...


class NodeFleetAccess:
    """A `FleetAccess`. Made on the event loop.

    Args:
        shard_age_s: what a card says of loaded shards is not believed when it is older.
        least: trust of machines that hold layers; None: as the node's settings say.
    """

    def __init__(self, fleet: FleetNode, shard_age_s: float, least: Trust | None = None) -> None:
        self._fleet, self._shard_age_s = fleet, shard_age_s
        self._policy = fleet.trust if least is None else replace(fleet.trust, host=least)
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Event()
        fleet.listen(lambda _: self._changed.set())

    @property
    def node_id(self) -> NodeId:
        return self._fleet.node_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._fleet.addresses

    @property
    def background(self) -> Background:
        return self._fleet.background

    def cards(self) -> Sequence[NodeCard]:
        """The live ones; old ones without their shards."""
        return [live.card if live.age_s <= self._shard_age_s else without_shards(live.card) for live in self._view().nodes]

    def trust(self) -> dict[NodeId, Trust]:
        """What certificates say."""
        return self._view().trust

    def order(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """The likeliest first."""
        return self._fleet.book.order(addresses)

    def channel(self, node_id: NodeId) -> grpc.aio.Channel:
        """For sessions with a node, over the address that serves best. On the event loop.

        Raises:
            FleetError: it is not in view, or its certificate is not good.
        """
        live = self._fleet.view().get(node_id)
        if live is None or not live.card.addresses:
            raise FleetError(f"{node_id} is not in view any more")
        return self._fleet.channel(node_id, live.card.addresses, Use.HOLD_LAYERS, trust=self._policy)

    def found_wrong(self, node_id: NodeId, why: str) -> None:
        """Leave a node out of all that it computes for this one. On the event loop."""
        self._fleet.found_wrong(node_id, why)

    def wait_for_change(self, seconds: float) -> None:
        """Until something changes in the fleet, but no longer. Not on the event loop."""
        self._changed.clear()
        self._changed.wait(seconds)

    def _view(self) -> FleetView:
        """Return the view without nodes whose work came out otherwise when it was recomputed."""
        try:
            if asyncio.get_running_loop() is self._loop:
                return self._seen()
        except RuntimeError:
            pass  # another thread

        async def look() -> FleetView:
            return self._seen()

        return asyncio.run_coroutine_threadsafe(look(), self._loop).result(ANSWER_S)

    def _seen(self) -> FleetView:
        view, wrong = self._fleet.view(), self._fleet.wrong
        return replace(view, nodes=tuple(live for live in view.nodes if live.card.node_id not in wrong)) if wrong else view


def without_shards(card: NodeCard) -> NodeCard:
    """A card that tells of no loaded layers: of what the machine could load it still does."""
    return replace(card, models=tuple(offer for offer in card.models if offer.shard is None))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model whose layers are to be run by others, behind those that the orchestrator has loaded."""

    request: PlanRequest
    """Its pins hold as long as all of their machines are there: where one is lost, any others may go on."""
    layers: LayerRange


def choose(
    cards: Sequence[NodeCard], trust: Mapping[NodeId, Trust], wanted: Wanted, exclude: frozenset[NodeId], last: Sequence[LayerSpan] = ()
) -> list[LayerSpan]:
    """Nodes in the order of their layers.

    Args:
        exclude: who must take no part.
        last: the route before, of which an answer may wait for the next.

    Raises:
        ShardUnavailable, WeightsMismatch: no node can, or may.
    """
    request = replace(wanted.request, exclude=exclude, in_need=True, last_route=tuple(last))
    if last:
        request = replace(request, requests=1)
    there = {card.node_id for card in cards} - exclude - barred_hosts((card.node_id for card in cards), request, trust)
    if not there.issuperset(pin.node_id for pin in request.pins):
        request = replace(request, pins=())
    try:
        stages = plan(cards, request, (Pipelined(),), trust).chosen.stages
    except PlacementError as error:
        wrong = other_weights(*asked_of_shards(cards, request, wanted.layers, trust))
        raise wrong or ShardUnavailable(error.message, error.hint) from error
    return [LayerSpan(stage.node_id, stage.layers) for stage in stages[1:]]
