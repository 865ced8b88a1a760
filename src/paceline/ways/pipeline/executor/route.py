"""A way through the machines, as the pipeline's executor sees it: whom activations go to, whom they come from, and who finds another way.

Law: a route that broke is never mended, it is closed and another one is found. Its stages keep their KV for a while, and those that take part in the next
route go on with it. The node to blame stays out for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.ids import NodeId
from paceline.core.model import LayerSpan
from paceline.ways.pipeline.executor.sessions import ActivationSink, ActivationSource, PipelineFault


@dataclass(frozen=True, slots=True)
class RouteStage(LayerSpan):
    """One machine's part in a route."""

    shard_id: str
    numerics_id: str
    holds_identity: bool
    """Its kernels give a row the same bytes whatever runs beside it."""
    kv_tokens: int = 0
    """Whose KV of these layers fits what it leased."""
    resumed: bool | None = False
    """It has the KV of the same stage of the route before. None: it knows nothing of such things."""

    def __str__(self) -> str:
        return f"{self.layers.words} on {self.node_id}"


@dataclass(frozen=True, slots=True)
class Opening:
    """A route that is being opened, as far as its machines have loaded their layers."""

    bytes_done: int = 0
    bytes_total: int = 0
    """Over all machines; 0: none has said yet."""
    advanced: int = 0
    """Bytes gained since there was a route. Rises with progress and with nothing else: a load that is tried again counts once it is beyond
    where it was."""
    seconds_left: float | None = None
    """At the speed until now; None: not known."""
    nodes: tuple[NodeId, ...] = ()
    """Those that load."""

    @property
    def counts_no_bytes(self) -> bool:
        """What machines do now has no bytes, as far as is known: before the first they read kernels, one process of a machine at a time, and
        behind the last they compile.
        """
        return self.bytes_total <= self.bytes_done and bool(self.bytes_total or self.nodes)

    @property
    def percent(self) -> int:
        return 100 * self.bytes_done // self.bytes_total if self.bytes_total else 0

    def __str__(self) -> str:
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return f"{self.percent} %{left}"


class Route(Protocol):
    """Stages that were opened, in the order of their layers, from the first layer the orchestrator does not hold itself."""

    @property
    def stages(self) -> Sequence[RouteStage]: ...

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that batches name: as many as the stage, or the orchestrator, with the widest blocks keeps together."""
        ...

    @property
    def sink(self) -> ActivationSink:
        """Into the first stage."""
        ...

    @property
    def source(self) -> ActivationSource:
        """Out of the last."""
        ...

    def fault(self, wait_s: float = 0.0) -> PipelineFault | None:
        """What broke, as far as is known: a stage that is gone, or that reported a fault.

        Args:
            wait_s: how long to wait for word of it.
        """
        ...

    def suspect(self, received: int) -> PipelineFault:
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

    def find(self, wait_s: float) -> Route | Opening:
        """A route over machines that work; where none could be opened within `wait_s`, how far the attempt is, which goes on.

        Raises:
            PipelineError: there can be none: no nodes have the layers, or those who have them refuse.
        """
        ...

    def forget_kv(self) -> None:
        """What stages kept of routes before is of no use: the next begins with none."""
        ...

    def quarantine(self, fault: PipelineFault) -> None:
        """Leave out whom a fault blames, until it is known to work again."""
        ...

    def close(self) -> None:
        """Stop looking. Idempotent."""
        ...
