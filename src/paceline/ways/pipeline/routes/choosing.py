"""Which machines run a pipeline's layers: shards that are loaded already where they cover it, else what the plan says.

Pure: the view is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import PlacementError, ShardUnavailable, WeightsMismatch
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan, WeightsFormat
from paceline.fleet.card import NodeCard
from paceline.fleet.eligibility import TrustPolicy, Use
from paceline.fleet.placement import plan
from paceline.fleet.plan import LEAST_ROWS, TYPICAL_ANSWER, TYPICAL_PROMPT, Objective, Pin, PlannedStage, PlanRequest
from paceline.ways.pipeline.cover import CoverRequest, pick, spares_for, warm_shards
from paceline.ways.pipeline.price import Pipelined
from paceline.ways.pipeline.splits import PIPELINE


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model whose layers from `own_layers` on are to be run by others."""

    model_id: str
    digest: str
    weights: WeightsFormat
    n_layers: int
    own_layers: int
    """Those below are loaded here."""
    numerics_id: str = ""
    """Of this node's kernels: others give other bytes. Empty: it is not known yet, or any may take part."""
    allows_unlike: bool = False
    context: int = 1 << 31
    """Tokens of the longest request."""
    kv_tokens: int = 0
    """The least KV that is of use."""
    rows: int = LEAST_ROWS
    """Of a batch."""
    objective: Objective = Objective.LATENCY
    pins: tuple[Pin, ...] = ()
    """Hold as long as all of these machines are there: where one is lost, any others may go on."""
    max_shards: int = 16
    min_host_trust: Trust = Trust.MEMBER
    allow_self: bool = True

    @property
    def remote(self) -> LayerRange:
        return LayerRange(self.own_layers, self.n_layers)


def choose(
    cards: Sequence[NodeCard],
    trust: Mapping[NodeId, Trust],
    own: NodeId,
    wanted: Wanted,
    exclude: frozenset[NodeId],
    last: Sequence[LayerSpan] = (),
) -> list[LayerSpan]:
    """Nodes in the order of their layers.

    Args:
        exclude: who must take no part.
        last: the route before. Those of it that are left keep their layers, where others can take those of the lost: they are loaded.

    Raises:
        ShardUnavailable, WeightsMismatch: no node can, or may.
    """
    allowed = allowed_hosts(cards, trust, own, wanted)
    there = frozenset(card.node_id for card in allowed) - exclude
    pins = wanted.pins if there.issuperset(pin.node_id for pin in wanted.pins) else ()
    if not pins and (kept := _kept_with_warm(allowed, own, wanted, last, there)):
        return kept
    request = replace(plan_request(own, wanted, exclude, pins), requests=1 if last else 10)
    if last and not pins and (mended := _mended(allowed, trust, request, last, there)):
        return mended
    try:
        stages = plan(allowed, request, (Pipelined(),), trust).chosen.stages
    except PlacementError as error:
        # What this node itself has loaded for others, or a machine that came just now.
        if not pins and (warm := warm_cover(allowed, own, wanted, exclude)):
            return warm
        stages = _with_one(allowed, request, trust)
        if not stages:
            raise ShardUnavailable(error.message, error.hint) from error
    return [LayerSpan(stage.node_id, stage.layers) for stage in stages[1:]]


def typical_request(context: int) -> tuple[int, int]:
    """Tokens of prompt and answer that plans are made for: no more than a context holds, or no machine with layers loaded would fit."""
    return min(TYPICAL_PROMPT, 2 * context // 3), min(TYPICAL_ANSWER, context // 3)


def plan_request(own: NodeId, wanted: Wanted, exclude: frozenset[NodeId], pins: tuple[Pin, ...] = ()) -> PlanRequest:
    """What placement is asked for a pipeline that begins on `own`."""
    prompt, answer = typical_request(wanted.context)
    return PlanRequest(
        wanted.digest,
        wanted.weights,
        prompt,
        answer,
        ways=frozenset({PIPELINE}),
        pins=pins,
        objective=wanted.objective,
        kv_tokens=wanted.kv_tokens,
        rows=max(LEAST_ROWS, wanted.rows),
        orchestrator=own,
        orchestrator_layers=wanted.own_layers,
        exclude=exclude,
        min_host_trust=wanted.min_host_trust,
        numerics_id=wanted.numerics_id,
        allows_unlike=wanted.allows_unlike,
        max_shards=wanted.max_shards,
        called=wanted.model_id,
    )


def _kept_with_warm(
    cards: Sequence[NodeCard], own: NodeId, wanted: Wanted, last: Sequence[LayerSpan], there: frozenset[NodeId]
) -> list[LayerSpan]:
    """The last route with loaded shards in the place of the machines that are not there: those that are left go on with their KV. None where a span is not
    covered.
    """
    parts: list[LayerSpan] = []
    outside = frozenset(card.node_id for card in cards) - there | {part.node_id for part in last}
    for part in last:
        if part.node_id in there:
            parts.append(part)
            continue
        span = replace(wanted, own_layers=part.layers.start, n_layers=part.layers.stop)
        try:
            found = warm_cover(cards, own, span, outside)
        except WeightsMismatch:
            return []
        if not found:
            return []
        parts += found
    return parts if len(parts) <= wanted.max_shards else []


def _mended(
    cards: Sequence[NodeCard], trust: Mapping[NodeId, Trust], request: PlanRequest, last: Sequence[LayerSpan], there: frozenset[NodeId]
) -> list[LayerSpan]:
    """The last route with spares in the place of the machines that are not there; none where a span finds no taker."""
    kept = [part for part in last if part.node_id in there]
    lost = [part.layers for part in last if part.node_id not in there]
    if not lost or not kept:
        return []
    try:
        spares = spares_for(cards, request, lost, frozenset(part.node_id for part in kept), trust)
    except PlacementError:
        return []
    parts = [*kept, *spares]
    return sorted(parts, key=lambda part: part.layers.start) if len(spares) == len(lost) else []


def _with_one(cards: Sequence[NodeCard], request: PlanRequest, trust: Mapping[NodeId, Trust]) -> Sequence[PlannedStage]:
    """A machine that came just now, so that the way to it is not measured yet, is as good as any where there is no other."""
    for card in sorted(cards, key=lambda card: (-card.memory_total_bytes, card.node_id)):
        if request.pins or card.node_id in {request.orchestrator, *request.exclude}:
            continue
        try:
            return plan(cards, replace(request, pins=(Pin(card.node_id),)), (Pipelined(),), trust).chosen.stages
        except PlacementError:
            continue
    return ()


def warm_cover(cards: Sequence[NodeCard], own: NodeId, wanted: Wanted, exclude: frozenset[NodeId]) -> list[LayerSpan]:
    """Shards that are loaded and compute the same bytes; none where they don't cover.

    Raises:
        WeightsMismatch: they would, but for other weights.
    """
    request = CoverRequest(
        wanted.model_id,
        wanted.digest,
        wanted.weights,
        wanted.remote,
        numerics_id=wanted.numerics_id,
        own=own,
        allow_self=wanted.allow_self,
        max_shards=wanted.max_shards,
        exclude=exclude,
    )
    try:
        return pick(warm_shards(cards), request)
    except ShardUnavailable:
        return []


def allowed_hosts(cards: Sequence[NodeCard], trust: Mapping[NodeId, Trust], own: NodeId, wanted: Wanted) -> list[NodeCard]:
    """Those that are trusted enough to hold layers."""
    policy = TrustPolicy(host=wanted.min_host_trust)
    return [card for card in cards if card.node_id == own or policy.allows(trust.get(card.node_id, Trust.MEMBER), Use.HOLD_LAYERS)]
