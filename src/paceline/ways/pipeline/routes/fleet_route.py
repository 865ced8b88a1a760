"""A route over the fleet: a session with each stage, and the two ends of the activations' way.

Law: as soon as a stage is gone, a thread that waits for activations is woken; `close` ends everything and waits for nothing. What is read here from
the engine's thread is set by the event loop once and for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from paceline.engine.local import WireBits
from paceline.ways.pipeline.client import RemoteStage, StageLoss
from paceline.ways.pipeline.executor.links import ActivationSink, ActivationSource, Rehearse
from paceline.ways.pipeline.executor.route import Fault, RouteStage
from paceline.ways.pipeline.executor.stage_batch import StageBatch
from paceline.ways.pipeline.host.ends import Incoming


class FleetRoute:
    """A `ways.pipeline.executor.route.Route`. Made on the event loop.

    Args:
        stages: what each runs, in order.
        block_size: tokens of the blocks that batches name.
        sink: into the first stage.
        incoming: out of the last.
    """

    def __init__(
        self,
        stages: Sequence[RouteStage],
        block_size: int,
        sessions: Sequence[RemoteStage],
        sink: ActivationSink,
        incoming: Incoming,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.stages, self.block_size = tuple(stages), block_size
        self.sink: ActivationSink = sink
        self.source: ActivationSource = _Acknowledging(incoming)
        self.sessions = tuple(sessions)
        self._loop = loop
        self._closed = False
        self._accused: Fault | None = None
        for session in self.sessions:
            session.lost.add_done_callback(lambda _: self._wake())

    def accuse(self, fault: Fault) -> None:
        """End the route for what was found out about a stage. For any thread."""
        self._accused = self._accused or fault
        self._wake()

    def fault(self, wait_s: float = 0.0) -> Fault | None:
        if self._accused is not None:
            return self._accused
        if wait_s:
            wait([session.lost for session in self.sessions], wait_s, FIRST_COMPLETED)
        losses = [(place, session.lost.result()) for place, session in enumerate(self.sessions) if session.lost.done()]
        # A node that broke off knows less of others than those who still speak, and is itself the likeliest reason of what they say.
        losses.sort(key=lambda pair: pair[1].fault is not None)
        return self._fault(*losses[0]) if losses and not self._closed else None

    def suspect(self, received: int) -> Fault:
        for place, session in enumerate(self.sessions):
            report = session.report
            if report.sent > received:
                continue
            culprit = session.node_id
            if report.computed > received and place + 1 < len(self.sessions):
                culprit = self.sessions[place + 1].node_id  # it computed, and can't get rid of the result
            return Fault(culprit, "pipeline_stalled", f"{culprit} has let nothing through for too long")
        last = self.sessions[-1].node_id
        return Fault(last, "pipeline_stalled", f"{last} says it has sent what never came")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake()

        async def end() -> None:
            await asyncio.gather(*(session.close() for session in self.sessions), return_exceptions=True)

        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(end(), self._loop)

    def _fault(self, place: int, loss: StageLoss) -> Fault:
        """Whom a loss is held against. A stage knows only those it receives from and sends to; of this node it may say what it likes."""
        node_id, told = self.sessions[place].node_id, loss.fault
        beside = {self.sessions[at].node_id for at in (place - 1, place + 1) if 0 <= at < len(self.sessions)}
        if told is not None and told.blames is not None and told.blames in beside:
            return Fault(told.blames, told.code, f"{node_id} says: {told.message}")
        return Fault(node_id, getattr(loss.error, "code", "shard_unavailable"), loss.error.message)

    def _wake(self) -> None:
        self.source.close()
        self.sink.close()


class _Acknowledging:
    """Tells the last stage, with each batch that is asked for, that the one before is done with."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming

    def receive(self, deadline: float, rehearse: Rehearse | None = None) -> tuple[StageBatch, WireBits]:
        self._incoming.acknowledge()
        return self._incoming.receive(deadline, rehearse)

    def close(self) -> None:
        self._incoming.close()
