"""Shards that are loaded already and cover a model's layers, so that a pipeline opens with no weights to move; and nodes outside a pipeline that
should have its spans loaded before a node is lost. Pure functions of the view, as the plan is.

Laws:
- From the first uncovered layer on, of the shards that include it the one with the lowest queue is taken; among equals the one that reaches
  farthest, then throughput, memory, id. A shard with no stream free is passed over, not waited for. The order in which shards are given does not
  matter.
- A node is a spare for one span. One that has a span loaded, or loads it, stays its spare; the longest spans are given away first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.errors import WeightsMismatch
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan, ModelRef, shard_id
from paceline.fleet.card import NodeCard, Role, ShardState
from paceline.fleet.machines import (
    Links,
    Machine,
    barred_hosts,
    could_share,
    free_for_layers,
    groups,
    live_cards,
    matching_offers,
    speed_order,
    stage_machines,
)
from paceline.fleet.plan import PlanRequest


@dataclass(frozen=True, slots=True)
class WarmShard:
    """Layers that a node has loaded for others, as its card says."""

    node_id: NodeId
    instance: bytes
    """Of the node's process: another one has lost the KV."""
    model: ModelRef
    numerics_id: str
    state: ShardState
    tokens_per_s: float
    """Of the whole model on that node; 0: not measured."""
    memory_bytes: int
    """All of the node's."""

    def __str__(self) -> str:
        return f"{shard_id(self.model.name, self.state.layers)} on {self.node_id}"


@dataclass(frozen=True, slots=True)
class CoverRequest:
    """What is to be covered, and by whom it may be."""

    model: ModelRef
    layers: LayerRange
    numerics_id: str = ""
    """Only shards that compute these very bytes; empty: any."""
    own: NodeId | None = None
    """Who asks."""
    allow_self: bool = True
    """Whether shards of the asking node count."""
    max_shards: int = 16
    exclude: frozenset[NodeId] = frozenset()


def warm_shards(view: Iterable[NodeCard]) -> list[WarmShard]:
    """Every shard that the cards of a view say is loaded."""
    return [
        WarmShard(
            *(card.node_id, card.instance, offer.model, offer.numerics_id, offer.shard),
            *(offer.tokens_per_second, card.memory_total_bytes),
        )
        for card in live_cards(view).values()
        for offer in card.models
        if offer.role is Role.SHARD and offer.warm and offer.shard is not None
    ]


def pick(shards: Iterable[WarmShard], request: CoverRequest) -> list[LayerSpan] | None:
    """Shards that cover the layers without gap or overlap, in the order of their layers; None where none do, or not so few, or they have no stream free."""
    fewest = sorted(_free(shards, request), key=_farthest, reverse=True)
    parts = _greedy(sorted(fewest, key=lambda shard: shard.state.queue_depth), request.layers)
    if parts is not None and len(parts) > request.max_shards:
        parts = _greedy(fewest, request.layers)
    return None if parts is None or len(parts) > request.max_shards else parts


def other_weights(shards: Iterable[WarmShard], request: CoverRequest) -> WeightsMismatch | None:
    """What is wrong where shards cover the layers but for their weights; None where something else is."""
    shards = [*shards]
    missing = _uncovered(request.layers, _free(shards, request))
    there = [shard for shard in shards if _is_allowed(shard, request) and any(_overlap(shard.state.layers, each) for each in missing)]
    others = sorted(f"{shard} ({shard.model})" for shard in there if shard.model != request.model)
    if not others or any(shard.model == request.model and not shard.state.streams_free for shard in there):
        return None
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return WeightsMismatch(
        f"Layers {', '.join(map(str, missing))} of {request.model.name[:200]} are loaded with other weights than {request.model}: "
        f"{', '.join(others[:4])}{more}",
        "Pull the same model on all machines.",
    )


def warm_cover(
    cards: Iterable[NodeCard], request: PlanRequest, layers: LayerRange, trust: Mapping[NodeId, Trust], but: frozenset[NodeId] = frozenset()
) -> list[LayerSpan]:
    """Shards of nodes that may hold layers for a pipeline; none where they don't cover.

    Args:
        but: who must take no part, beside those that the request excludes.
    """
    return pick(*asked_of_shards(cards, request, layers, trust, but)) or []


def asked_of_shards(
    cards: Iterable[NodeCard], request: PlanRequest, layers: LayerRange, trust: Mapping[NodeId, Trust], but: frozenset[NodeId] = frozenset()
) -> tuple[list[WarmShard], CoverRequest]:
    """The shards there are, and what a pipeline asks of them; arguments as `warm_cover` has them."""
    shards = warm_shards(cards)
    barred = barred_hosts({shard.node_id for shard in shards}, request, trust)
    return shards, CoverRequest(
        *(ModelRef(request.model, request.weights, request.title), layers, request.numerics_id),
        own=request.orchestrator,
        allow_self=request.orchestrator_layers != 0,
        max_shards=request.max_shards,
        exclude=request.exclude | barred | but,
    )


def _free(shards: Iterable[WarmShard], request: CoverRequest) -> list[WarmShard]:
    """Those that may be used, and have a stream free."""
    return [
        shard
        for shard in shards
        if _is_allowed(shard, request)
        and (shard.model == request.model and shard.state.streams_free)
        and request.numerics_id in {"", shard.numerics_id}
    ]


def _is_allowed(shard: WarmShard, request: CoverRequest) -> bool:
    if shard.node_id == request.own and not request.allow_self:
        return False
    if shard.node_id in request.exclude:
        return False
    return shard.model.name == request.model.name or (shard.model.digest != "" and shard.model.digest == request.model.digest)


_Farthest = tuple[int, float, int, str, str]


def _greedy(shards: Sequence[WarmShard], layers: LayerRange) -> list[LayerSpan] | None:
    """The first shard that includes the next layer, again and again. None where none does."""
    parts: list[LayerSpan] = []
    cursor = layers.start
    while cursor < layers.stop:
        best = next((shard for shard in shards if cursor in shard.state.layers), None)
        if best is None:
            return None
        start, cursor = cursor, min(best.state.layers.stop, layers.stop)
        parts.append(LayerSpan(best.node_id, LayerRange(start, cursor)))
    return parts


def _farthest(shard: WarmShard) -> _Farthest:
    return (shard.state.layers.stop, shard.tokens_per_s, shard.memory_bytes, shard.node_id, repr(shard))


def _uncovered(layers: LayerRange, shards: Sequence[WarmShard]) -> list[LayerRange]:
    missing: list[LayerRange] = []
    cursor = layers.start
    for shard in sorted(shards, key=lambda shard: shard.state.layers.start):
        if shard.state.layers.start > cursor:
            missing.append(LayerRange(cursor, min(shard.state.layers.start, layers.stop)))
        cursor = max(cursor, shard.state.layers.stop)
        if cursor >= layers.stop:
            return missing
    return [*missing, LayerRange(cursor, layers.stop)]


def _overlap(one: LayerRange, other: LayerRange) -> bool:
    return one.start < other.stop and other.start < one.stop


def spares_for(
    view: Iterable[NodeCard],
    request: PlanRequest,
    spans: Sequence[LayerRange],
    taken: frozenset[NodeId],
    trust: Mapping[NodeId, Trust] | None = None,
) -> tuple[LayerSpan, ...]:
    """A machine for each span, as far as there are any.

    Args:
        trust: what certificates say of nodes; those left out are members.

    Raises:
        PlacementError: no machine has the model.
    """
    cards = {node_id: card for node_id, card in live_cards(view).items() if node_id not in request.exclude}
    links, barred = Links(cards), barred_hosts(cards, request, trust or {})
    free: dict[NodeId, Machine] = {}
    for group in groups(matching_offers(cards, request), request):
        for machine in stage_machines([*group, *could_share(group, cards, links.between, request)], request, barred):
            if machine.node_id not in taken and machine.node_id != request.orchestrator:
                free.setdefault(machine.node_id, machine)
    found: list[LayerSpan] = []
    for span in sorted(spans, key=lambda span: (-len(span), span.start)):
        able = [machine for machine in free.values() if _has(machine, span) or _fits(machine, span)]
        if able:
            best = max(able, key=lambda machine: (_has(machine, span), not _has_any(machine), speed_order(machine)))
            found.append(LayerSpan(best.node_id, span))
            del free[best.node_id]
    return tuple(sorted(found, key=lambda spare: spare.layers.start))


def _fits(machine: Machine, span: LayerRange) -> bool:
    """Nothing makes way for a spare."""
    return machine.takes_layers and free_for_layers(machine.card) >= machine.needs(len(span), edges=False)


def _has(machine: Machine, span: LayerRange) -> bool:
    """Whether it has the span loaded, or loads it."""
    return any(shard.start <= span.start and span.stop <= shard.stop for shard in _loaded(machine))


def _has_any(machine: Machine) -> bool:
    return bool(_loaded(machine))


def _loaded(machine: Machine) -> list[LayerRange]:
    wanted = machine.offer.model
    return [each.shard.layers for each in machine.card.models if each.shard is not None and each.model == wanted]
