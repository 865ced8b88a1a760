"""What a person asked of a pipeline, and what the plan makes of it: how many layers stay on this machine.

How many pipelines begin on a node at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.core.clock import Clock
from paceline.core.errors import ConfigError, OutOfMemory, PlacementError, ShardUnavailable
from paceline.core.model import LayerRange
from paceline.fleet.placement import plan
from paceline.fleet.plan import LEAST_ROWS, Choice, Objective, Pin, PlanRequest
from paceline.machine.config_file import PipelineSettings
from paceline.machine.setup import Setup
from paceline.machine.sizing import KvPlan
from paceline.ways.pipeline.price import Pipelined
from paceline.ways.pipeline.routes.choosing import typical_request
from paceline.ways.pipeline.routes.opening import SeesFleet
from paceline.ways.pipeline.splits import PIPELINE


class PipelineSlots:
    """Counts those that are open. Taken on the event loop; given back from any thread."""

    def __init__(self) -> None:
        self._taken: set[object] = set()

    @property
    def taken(self) -> int:
        """Those open, or opening."""
        return len(self._taken)

    def take(self, most: int) -> Callable[[], None]:
        """One more pipeline. Returns what gives its place back; calling that again does nothing.

        Args:
            most: at once.

        Raises:
            ShardUnavailable: there are as many already.
        """
        if len(self._taken) >= most:
            raise ShardUnavailable(
                f"{len(self._taken)} pipelines begin on this machine, and no more are allowed at once", "Raise max_concurrent_pipelines."
            )
        place = object()
        self._taken.add(place)
        return lambda: self._taken.discard(place)


logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at a view in which no node can take part yet."""


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """What a person asked for, of one pipeline."""

    settings: PipelineSettings
    pins: tuple[Pin, ...] = ()
    own_layers: int | None = None
    """How many layers this machine runs itself; None: as the plan says."""
    objective: Objective = Objective.LATENCY
    planned: Choice | None = None
    """What the node's plan chose, which is what is built; None: it is planned here."""


def check_layers(order: PipelineOrder, model: str, n_layers: int) -> None:
    """What no machine that may yet come could mend.

    Raises:
        ConfigError: layers were asked for that the model has not, or none are left for others.
    """
    if order.own_layers is not None and order.own_layers >= n_layers:
        raise ConfigError(
            f"--own-layers {order.own_layers} leaves none of the {n_layers} layers of {model} to others",
            f"Ask for {n_layers - 1} at most; without --pipeline this machine runs them all.",
        )
    for pin in order.pins:
        if pin.layers is not None and not pin.layers.start < pin.layers.stop <= n_layers:
            raise ConfigError(
                f"--pin gives {pin.node_id} layers {pin.layers.words}, and {model} has {n_layers}",
                f"Layers are 0 to {n_layers - 1}.",
            )


def fitting(fleet: SeesFleet, order: PipelineOrder, setup: Setup, clock: Clock) -> tuple[Choice, LayerRange, KvPlan]:
    """What the plan says, the layers that this machine runs of it, and room for their KV: fewer where the plan, which rounds, gives it too many.

    Raises:
        PlacementError: others can't run the rest.
        OutOfMemory: the layers asked for, or none at all, don't fit here, or fewer would, and others can't run the rest.
    """
    asked, short = order, None
    while True:
        try:
            planned = asked.planned or _planned(fleet, asked, setup, clock)
        except PlacementError as error:
            if short is None:
                raise
            raise short from error
        own = LayerRange(0, asked.own_layers if asked.own_layers is not None else len(planned.stages[0].layers))
        try:
            return planned, own, setup.room(own)
        except OutOfMemory as error:
            if order.own_layers is not None or not own:
                raise
            short = error
            asked = replace(asked, own_layers=len(own) - 1, planned=None)


def longest_context(setup: Setup) -> int:
    """Tokens of the longest request that is asked for."""
    return setup.settings.context or setup.opened.spec.max_context


def _planned(fleet: SeesFleet, order: PipelineOrder, setup: Setup, clock: Clock) -> Choice:
    """What the plan says of a pipeline that begins here; waits for machines that could take part.

    Raises:
        PlacementError: none came in time.
    """
    name = setup.opened.name
    prompt, answer = typical_request(longest_context(setup))
    request = PlanRequest(
        setup.digest,
        setup.weights,
        prompt,
        answer,
        ways=frozenset({PIPELINE}),
        pins=order.pins,
        objective=order.objective,
        kv_tokens=setup.settings.context or 0,
        rows=max(LEAST_ROWS, setup.most.max_rows),
        orchestrator=fleet.node_id,
        orchestrator_layers=order.own_layers,
        min_host_trust=order.settings.min_host_trust,
        called=name,
    )
    until = clock.monotonic() + order.settings.search_seconds
    told = ""
    while True:
        try:
            return plan(fleet.cards(), request, (Pipelined(),), fleet.trust()).chosen
        except PlacementError as error:
            if clock.monotonic() >= until:
                raise
            if error.message != told:
                told = error.message
                logger.info("waiting for machines that %s could run on, for up to %g s: %s", name, order.settings.search_seconds, told)
        fleet.wait_for_news(LOOK_S)
