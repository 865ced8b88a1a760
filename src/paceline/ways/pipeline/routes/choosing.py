"""What the plan is asked for a pipeline: when it opens, and when it is to go on after a loss.

Pure: the view is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import PlacementError, ShardUnavailable
from paceline.core.ids import NodeId, Trust
from paceline.core.model import LayerRange, LayerSpan
from paceline.fleet.card import NodeCard
from paceline.fleet.machines import barred_hosts
from paceline.fleet.placement import plan
from paceline.fleet.plan import TYPICAL_ANSWER, TYPICAL_PROMPT, PlanRequest
from paceline.ways.pipeline.cover import warm_cover
from paceline.ways.pipeline.price import Pipelined


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model whose layers are to be run by others, behind those that the orchestrator has loaded."""

    request: PlanRequest
    """Its pins hold as long as all of their machines are there: where one is lost, any others may go on."""
    layers: LayerRange


def typical_request(context: int) -> tuple[int, int]:
    """Tokens of prompt and answer that plans are made for: no more than a context holds, or no machine with layers loaded would fit."""
    return min(TYPICAL_PROMPT, 2 * context // 3), min(TYPICAL_ANSWER, context // 3)


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
        warm_cover(cards, request, wanted.layers, trust)  # where only other weights cover the layers, that is what is wrong
        raise ShardUnavailable(error.message, error.hint) from error
    return [LayerSpan(stage.node_id, stage.layers) for stage in stages[1:]]
