"""Runs layers for other members: ShardService, and the sessions behind it. Only rare and small messages pass here; activations have sockets of their own.

A session is the call that opened it: grpc cancels the handler when the caller goes away, is cut off or is revoked, and closing the host's events
then ends the session. Its stream and its KV are free once its thread has ended. Weights go on loading for a caller that went away, and stay for a
while: it finds them when it comes again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial

from paceline.core.background import Background, came_within, end_tasks, tell_loop
from paceline.core.clock import Clock
from paceline.core.errors import (
    BadPipelineRequest,
    FleetError,
    NodeUnreachable,
    PipelineError,
    ShardUnavailable,
    TensorStreamError,
)
from paceline.core.ids import NodeId, Trust
from paceline.core.model import BLOCK_TOKENS
from paceline.fleet.eligibility import Use
from paceline.machine.kv_spans import KvMover
from paceline.net.server import KIB, Service
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.net.trust.certificates import Member
from paceline.net.trust.handlers import Context, Limit
from paceline.net.wire import shard_pb2 as wire
from paceline.net.wire.shard_pb2_grpc import ShardServiceServicer, add_ShardServiceServicer_to_server
from paceline.store.kv_folder import BLOCK_COUNTS
from paceline.ways.pipeline.codec import read_blocks, read_connect, read_open, read_warm, write_event
from paceline.ways.pipeline.executor.route import (
    BlocksAsked,
    BlocksDone,
    NextStage,
    PipelineFault,
    StageEvent,
    StageLoading,
    StageOpened,
    StageRequest,
)
from paceline.ways.pipeline.host.ends import TensorEnds, opened_in_thread
from paceline.ways.pipeline.host.session import HostLimits, Place, Session
from paceline.ways.pipeline.host.session_kv import SessionKv, StageDisk
from paceline.ways.pipeline.host.shard import Shard, ShardClaim
from paceline.ways.pipeline.host.warm import WarmShards
from paceline.ways.pipeline.meter import ShardMeter

logger = logging.getLogger(__name__)

WRITE_S = 20.0
"""How long a caller may take no reports. Raising it keeps the KV of callers that hang."""
JOIN_S = 1.0
"""What a stop gives sessions to end: a batch in progress is computed to its end."""
LOOK_S = 5.0
"""How often idle shards are looked for."""

Key = tuple[NodeId, bytes]


@dataclass(slots=True)
class _Open:
    session: Session | None = None
    connecting: bool = False
    faulted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it has a fault."""


class NodeShardHost:
    """Serves shards. Lives on one event loop.

    Args:
        check_caller: raises NotTrusted for members that are not served.
        disk: where sessions of members keep KV; None: nowhere. Guests get and give none.
        mover: moves it between them and other nodes; None: it stays.
    """

    def __init__(
        self,
        warm: WarmShards,
        ends: TensorEnds,
        limits: HostLimits,
        meter: ShardMeter,
        clock: Clock,
        check_caller: Callable[[Member], None],
        disk: StageDisk | None = None,
        mover: KvMover | None = None,
    ) -> None:
        self.warm, self._disk, self._mover = warm, disk, mover
        self._ends, self._limits, self.meter, self._clock, self._check = ends, limits, meter, clock, check_caller
        self._open: dict[Key, _Open] = {}
        self._live: set[Session] = set()
        """Sessions of which something may still run."""
        self._ended = asyncio.Event()
        self._closed = False
        self._reaper: asyncio.Task[None] | None = None

    # -------------------------------------------------------------------------------------------------------------- for its owner

    def start(self, background: Background) -> None:
        """Begin to evict what is idle."""
        self._reaper = background.keep(self._reap, "shard-reaper")

    async def close(self) -> None:
        """End every session and free every shard. Bounded; idempotent."""
        self._closed = True
        await end_tasks(self._reaper)
        for session in self._live:
            session.stop()
        for asked in self._open.values():
            asked.faulted.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                while self._live:
                    self._ended.clear()
                    await self._ended.wait()
        if self._live:
            logger.warning("%d sessions did not end in time; their memory stays taken", len(self._live))
        await self.warm.close()

    @property
    def sessions(self) -> int:
        """Of which something may still run."""
        return len(self._live)

    def revoked(self, node_id: NodeId) -> None:
        """Nothing that a revoked node sends is run any more, and nothing is sent to it. Its own sessions end with its calls."""
        for session in tuple(self._live):
            if node_id in session.peers:
                session.fail(PipelineFault(node_id, PipelineError.code, f"{node_id} was revoked"))
                session.stop()  # now, however long its caller takes to hear of it

    # --------------------------------------------------------------------------------------------------------------- for callers

    def admit(self, caller: Member) -> None:
        """Check a caller before anything else is looked at.

        Raises:
            NotTrusted: this caller is not served.
        """
        self._check(caller)

    async def open(self, request: StageRequest, caller: Member) -> AsyncGenerator[StageEvent]:
        """A session: loading, opened, then reports, at worst a fault as the last. Closing it ends the session.

        Raises:
            PipelineError: it can't be had.
        """
        key = (caller.node_id, request.session_id)
        if key in self._open:
            raise BadPipelineRequest("A session of this id is open")
        mine = self._open[key] = _Open()
        try:
            async with aclosing(self._session(mine, request, caller)) as events:
                async for event in events:
                    yield event
        except ShardUnavailable:
            self.meter.sessions_refused += 1
            raise
        finally:
            del self._open[key]

    async def _session(self, mine: _Open, request: StageRequest, caller: Member) -> AsyncGenerator[StageEvent]:
        if self._closed:
            raise ShardUnavailable("This machine is stopping")
        shard, claim = await self.warm.claim(request, (caller.node_id, request.kv) if request.kv else None)
        try:
            async with aclosing(self._loading(shard, request.report_s)) as loading:
                async for progress in loading:
                    yield progress
            if claim.kv is not None:
                shard.stop(claim.kv)
            await self.warm.await_ending(shard)
            resumed = None if claim.kv is None else shard.resume(request, claim.kv)
            session = self._begin(shard, claim, request, mine, resumed, caller)
        except BaseException:
            self.warm.release(shard, claim)
            raise
        try:
            self.meter.sessions_opened += 1
            logger.info("layers %s run for %s", shard.shard_id, caller.node_id)
            yield self._opened(shard, session, caller, resumed=resumed is not None)
            while session.fault is None:
                await came_within(mine.faulted, request.report_s)
                if session.stopping and session.fault is None:
                    raise ShardUnavailable("This machine is stopping")
                yield session.report
            yield session.report  # how far it came
            yield session.fault
        finally:
            session.stop()

    def warm_layers(self, request: StageRequest) -> StageLoading | None:
        """Load layers that may come to be needed, or go on keeping them. Returns how far the load is; None: they are in memory.

        Raises:
            ShardUnavailable: memory, or the machine, is wanted for others.
        """
        shard = self.warm.prepare(request)
        return None if shard.loaded is not None else StageLoading(*shard.meter.progress)

    async def connect(self, session_id: bytes, caller: Member, to: NextStage) -> None:
        """Say where a session's results go, and let it begin.

        Raises:
            BadPipelineRequest: the caller has no such session, or it is connected, or there is no such node.
            ShardUnavailable: that node can't be reached.
            NotTrusted: it may not be reached.
        """
        found = self._find(session_id, caller)
        session = found.session
        if session is None or found.connecting:
            raise BadPipelineRequest("This session is not open yet, or connected already")
        deadline = self._clock.monotonic() + self._limits.connect_s
        try:
            go = self._ends.way(to, session.request.dtype)
            found.connecting = True
            sink = await opened_in_thread(partial(go, deadline))
        except (NodeUnreachable, TensorStreamError) as error:
            found.connecting = False  # the caller may know another way
            raise ShardUnavailable(error.message) from error
        session.begin(to, sink)

    async def use_blocks(self, session_id: bytes, caller: Member, asked: BlocksAsked) -> BlocksDone:
        """Find, restore, keep or move blocks of a session.

        Raises:
            BadPipelineRequest: the caller has no such session, or it has not the blocks, or keeps none on a disk and moves none.
        """
        session = self._find(session_id, caller).session
        if session is None or session.kv is None:
            raise BadPipelineRequest("This session keeps no KV on a disk and moves none, or is not connected yet")
        return await session.kv.use(asked)

    @property
    def kept_blocks(self) -> dict[str, int]:
        """Of callers, on the disk, by what became of them."""
        counts = self.meter.blocks
        for session in self._live:
            if session.kv is not None:
                counts += session.kv.counts
        return {what: counts[what] for what in BLOCK_COUNTS}

    # -------------------------------------------------------------------------------------------------------------------- inside

    def _find(self, session_id: bytes, caller: Member) -> _Open:
        """A caller's own session: another caller's can't be named."""
        found = self._open.get((caller.node_id, session_id))
        if found is None:
            raise BadPipelineRequest("There is no such session")
        return found

    async def _loading(self, shard: Shard, every_s: float) -> AsyncGenerator[StageLoading]:
        """How far a load is, until it is over.

        Raises:
            PipelineError: it failed.
        """
        load = shard.loading
        assert load is not None
        while not load.done():
            await asyncio.wait({load}, timeout=every_s)
            if not load.done():
                yield StageLoading(*shard.meter.progress)
        if load.cancelled():
            raise ShardUnavailable("This machine is stopping")
        await load

    def _begin(self, shard: Shard, claim: ShardClaim, request: StageRequest, mine: _Open, resumed: Place | None, caller: Member) -> Session:
        if shard.loaded is None or self._closed:
            raise ShardUnavailable("This machine is stopping")
        place = resumed or shard.place(request)
        loop, ticket = asyncio.get_running_loop(), secrets.token_bytes(TICKET_BYTES)
        try:
            expected = self._ends.expect(ticket, request.dtype, place.width)
        except FleetError as error:
            shard.leases.give_back(place.lease)
            raise ShardUnavailable("This machine takes no activations any more") from error
        session: Session

        def ended() -> None:
            self._live.discard(session)
            if session.lost_layers:
                self.warm.discard(shard)
            self.warm.release(shard, claim)
            self._ended.set()

        kv = None
        if (self._disk or self._mover) is not None and caller.trust is not Trust.GUEST:
            n_layers, counted = shard.loaded.spec.n_layers, self.meter.note_blocks
            kv = SessionKv(place.stage, request.digest, n_layers, caller.node_id, self._disk, self._mover, self._clock, counted)
        session = Session(
            *(request, place, ticket, expected, kv, self._limits, self.meter, self._clock),
            on_fault=partial(tell_loop, loop, mine.faulted.set),
            on_end=partial(tell_loop, loop, ended),
        )
        claim.session = mine.session = session
        self._live.add(session)
        return session

    def _opened(self, shard: Shard, session: Session, caller: Member, *, resumed: bool) -> StageOpened:
        loaded, is_member = shard.loaded, caller.trust is not Trust.GUEST
        assert loaded is not None, "a shard with a claim is not evicted"
        runner = loaded.runner
        return StageOpened(
            self._ends.port,
            session.ticket,
            min(session.place.lease.n_blocks * runner.block_size // BLOCK_TOKENS, session.request.n_blocks),
            runner.block_size,
            runner.numerics_id,
            runner.one_path,
            runner.holds_identity,
            resumed,
            is_member and self._disk is not None,
            is_member and self._mover is not None,
            kv_under_way=is_member and self._mover is not None,
        )

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._limits.idle_s))
            await self.warm.evict_idle()


class ShardServicer(ShardServiceServicer):
    def __init__(self, host: NodeShardHost, who: Callable[[Context], Member]) -> None:
        self._host, self._who = host, who

    # Written to the context rather than yielded: a generator that is not asked for more would be closed only when it is collected.
    async def OpenStage(self, request: wire.OpenStageRequest, context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            async with aclosing(self._host.open(read_open(request), self._admitted(context))) as events:
                async for event in events:
                    async with asyncio.timeout(WRITE_S):
                        await context.write(write_event(event))
        except TimeoutError:
            raise ShardUnavailable("The caller takes no reports, so its session ended") from None

    async def ConnectStage(self, request: wire.ConnectStageRequest, context: Context) -> wire.ConnectStageResponse:
        await self._host.connect(request.session_id, self._admitted(context), read_connect(request))
        return wire.ConnectStageResponse()

    async def WarmLayers(self, request: wire.WarmLayersRequest, context: Context) -> wire.WarmLayersResponse:
        self._admitted(context)
        loading = self._host.warm_layers(read_warm(request))
        if loading is None:
            return wire.WarmLayersResponse(loaded=True)
        told = wire.StageLoading(bytes_done=loading.bytes_done, bytes_total=loading.bytes_total)
        return wire.WarmLayersResponse(loading=told)

    async def KvBlocks(self, request: wire.KvBlocksRequest, context: Context) -> wire.KvBlocksResponse:
        done = await self._host.use_blocks(request.session_id, self._admitted(context), read_blocks(request))
        return wire.KvBlocksResponse(n_blocks=done.n_blocks, is_wrong=done.is_wrong)

    def _admitted(self, context: Context) -> Member:
        caller = self._who(context)
        self._host.admit(caller)
        return caller


def shard_service(host: NodeShardHost, who: Callable[[Context], Member]) -> Service:
    limits = {
        "ShardService/OpenStage": Limit(4 * KIB, 64, least=Use.HAVE_LAYERS_RUN),
        "ShardService/ConnectStage": Limit(64 * KIB, 128, least=Use.HAVE_LAYERS_RUN),
        "ShardService/WarmLayers": Limit(4 * KIB, 64, least=Use.HAVE_LAYERS_RUN),
        "ShardService/KvBlocks": Limit(256 * KIB, 64, least=Use.HAVE_LAYERS_RUN),
    }
    return Service(partial(add_ShardServiceServicer_to_server, ShardServicer(host, who)), limits)
