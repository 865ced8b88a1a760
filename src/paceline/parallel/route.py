"""A way through the machines, as the pipeline's executor sees it: whom activations go to, whom they come from, and who finds another way.

Law: a route that broke is never mended, it is closed and another one is found. Whoever was to blame stays out for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.parallel.links import ActivationSink, ActivationSource


@dataclass(frozen=True, slots=True)
class RouteStage:
    """One machine's part in a route."""

    node_id: NodeId
    layers: LayerRange
    shard_id: str
    numerics_id: str
    holds_identity: bool
    """Its kernels give a row the same bytes whatever runs beside it."""

    def __str__(self) -> str:
        return f"{self.layers.words} on {self.node_id}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a route can't go on."""

    node_id: NodeId | None
    """Who is held responsible; None where nobody knows."""
    code: str
    message: str


class Route(Protocol):
    """Stages that were opened, in the order of their layers, from the first layer the orchestrator does not hold itself."""

    @property
    def stages(self) -> Sequence[RouteStage]: ...

    @property
    def n_blocks(self) -> int:
        """KV blocks that every stage leased."""
        ...

    @property
    def sink(self) -> ActivationSink:
        """Into the first stage."""
        ...

    @property
    def source(self) -> ActivationSource:
        """Out of the last."""
        ...

    def fault(self, wait_s: float = 0.0) -> Fault | None:
        """What broke, as far as is known: a stage that is gone, or that reported a fault.

        Args:
            wait_s: how long to wait for word of it.
        """
        ...

    def suspect(self, received: int) -> Fault:
        """Who does not work on, now that nothing came within the bound. Does not wait.

        Args:
            received: batches that came out of the last stage.
        """
        ...

    def close(self) -> None:
        """End the session with every stage. Idempotent; does not wait for them."""
        ...


class Router(Protocol):
    """Finds routes. `find` is called by the engine's thread, and waits."""

    def find(self, wait_s: float) -> Route | None:
        """A route over machines that work, or None where none could be opened within `wait_s`.

        Raises:
            PipelineError: there can be none: nobody has the layers, or those who have them refuse.
        """
        ...

    def quarantine(self, fault: Fault) -> None:
        """Leave out whom a fault blames, until it is known to work again."""
        ...

    def close(self) -> None:
        """Stop looking. Idempotent."""
        ...
