"""A stage on another node, as an orchestrator holds it. The stage lives as long as the call that opened it.

What it reports is kept as it comes. When it is gone, whichever way, `lost` says why, at once and for good; so `lost` is all there is to
watch, and it may be watched from any thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import grpc
import grpc.aio

from paceline.core import errors
from paceline.core.clock import silence_allowed
from paceline.core.errors import FleetError, NodeUnreachable, PacelineError, PipelineError, PipelineStalled, ShardUnavailable
from paceline.core.ids import NodeId
from paceline.net.rpc_faults import error_of, unless_closed
from paceline.net.wire import shard_pb2 as wire
from paceline.net.wire.shard_pb2_grpc import ShardServiceStub
from paceline.ways.pipeline.codec import read_event, write_blocks, write_connect, write_open, write_warm
from paceline.ways.pipeline.executor.route import (
    BlocksAsked,
    BlocksDone,
    BlocksUse,
    NextStage,
    PipelineFault,
    StageEvent,
    StageLoading,
    StageOpened,
    StageReport,
    StageRequest,
    said_of,
)

FIRST_WORD_S = 6.0
"""Longest wait for a node's first word: a host that has the layers opens at once, any other says that it loads. Raising it: a route over a
machine that is asleep is given up later, and machines that are awake take over later."""
SILENCE_S = 20.0
"""Longest wait for news while a stage loads, and for a further byte while bytes are counted. Raising it holds on longer to one that hangs."""
SILENT_REPORTS = 8
"""Reports that may be missing in a row, of a stage that is open."""
LEAST_SILENCE_S = 2.0
LISTENED = 8
"""Parts in which silence is waited for. Time in which this process stood still passes in one of them: it is not the other's silence."""
CALL_S = 10.0
"""For ConnectStage and WarmLayers; and for KvBlocks beside what the stage may take, where it is to be known what the stage does with blocks."""
FIND_CALL_S = 0.5
"""Beside that, where blocks are only looked for. Raising it: a prompt is computed later where a stage hangs."""

Call = grpc.aio.UnaryStreamCall[wire.OpenStageRequest, wire.OpenStageResponse]


class RemoteStage:
    """One session with one stage. Made by `open_stage`; close it. Attributes may be read from any thread, methods are for its event loop."""

    def __init__(self, node_id: NodeId, request: StageRequest, opened: StageOpened, channel: grpc.aio.Channel, call: Call) -> None:
        self.node_id: Final = node_id
        self.request: Final = request
        self.opened: Final = opened
        self.report = StageReport()
        """The latest."""
        self.lost: Final[Future[PipelineFault]] = Future()
        """Done once the stage is gone, by its fault, its end or `close`."""
        self._call: Final = call
        self._stub: Final = ShardServiceStub(channel)
        self._silence_s: Final = max(LEAST_SILENCE_S, SILENT_REPORTS * request.report_s)
        self._follower: Final = asyncio.create_task(self._follow(), name=f"stage-at-{node_id}")

    async def connect(self, to: NextStage) -> None:
        """Say where results go; returns once the stage has reached it.

        Raises:
            ShardUnavailable: it can't reach it. The stage itself is as good as before.
            NodeUnreachable: the stage's own node is gone.
            FleetError: it refuses.
        """
        with _heard(self.node_id):
            await self._stub.ConnectStage(write_connect(self.request.session_id, to), timeout=CALL_S)

    async def use_blocks(self, asked: BlocksAsked) -> BlocksDone:
        """Find, restore or keep blocks on the disk of the stage's node, move them, or compare them.

        Raises:
            FleetError: it is not known what the stage does with them.
        """
        message = write_blocks(asked, session_id=self.request.session_id)
        with _heard(self.node_id):
            beside_s = FIND_CALL_S if asked.use is BlocksUse.FIND else CALL_S
            call = asyncio.ensure_future(self._stub.KvBlocks(message, timeout=asked.within_s + beside_s))
            try:
                await asyncio.wait({call, self._follower}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    raise PipelineError(f"The session with {self.node_id} ended meanwhile")
                said = call.result()
            finally:
                call.cancel()
        return BlocksDone(min(said.n_blocks, len(asked.keys)), said.is_wrong)

    async def close(self) -> None:
        """End the session there too. Idempotent."""
        self._lose(self._seen(PipelineError(f"The session with {self.node_id} was closed")))
        self._call.cancel()
        await asyncio.wait({self._follower})

    async def _follow(self) -> None:
        """Keep reports until there are no more."""
        try:
            while True:
                match await _next(self._call, self.node_id, self.request, self._silence_s):
                    case StageReport() as report:
                        self.report = report
                    case PipelineFault() as fault:
                        self._lose(replace(fault, reported=True))
                        return
                    case _:
                        raise FleetError(f"{self.node_id} says out of turn how far it is")
        except PacelineError as error:
            self._lose(self._seen(error))
        finally:
            self._call.cancel()

    def _seen(self, error: PacelineError) -> PipelineFault:
        return PipelineFault(self.node_id, getattr(error, "code", ShardUnavailable.code), error.message)

    def _lose(self, fault: PipelineFault) -> None:
        if not self.lost.done():
            self.lost.set_result(fault)


async def open_stage(
    channel: grpc.aio.Channel,
    node_id: NodeId,
    request: StageRequest,
    on_loading: Callable[[StageLoading], None] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> RemoteStage:
    """Ask a node for a stage, and wait for as long as it loads further bytes. Cancelled, no session is left there.

    Args:
        channel: to that node, for as long as the stage.

    Raises:
        PipelineError: the node refuses, or loads nothing more.
        FleetError: it can't be reached, or makes no sense.
    """
    with _heard(node_id):
        call = ShardServiceStub(channel).OpenStage(write_open(request))
    silence_s, most, moved_s = FIRST_WORD_S, 0, now()
    try:
        while True:
            event, silence_s = await _next(call, node_id, request, silence_s), SILENCE_S
            match event:
                case StageOpened() as opened:
                    return RemoteStage(node_id, request, opened, channel, call)
                case StageLoading(done, total) as loading:
                    if on_loading is not None:
                        on_loading(loading)
                    if done > most:
                        most, moved_s = done, now()
                    still_s = silence_allowed(done, total, SILENCE_S)
                    if now() - moved_s > still_s:
                        raise PipelineStalled(f"{node_id} loaded nothing more for {still_s:g} s, at {done} of {total} bytes")
                case PipelineFault() as fault:
                    raise error_of_fault(fault, node_id)
                case StageReport():
                    raise FleetError(f"{node_id} reports of a stage that is not open")
    except BaseException:
        call.cancel()
        raise


async def warm_layers(channel: grpc.aio.Channel, node_id: NodeId, request: StageRequest) -> StageLoading | None:
    """Have a node load layers that may come to be needed, or go on keeping them. Nothing is leased.

    Returns:
        How far the load is; None: they are in memory.

    Raises:
        PipelineError: the node refuses, as it has not the memory.
        FleetError: it can't be reached.
    """
    with _heard(node_id):
        said = await ShardServiceStub(channel).WarmLayers(write_warm(request), timeout=CALL_S)
    return None if said.loaded else StageLoading(said.loading.bytes_done, said.loading.bytes_total)


def error_of_fault(fault: PipelineFault, node_id: NodeId) -> PipelineError:
    """A stage's fault as the error it names."""
    kinds = {kind.code: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PipelineError)}
    return kinds.get(fault.code, PipelineError)(said_of(node_id, fault.message))


async def _next(call: Call, node_id: NodeId, request: StageRequest, silence_s: float) -> StageEvent:
    """The next event.

    Raises:
        FleetError: there is none, for whatever reason.
    """
    reading = asyncio.ensure_future(call.read())
    try:
        for _ in range(LISTENED):
            if (await asyncio.wait({reading}, timeout=silence_s / LISTENED))[0]:
                break
        else:
            raise PipelineStalled(f"{node_id} has said nothing for {silence_s:g} s")
        with _heard(node_id):
            message = await reading
    finally:
        reading.cancel()
    if not isinstance(message, wire.OpenStageResponse):  # grpc's mark of a stream's end
        raise NodeUnreachable(f"{node_id} ended the session")
    return read_event(message, request)


@contextmanager
def _heard(node_id: NodeId) -> Generator[None]:
    """Has whatever ends a call as a `FleetError`."""
    try:
        with unless_closed(node_id):
            yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error, node_id) from error
