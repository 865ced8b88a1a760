"""A pipeline as a person asked for it, and the request for its plan. Commands that only plan import this, and nothing that builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.ids import NodeId
from paceline.fleet.plan import TYPICAL_ANSWER, TYPICAL_PROMPT, Choice, Objective, Pin, PlanRequest
from paceline.ways.pipeline.splits import PIPELINE

if TYPE_CHECKING:
    from paceline.machine.config_file import PipelineSettings


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """A pipeline that a person asked for."""

    settings: PipelineSettings
    pins: tuple[Pin, ...] = ()
    own_layers: int | None = None
    """Number of layers that this machine runs itself; None: the plan decides."""
    objective: Objective = Objective.LATENCY
    planned: Choice | None = None
    """The choice of the node's plan, to be built; None: the builder plans."""
    exact: bool = False
    """Only machines that compute the same bytes may run layers."""


def request_of(order: PipelineOrder, model: str, weights: str, own: NodeId | None, lengths: tuple[int, int]) -> PlanRequest:
    """Return the request for a plan of an ordered pipeline. `node.ways.plan_request` extends it to all ways.

    Args:
        model, weights: as `PlanRequest` has them.
        own: the node that begins the pipeline; None: any node.
        lengths: tokens of a typical prompt and answer.
    """
    prompt, answer = lengths
    settings = order.settings
    layers = 0 if order.own_layers is None and not settings.allow_self_as_shard else order.own_layers
    request = PlanRequest(
        model,
        weights,
        prompt,
        answer,
        ways=frozenset({PIPELINE}),
        pins=order.pins,
        objective=order.objective,
        orchestrator=own,
        orchestrator_layers=None if own is None else layers,
        exact=order.exact,
    )
    return settings.constrained(request)


def typical_request(context: int) -> tuple[int, int]:
    """Return the tokens of prompt and answer that plans are made for. They fit the context, so that machines with loaded layers have room."""
    return min(TYPICAL_PROMPT, 2 * context // 3), min(TYPICAL_ANSWER, context // 3)
