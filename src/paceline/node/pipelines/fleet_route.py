"""A route over the fleet: a session with each stage, and the two ends of the activations' way.

Law: as soon as a stage is gone, whoever waits for activations is woken; `close` ends everything and waits for nothing. What is read here from
the engine's thread is set by the event loop once and for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait

from paceline.core.ids import NodeId
from paceline.engine.local import WireBits
from paceline.node.shards.ends import Incoming
from paceline.parallel.links import ActivationSink, ActivationSource
from paceline.parallel.route import Fault, RouteStage
from paceline.parallel.stage_batch import StageBatch
from paceline.transport.shard_client import RemoteStage, StageLoss


class FleetRoute:
    """A `parallel.route.Route`. Made on the event loop.

    Args:
        own: this node.
        stages: what each runs, in order.
        sessions: with each.
        sink: into the first stage.
        incoming: out of the last.
        loop: the sessions'.
    """

    def __init__(
        self,
        own: NodeId,
        stages: Sequence[RouteStage],
        sessions: Sequence[RemoteStage],
        sink: ActivationSink,
        incoming: Incoming,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.stages = tuple(stages)
        self.n_blocks = min(session.opened.n_blocks for session in sessions)
        self.sink: ActivationSink = sink
        self.source: ActivationSource = _Acknowledging(incoming)
        self.sessions = tuple(sessions)
        self._own, self._loop = own, loop
        self._closed = False
        self._accused: Fault | None = None
        for session in self.sessions:
            session.lost.add_done_callback(lambda _: self._wake())

    def accuse(self, fault: Fault) -> None:
        """End the route for what somebody found out about a stage. For any thread."""
        self._accused = self._accused or fault
        self._wake()

    def fault(self, wait_s: float = 0.0) -> Fault | None:
        if self._accused is not None:
            return self._accused
        if wait_s:
            wait([session.lost for session in self.sessions], wait_s, FIRST_COMPLETED)
        losses = [(session.node_id, session.lost.result()) for session in self.sessions if session.lost.done()]
        # A node that broke off knows less of others than those who still speak, and is itself the likeliest reason of what they say.
        losses.sort(key=lambda pair: pair[1].fault is not None)
        return _fault(*losses[0], self._own) if losses and not self._closed else None

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

    def _wake(self) -> None:
        self.source.close()
        self.sink.close()


def _fault(node_id: NodeId, loss: StageLoss, own: NodeId) -> Fault:
    code = getattr(loss.error, "code", "shard_unavailable")
    if loss.fault is not None and loss.fault.blames is not None and loss.fault.blames != own:
        return Fault(loss.fault.blames, loss.fault.code, f"{node_id} says: {loss.fault.message}")
    return Fault(node_id, code, loss.error.message)


class _Acknowledging:
    """Tells the last stage, with each batch that is asked for, that the one before is done with."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming

    def receive(self, deadline: float) -> tuple[StageBatch, WireBits]:
        self._incoming.acknowledge()
        return self._incoming.receive(deadline)

    def close(self) -> None:
        self._incoming.close()
