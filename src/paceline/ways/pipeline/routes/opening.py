"""Opens routes over the fleet: a session with each node that takes part, connected one to the next, from this node and back to it.

Laws:
- A route that can't be opened leaves no session behind, and `NotOpened` says which nodes were in the way.
- As soon as a stage is gone, a thread that waits for activations is woken; `close` ends everything and waits for nothing. What the engine's thread
  reads here, the event loop has set once and for all.
- Progress of loads only rises. A node whose load failed and began anew has made none until it is beyond where it was, so that one which fails again
  and again is not waited for.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.clock import Clock
from paceline.core.errors import FleetError, ShardUnavailable, WeightsMismatch
from paceline.core.following import is_same_arithmetic
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, WIDEST_BLOCK, LayerSpan, shard_id
from paceline.net.tensor.dialling import tensor_addresses
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.ways.pipeline.client import RemoteStage, error_of_fault, open_stage
from paceline.ways.pipeline.executor.route import (
    SESSION_ID_BYTES,
    ActivationSink,
    ActivationSource,
    NextStage,
    Opening,
    PipelineFault,
    RouteStage,
    StageLoading,
    StageReport,
    StageRequest,
    said_of,
)
from paceline.ways.pipeline.host.ends import StreamSource, TensorEnds, opened_in_thread
from paceline.ways.pipeline.routes.fleet_access import FleetAccess


class FleetRoute:
    """A `ways.pipeline.executor.route.Route`. Made on the event loop."""

    def __init__(
        self,
        stages: Sequence[RouteStage],
        block_size: int,
        sessions: Sequence[RemoteStage],
        sink: ActivationSink,
        incoming: StreamSource,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.stages, self.block_size = tuple(stages), block_size
        self.sink: ActivationSink = sink
        self.source: ActivationSource = incoming
        self.sessions = tuple(sessions)
        self._loop = loop
        self._closed = False
        self._accused: PipelineFault | None = None
        for session in self.sessions:
            session.lost.add_done_callback(lambda _: self._wake())

    @property
    def reports(self) -> Sequence[StageReport]:
        return [session.report for session in self.sessions]

    def accuse(self, fault: PipelineFault) -> None:
        """End the route for what was found out about a stage. For any thread."""
        self._accused = self._accused or fault
        self._wake()

    def fault(self, wait_s: float = 0.0) -> PipelineFault | None:
        if self._accused is not None:
            return self._accused
        if wait_s:
            wait([session.lost for session in self.sessions], wait_s, FIRST_COMPLETED)
        faults = [(place, session.lost.result()) for place, session in enumerate(self.sessions) if session.lost.done()]
        # A node that broke off knows less of others than those who still speak, and is itself the likeliest reason of what they say.
        faults.sort(key=lambda pair: pair[1].reported)
        return self._blamed(*faults[0]) if faults and not self._closed else None

    def suspect(self, received: int) -> PipelineFault:
        for place, session in enumerate(self.sessions):
            report = session.report
            if report.sent > received:
                continue
            culprit = session.node_id
            if report.computed > received and place + 1 < len(self.sessions):
                culprit = self.sessions[place + 1].node_id  # it computed, and can't get rid of the result
            return PipelineFault(culprit, "pipeline_stalled", f"{culprit} has let nothing through for too long")
        last = self.sessions[-1].node_id
        return PipelineFault(last, "pipeline_stalled", f"{last} says it has sent what never came")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake()

        async def end() -> None:
            await asyncio.gather(*(session.close() for session in self.sessions), return_exceptions=True)

        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(end(), self._loop)

    def _blamed(self, place: int, fault: PipelineFault) -> PipelineFault:
        """Whom it is held against. A stage knows only those it receives from and sends to; of this node it may say what it likes."""
        if not fault.reported:
            return fault
        node_id = self.sessions[place].node_id
        if fault.node_id in {self.sessions[at].node_id for at in (place - 1, place + 1) if 0 <= at < len(self.sessions)}:
            return replace(fault, message=f"{node_id} says: {fault.message}")
        error = error_of_fault(fault, node_id)
        return PipelineFault(node_id, error.code, error.message)

    def _wake(self) -> None:
        self.source.close()
        self.sink.close()


@dataclass(slots=True)
class _Load:
    """One machine's."""

    began_s: float
    began_bytes: int
    progress: StageLoading

    def seconds_left(self, now_s: float) -> float | None:
        """At its pace until now: while nothing comes, it takes longer."""
        gained = self.progress.bytes_done - self.began_bytes
        if gained <= 0 or now_s <= self.began_s:
            return None
        return (self.progress.bytes_total - self.progress.bytes_done) * (now_s - self.began_s) / gained


class StageLoads:
    """Of one router. Told on the event loop, asked by the engine's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._parts: tuple[LayerSpan, ...] = ()
        self._loads: dict[LayerSpan, _Load] = {}
        self._most: dict[LayerSpan, int] = {}
        """Bytes that each had at most, over all attempts."""

    def begin(self, parts: Sequence[LayerSpan]) -> None:
        with self._lock:
            self._parts, self._loads = tuple(parts), {}

    def note_progress(self, part: LayerSpan, progress: StageLoading) -> None:
        now = self._clock.monotonic()
        with self._lock:
            load = self._loads.setdefault(part, _Load(now, progress.bytes_done, progress))
            load.progress = progress
            self._most[part] = max(self._most.get(part, 0), progress.bytes_done)

    def opened(self, part: LayerSpan) -> None:
        with self._lock:
            if (load := self._loads.get(part)) is not None:
                load.progress = StageLoading(load.progress.bytes_total, load.progress.bytes_total)

    def end(self) -> None:
        with self._lock:
            self._parts, self._loads, self._most = (), {}, {}

    @property
    def opening(self) -> Opening:
        now = self._clock.monotonic()
        with self._lock:
            loads = [(part, load) for part in self._parts if (load := self._loads.get(part)) is not None]
            left = [load.seconds_left(now) for _, load in loads if load.progress.bytes_done < load.progress.bytes_total]
            known = [seconds for seconds in left if seconds is not None]
            return Opening(
                sum(load.progress.bytes_done for _, load in loads),
                sum(load.progress.bytes_total for _, load in loads),
                sum(self._most.values()),
                max(known) if known and len(known) == len(left) else None,
                tuple(
                    part.node_id
                    for part, load in loads
                    if load.progress.bytes_done < load.progress.bytes_total or not load.progress.bytes_total
                ),
            )


CONNECT_S = 5.0


class NotOpened(Exception):
    """A route can't be had as chosen."""

    def __init__(self, refusals: Mapping[NodeId, FleetError]) -> None:
        super().__init__(refusals_said(refusals))
        self.refusals = refusals


def refusals_said(refusals: Mapping[NodeId, FleetError]) -> str:
    """Who is in the way, and why."""
    return "; ".join(said_of(node_id, error.message) for node_id, error in refusals.items())


class RouteOpener:
    """For the event loop.

    Args:
        request: what every stage is asked for, but for its layers and the session's id.
        block_size: tokens that this node's KV keeps together.
    """

    def __init__(
        self,
        fleet: FleetAccess,
        ends: TensorEnds,
        request: StageRequest,
        width: int,
        block_size: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._fleet, self._ends, self._request = fleet, ends, request
        self._width, self._block_size, self._loop = width, block_size, loop
        self.least_blocks = request.least_blocks
        """Fewer KV blocks than these are of no use, at present."""
        self.numerics_id = ""
        """Of the bytes that every stage must compute; empty: any. A machine knows its own once it has loaded its layers."""

    async def open(
        self,
        parts: Sequence[LayerSpan],
        *,
        blocks: int | None = None,
        loads: StageLoads | None = None,
        kv: Mapping[LayerSpan, bytes] | None = None,
    ) -> FleetRoute:
        """A route over these machines. Those that load are not waited for once another refuses: what they load stays with them for a while.

        Args:
            parts: in the order of their layers.
            blocks: of KV to lease from each, of 16 tokens, no more and no fewer; None: as many as are to be had, up to the request's.
            kv: names of their KV, by which they keep it and go on with it; None: it ends with the route.

        Raises:
            NotOpened: a machine is in the way.
        """
        names = kv or {}
        opening = [
            asyncio.create_task(self._open(part, blocks, loads, names.get(part, b"")), name=f"open-{part.node_id}") for part in parts
        ]
        try:
            await asyncio.wait(opening, return_when=asyncio.FIRST_EXCEPTION)
            refusals: dict[NodeId, FleetError] = {}
            for part, task in zip(parts, opening, strict=True):
                error = task.exception() if task.done() else None
                if isinstance(error, FleetError):
                    refusals[part.node_id] = error
                elif error is not None:
                    raise error
            if refusals:
                raise NotOpened(refusals)
            return await self._connect(parts, [task.result() for task in opening])
        except BaseException:
            # Cancelled, or refused by one, some may be open already and others not.
            for task in opening:
                task.cancel()
            ended = await asyncio.gather(*opening, return_exceptions=True)
            await asyncio.gather(*(each.close() for each in ended if isinstance(each, RemoteStage)), return_exceptions=True)
            raise

    async def _open(self, part: LayerSpan, blocks: int | None, loads: StageLoads | None, kv: bytes) -> RemoteStage:
        asked = self._request
        request = replace(
            asked,
            session_id=os.urandom(SESSION_ID_BYTES),
            layers=part.layers,
            n_blocks=blocks or asked.n_blocks,
            least_blocks=blocks or self.least_blocks,
            kv=kv,
        )

        def loading(progress: StageLoading) -> None:
            if loads is not None:
                loads.note_progress(part, progress)

        stage = await open_stage(self._fleet.channel(part.node_id), part.node_id, request, loading)
        if self.numerics_id and not is_same_arithmetic(self.numerics_id, stage.opened.numerics_id):
            await stage.close()
            raise ShardUnavailable("it computes other bytes than this machine", "Leave out --exact.")
        if loads is not None:
            loads.opened(part)
        return stage

    async def _connect(self, parts: Sequence[LayerSpan], sessions: Sequence[RemoteStage]) -> FleetRoute:
        """Tell each whom it sends to, and open this node's ends.

        Raises:
            NotOpened: a machine can't, and which.
        """
        dtype = self._request.dtype
        ticket = os.urandom(TICKET_BYTES)
        block_size = self._block_size
        for session in sessions:
            with _blaming(session):
                block_size = max(block_size, _block_size(session))
        ways = [self._way(session, block_size) for session in sessions]
        back = NextStage(self._fleet.node_id, tensor_addresses(self._fleet.addresses, self._ends.port), ticket, block_size)
        try:
            expected = self._ends.expect(ticket, dtype, self._width)
        except FleetError as error:
            raise NotOpened({self._fleet.node_id: error}) from error
        sink: ActivationSink | None = None
        try:
            nexts = [*sessions[1:], sessions[-1]]
            await asyncio.gather(*map(_connected, sessions, [*ways[1:], back], nexts))
            until = time.perf_counter() + CONNECT_S  # the stages have bounds of their own
            with _blaming(sessions[0]):
                sink = await opened_in_thread(partial(self._ends.way(ways[0], dtype), until))
            with _blaming(sessions[-1]):
                incoming = await opened_in_thread(partial(expected.accept, until))
        except BaseException:
            expected.close()
            if sink is not None:
                sink.close()
            raise
        stages = [
            RouteStage(
                part.node_id,
                part.layers,
                shard_id(self._request.model_id, part.layers),
                session.opened.numerics_id,
                session.opened.holds_identity,
                session.opened.n_blocks * BLOCK_TOKENS,
                session.opened.resumed,
            )
            for part, session in zip(parts, sessions, strict=True)
        ]
        return FleetRoute(stages, block_size, sessions, sink, incoming, self._loop)

    def _way(self, session: RemoteStage, block_size: int) -> NextStage:
        """Where a stage takes activations."""
        opened = session.opened
        card = next((card for card in self._fleet.cards() if card.node_id == session.node_id), None)
        addresses = () if card is None else self._fleet.order(card.addresses)
        return NextStage(session.node_id, tensor_addresses(addresses, opened.tensor_port), opened.ticket, block_size)


def _block_size(session: RemoteStage) -> int:
    """Tokens that a stage keeps together.

    Raises:
        WeightsMismatch: more than leases are asked for by, or no power of two: they would be no whole blocks.
    """
    tokens = session.opened.block_size
    if tokens > WIDEST_BLOCK or tokens.bit_count() != 1:
        raise WeightsMismatch(f"{session.node_id} keeps KV in blocks of {tokens} tokens; powers of two up to {WIDEST_BLOCK} go together")
    return tokens


async def _connected(session: RemoteStage, to: NextStage, following: RemoteStage) -> None:
    """Tell a stage whom it sends to. One that can't reach the next says so, and the next is in the way.

    Raises:
        NotOpened: one of them is in the way.
    """
    with _blaming(session):
        try:
            await session.connect(to)
        except ShardUnavailable:
            with _blaming(following):
                raise


@contextmanager
def _blaming(session: RemoteStage) -> Generator[None]:
    """What goes wrong inside is held against a session.

    Raises:
        NotOpened: something did.
    """
    try:
        yield
    except FleetError as error:
        raise NotOpened({session.node_id: error}) from error
