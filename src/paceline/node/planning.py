"""What this node asks of the plan for one model, as its view is now and as a person wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.clock import Clock
from paceline.fleet.card import Device, NodeCard
from paceline.fleet.placement import figures, headline
from paceline.fleet.plan import Choice, Plan, PlannedStage, Way
from paceline.machine.settings import NodeSettings
from paceline.node.ways import SPREAD, plan, plan_request
from paceline.ways.pipeline.order import PipelineOrder, typical_request
from paceline.ways.pipeline.routes.build import check_layers
from paceline.ways.pipeline.routes.fleet_access import NodeFleetAccess

SHOWN_S = 5.0
"""Within which a node's card shows what lies on its disk. Raising it: a start waits longer where the card can't be made."""
LOOK_S = 0.5
"""Between two looks at a view in which no node can take part yet."""

Idle = tuple[str, int]
"""A model that is loaded and makes way for another: the format of its weights, and what it has taken of memory."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a person asked of the plan for one model."""

    ways: frozenset[Way]
    order: PipelineOrder
    """Of a pipeline, where the plan chooses one."""
    draft_model: str = ""


def plan_once_shown(
    access: NodeFleetAccess, name: str, settings: NodeSettings, asked: Constraints, clock: Clock, makes_way: Sequence[Idle]
) -> Plan:
    """This node's plan, once its own card shows the model."""
    until = clock.monotonic() + SHOWN_S
    while clock.monotonic() < until:
        if any(card.node_id == access.node_id and any(offer.model_id == name for offer in card.models) for card in access.cards()):
            break
        access.wait_for_change(LOOK_S)
    return plan_here(access, name, settings, asked, makes_way=makes_way)


def plan_here(
    access: NodeFleetAccess,
    name: str,
    settings: NodeSettings,
    asked: Constraints,
    running: Choice | None = None,
    makes_way: Sequence[Idle] = (),
    held: Sequence[PlannedStage] = (),
) -> Plan:
    """This node's plan, as its view is now. Not on the event loop.

    Args:
        running: how the model is served; None: it is not yet.
        makes_way: as of `_built_as_planned`.
        held: tensor ranks that run: their memory is the model's already.
    """
    cards = [_without(card, makes_way) if card.node_id == access.node_id else card for card in access.cards()]
    for stage in held:
        memory = [(running.weights, stage.rank.memory_bytes)] if running is not None and stage.rank is not None else []
        cards = [_without(card, memory) if card.node_id == stage.node_id else card for card in cards]
    if running is not None and running.way in SPREAD:
        # The card says that the model answers here. That is no reason to think that all of it would fit.
        cards = [_cold(card, name) if card.node_id == access.node_id else card for card in cards]
    own = next((card for card in cards if card.node_id == access.node_id), None)
    shapes = [offer.shape for offer in (own.models if own is not None else ()) if offer.model_id == name and offer.shape is not None]
    for shape in shapes:
        check_layers(asked.order, name, shape.n_layers)
    context = settings.context or min((shape.max_context for shape in shapes), default=1 << 31)
    request = plan_request(
        *(asked.order, name, settings.weights or ""),
        own=access.node_id,
        lengths=typical_request(context),
        ways=asked.ways,
        proposer=settings.draft_on,
        ranks_on=settings.tensor_on,
        draft_model=asked.draft_model,
        kv_tokens=settings.context or 0,
    )
    return plan(cards, request, access.trust())


def _without(card: NodeCard, gone: Sequence[Idle]) -> NodeCard:
    """A card as it is once these have made way."""

    def free(own: NodeCard | Device, device: Device | None) -> tuple[int, int]:
        more = sum(taken for weights, taken in gone if card.device_of(weights) == device)
        return own.memory_free_bytes + more, own.shard_memory_bytes + more

    def of(device: Device) -> Device:
        memory, shards = free(device, device)
        return replace(device, memory_free_bytes=memory, shard_memory_bytes=shards)

    memory, shards = free(card, None)
    return replace(card, memory_free_bytes=memory, shard_memory_bytes=shards, devices=tuple(map(of, card.devices)))


def _cold(card: NodeCard, name: str) -> NodeCard:
    return replace(card, models=tuple(replace(offer, warm=False) if offer.model_id == name else offer for offer in card.models))


def in_words(made: Plan) -> str:
    """Return a plan in a line or two: what runs, and what came next."""
    return "; otherwise ".join(map(brief, (made.chosen, *made.runners_up[:1])))


def brief(choice: Choice) -> str:
    """Return a choice and its figures in a line."""
    return f"{headline(choice)}: {figures(choice)}"
