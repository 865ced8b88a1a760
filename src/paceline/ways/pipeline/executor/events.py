"""What a pipeline's executor tells: a watch, which counts; an inspector, which looks whether stages compute what they should; and, as routes break and
others take over, the log and clients that ask.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

from paceline.core.clock import Clock
from paceline.core.errors import ExecutorUnavailable
from paceline.core.following import Following
from paceline.core.generation import LOCAL_FALLBACK, NUMERICS_CHANGED, Notice
from paceline.engine.local import WireBits
from paceline.ways.pipeline.executor.route import Opening, PipelineFault, Route, RouteStage, StageReport, said_of
from paceline.ways.pipeline.executor.stage import StageBatch


class PipelineWatch:
    """Told by the engine's thread; must not wait. This one counts nothing."""

    def constructed(self, seconds: float, *, failover: bool) -> None:
        """A route was found, so long after it was first looked for.

        Args:
            failover: one broke, and other machines take over.
        """

    def stepped(self, seconds: float) -> None:
        """A batch came back, so long after it was sent to the first machine."""

    def hopped(self, stage: RouteStage, seconds: float, batches: int) -> None:
        """So many more batches went through a stage, with so long each between arrival and departure."""

    def lost(self, fault: PipelineFault) -> None:
        """A route broke."""

    def fell_back(self) -> None:
        """This machine took over."""


class Inspector(Protocol):
    """Told of every batch by the thread that runs them. Returns at once, keeps no array it is shown, and never raises."""

    def sent(self, route: Route, batch: StageBatch, x_TD: WireBits) -> None:
        """A batch is about to be sent."""
        ...

    def came(self, batch: StageBatch, x_TD: WireBits) -> None:
        """It is back, from the last stage of the same route."""
        ...

    def close(self) -> None:
        """The pipeline ends. Idempotent."""
        ...


logger = logging.getLogger(__name__)

LOADING_S = 2.0
"""Between two notices of how far a load is. Lowering it: clients that wait read more of them."""


class RouteEvents:
    """Of one pipeline.

    Args:
        layers: that its routes run, for messages.
    """

    def __init__(self, layers: str, watch: PipelineWatch, clock: Clock) -> None:
        self._layers, self._watch, self._clock = layers, watch, clock
        self.pipeline_id = os.urandom(4).hex()
        """What logs, metrics and status call the pipeline, over whatever routes it goes."""
        self._said_at = 0.0
        self._notices: list[Notice] = []
        self._fault: PipelineFault | None = None
        """Of the route before."""
        self._stepped: Route | None = None
        self._reports: list[StageReport] = []
        """Of its stages, as far as they are counted."""
        self.failovers = 0

    def take(self) -> Sequence[Notice]:
        """What clients have not been told."""
        taken, self._notices = self._notices, []
        return taken

    def lost(self, fault: PipelineFault) -> None:
        logger.warning("pipeline %s broke: %s", self.pipeline_id, said_of(fault.node_id or "an unknown node", fault.message))
        self._note("shard_status", status="degraded", node=fault.node_id or "unknown", code=fault.code, reason=fault.message)
        self._fault = fault
        self._watch.lost(fault)

    def opening(self, opening: Opening) -> None:
        """Machines load the layers."""
        now = self._clock.monotonic()
        if self._fault is None or not opening.nodes or now - self._said_at < LOADING_S:
            return
        self._said_at = now
        logger.info(
            "pipeline %s: layers %s are being loaded by %s: %s", self.pipeline_id, self._layers, " and ".join(opening.nodes), opening
        )
        left = {} if opening.seconds_left is None else {"seconds_left": f"{opening.seconds_left:.0f}"}
        self._note("shard_status", status="loading", nodes=", ".join(opening.nodes), percent=str(opening.percent), **left)

    def found(self, route: Route, seconds: float) -> None:
        """There is a route over others, found in so long."""
        self._watch.constructed(seconds, failover=self._fault is not None)
        shards = ", ".join(f"{stage.shard_id} on {stage.node_id}" for stage in route.stages)
        fault, self._fault = self._fault, None
        if fault is not None:
            logger.warning("pipeline %s goes on over %s", self.pipeline_id, shards)
            self._note("shard_failover", lost=fault.node_id or "unknown", route=shards)
            self.failovers += 1

    def numerics_changed(self, route: Route, before: str, after: str) -> None:
        """Tell that answers continue with other numerics from here on.

        Args:
            before, after: numerics ids of the pipeline; empty: its stages differ from one another.
        """
        nodes = ", ".join(dict.fromkeys(stage.node_id for stage in route.stages))
        logger.warning("pipeline %s computes other bytes from here on, over %s", self.pipeline_id, nodes)
        self._notices.append(
            Notice(NUMERICS_CHANGED, {"node": nodes, "from": before, "to": after, "matched_by": Following.BY_DIGEST.value})
        )

    def stepped(self, route: Route, seconds: float) -> None:
        """A batch came back over a route, so long after it was sent."""
        self._watch.stepped(seconds)
        if self._stepped is not route:
            self._stepped, self._reports = route, [StageReport()] * len(route.stages)
        for place, (stage, now, before) in enumerate(zip(route.stages, route.reports, self._reports, strict=False)):
            batches, took_s = now.sent - before.sent, now.latency_s - before.latency_s
            if batches > 0 and took_s > 0:  # what a machine says may be anything
                self._watch.hopped(stage, took_s / batches, batches)
                self._reports[place] = now

    def aborted(self, error: ExecutorUnavailable) -> None:
        self._note("pipeline_aborted", code=error.code, reason=error.message)

    def fell_back(self, reason: str) -> None:
        self._note(LOCAL_FALLBACK, layers=self._layers, reason=reason)
        self._watch.fell_back()
        self._fault = None

    def restored(self) -> None:
        logger.warning("pipeline %s: layers %s run on other machines again", self.pipeline_id, self._layers)
        self._note("shard_status", status="restored", layers=self._layers)

    def _note(self, kind: str, **detail: str) -> None:
        self._notices.append(Notice(kind, detail))
