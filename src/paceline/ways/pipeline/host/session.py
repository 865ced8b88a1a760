"""A session at work: one thread that receives, runs, sends, and counts. It never logs, stores or keeps activations past the forward pass; KV it keeps on a
disk where this node's owner and the caller both ask for it (`session_kv`).

Law: `on_end` is called once, when nothing of the session runs any more: only then may its KV go to another. `stop` brings that about from any
thread. What ends a session against its caller's will is its fault, and says whom it blames.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.errors import (
    BadPipelineRequest,
    ExecutorLost,
    FleetError,
    PipelineError,
    PipelineStalled,
    ShardCorrupt,
    ShardUnavailable,
    StreamClosed,
    StreamIdle,
    StreamStalled,
    TensorStreamError,
)
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.engine.local import WireBits
from paceline.ways.pipeline.executor.route import ActivationSink, NextStage, PipelineFault, StageReport, StageRequest
from paceline.ways.pipeline.executor.stage import Stage, StageBatch
from paceline.ways.pipeline.host.ends import ExpectedInput, StreamSource
from paceline.ways.pipeline.host.session_kv import SessionKv
from paceline.ways.pipeline.meter import Latencies, ShardMeter

logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""A thread that waits for work looks so often whether it was stopped, should nothing wake it."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    max_streams: int = 4
    """Sessions of one shard. Strict: the next one is refused at once."""
    max_shards: int = 16
    """Ranges of layers in memory at once."""
    memory_bytes: int | None = None
    """For all shards, weights and KV; None: a share of what is free."""
    idle_s: float = 600.0
    """A shard that no session has used for so long is evicted."""
    kept_s: float = 120.0
    """How long KV outlives its session, where the caller may go on with it, unless another needs the room. Raising it: more of an answer outlives a route
    that takes long to mend."""
    stall_s: float = 5.0
    """How long a stage waits for a receiver that takes nothing, or a batch that began to come."""
    turn_s: float = 60.0
    """How long a session waits for others on the same layers."""
    connect_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks [base, base + n_blocks) of a runner's pool."""

    base: int
    n_blocks: int


class FairLock:
    """A lock that hands itself to the thread that waited longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._queue: deque[threading.Lock] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextmanager
    def hold(self, bound_s: float) -> Generator[None]:
        """Have the turn for as long as the block runs.

        Raises:
            PipelineStalled: it did not come within the bound.
        """
        self._wait(bound_s)
        try:
            yield
        finally:
            self._pass_on()

    def _wait(self, bound_s: float) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._queue.append(mine)
        if mine.acquire(timeout=bound_s):
            return
        with self._lock:
            if mine in self._queue:
                self._queue.remove(mine)
                raise PipelineStalled(f"These layers were busy for {bound_s:g} s")
        # It came just now.

    def _pass_on(self) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._taken = False


@dataclass(frozen=True, slots=True)
class Place:
    """A session's part of a shard."""

    shard_id: str
    stage: Stage
    lock: FairLock
    lease: Lease
    width: int
    """Of a row."""
    layers: LayerRange
    max_rows: int


class Session:
    """One caller's use of one shard. Made on the event loop; `begin` starts its thread."""

    def __init__(
        self,
        request: StageRequest,
        place: Place,
        ticket: bytes,
        expected: ExpectedInput,
        kv: SessionKv | None,
        limits: HostLimits,
        meter: ShardMeter,
        clock: Clock,
        on_fault: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """A session that waits to be connected.

        Args:
            ticket: what its sender brings.
            expected: its input, once a stream brings the ticket.
            kv: its blocks on the disk; None: none are kept.
            on_fault: told of a fault, in any thread.
            on_end: told once, in any thread, that nothing runs any more.
        """
        self._kv = kv
        self.request, self.place, self.ticket = request, place, ticket
        self._expected, self._limits, self._meter, self._clock = expected, limits, meter, clock
        self._on_fault, self._on_end = on_fault, on_end
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._source: StreamSource | None = None
        self._sink: ActivationSink | None = None
        self._to: NodeId | None = None
        self.stopping = False
        self.holds_kv = True
        """What ran was run to its end: another session may go on with its KV."""
        self.lost_layers = False
        """Some process that shares its layers is gone: they run no more, and all their KV is void."""
        self.fault: PipelineFault | None = None
        self._latencies = Latencies()
        self._received = self._computed = self._sent = 0
        self._busy_s = 0.0

    # ------------------------------------------------------------------------------------------------------------- for the host

    @property
    def kv(self) -> SessionKv | None:
        """Its blocks on the disk; None: none are kept, or it has not begun."""
        return None if self._thread is None else self._kv

    @property
    def report(self) -> StageReport:
        received, computed = self._received, self._computed
        sent, latencies = self._sent, self._latencies
        return StageReport(received, min(computed, received), sent, self.waiting, latencies.p95, self._busy_s, latencies.sum_ms / 1000)

    @property
    def waiting(self) -> int:
        """Batches that came and were not computed yet."""
        return max(0, self._received - self._computed)

    def begin(self, to: NextStage, sink: ActivationSink) -> None:
        """Start, with where results go: the session's own from here on.

        Raises:
            BadPipelineRequest: it is connected already, or has ended; or its lease is no whole blocks of the batches'.
            ShardUnavailable: the system has no thread left.
        """
        # A daemon, so that kernels which never end can't keep the process alive.
        thread = threading.Thread(target=self._live, args=(to.node_id, sink), name=f"paceline-stage-{self.place.shard_id}", daemon=True)
        try:
            with self._lock:
                if self.stopping or self._thread is not None:
                    raise BadPipelineRequest("This session is connected already, or has ended")
                if to.block_size is not None:
                    self.place.stage.take_blocks_of(to.block_size)
                thread.start()
                self._sink, self._to, self._thread = sink, to.node_id, thread
        except BadPipelineRequest:
            sink.close()
            raise
        except RuntimeError as error:
            sink.close()
            raise ShardUnavailable("This machine has no thread left") from error

    def stop(self) -> None:
        """End it. Returns at once; idempotent."""
        with self._lock:
            first, self.stopping = not self.stopping, True
            never_began = self._thread is None
        self._close_ends()
        if first and never_began:
            self._on_end()

    def fail(self, fault: PipelineFault) -> None:
        """End it against its caller's will."""
        with self._lock:
            if self.stopping or self.fault is not None:
                return
            self.fault = fault
        self._on_fault()

    @property
    def peers(self) -> frozenset[NodeId]:
        """Whom it receives from and sends to."""
        source = self._source
        return frozenset(node_id for node_id in (self._to, None if source is None else source.peer) if node_id is not None)

    # ---------------------------------------------------------------------------------------------------------------- its thread

    def _live(self, to: NodeId, sink: ActivationSink) -> None:
        try:
            self._work(to, sink)
        except _Ended as ended:
            if ended.fault.code == ShardCorrupt.code and not self.stopping:
                self._meter.corrupt()
            self.fail(ended.fault)
        except Exception as error:
            if not self.stopping:
                logger.exception("a session on %s failed", self.place.shard_id)
            self.fail(PipelineFault(None, PipelineError.code, f"The stage failed: {type(error).__name__}"))
        finally:
            self._close_ends()
            if self._kv is not None:
                self._kv.fence()
            self._on_end()
            if self._kv is not None:
                self._kv.close()

    def _work(self, to: NodeId, sink: ActivationSink) -> None:
        """Batch after batch, until the session is stopped or broken."""
        source = self._accept()
        if source is None:
            return
        stage, shard_id = self.place.stage, self.place.shard_id
        now, limits = self._clock.monotonic, self._limits
        slowest_s = 0.0
        while not self.stopping:
            received = self._receive(source)
            if received is None:
                continue
            batch, x_TD = received
            arrived = now()
            self._received += 1
            behind = batch.behind(self.request.layers)
            try:
                sink.prepare(behind, x_TD.shape[1])
            except FleetError as error:
                raise _Ended(_broken(error, "The output", to)) from error
            try:
                with self.place.lock.hold(limits.turn_s):
                    began = now()
                    self.holds_kv = False
                    out_TD = stage.run(batch, x_TD)
                    out_TD = (out_TD if behind is batch else out_TD[:0]).copy()  # the runner's buffer is another session's next
                    self.holds_kv = True
                    self._busy_s += now() - began
            except (BadPipelineRequest, ShardCorrupt) as error:
                raise _Ended(PipelineFault(source.peer, error.code, error.message)) from error
            except PipelineError as error:
                raise _Ended(PipelineFault(None, error.code, error.message)) from error
            except ExecutorLost as error:
                self.lost_layers = True
                raise _Ended(PipelineFault(None, ShardUnavailable.code, error.message)) from error
            self._computed += 1
            # The next stage may be as slow as this machine was, and busy with more than one.
            slowest_s = max(0.99 * slowest_s, now() - arrived)
            try:
                sink.send(behind, out_TD, now() + limits.stall_s + 4 * slowest_s)
            except FleetError as error:
                raise _Ended(_broken(error, "The output", to)) from error
            self._sent += 1
            took_ms = 1000 * (now() - arrived)
            self._latencies.add(took_ms)
            self._meter.latency.observe(shard_id, took_ms)

    def _accept(self) -> StreamSource | None:
        """The input, however long it takes: the caller that opened the session ends it when that is too long."""
        while not self.stopping:
            try:
                source = self._expected.accept(self._clock.monotonic() + IDLE_S)
            except StreamStalled:
                continue
            except TensorStreamError as error:
                raise _Ended(_broken(error, "The input", None)) from error
            with self._lock:
                self._source = source
            if self.stopping:  # which may have been too early to close it
                source.close()
                return None
            return source
        return None

    def _receive(self, source: StreamSource) -> tuple[StageBatch, WireBits] | None:
        """The next batch; None where none came yet."""
        now = self._clock.monotonic
        try:
            try:
                return source.receive(now() + IDLE_S)
            except StreamIdle:
                return None
            except StreamStalled:
                # It began, maybe just now: it has its own time.
                return source.receive(now() + self._limits.stall_s)
        except FleetError as error:
            raise _Ended(_broken(error, "The input", source.peer)) from error

    def _close_ends(self) -> None:
        with self._lock:
            ends = [end for end in (self._source, self._sink) if end is not None]
        self._expected.close()
        for end in ends:
            end.close()


class _Ended(Exception):
    """Leaves the thread's work."""

    def __init__(self, fault: PipelineFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def _broken(error: FleetError, what: str, node_id: NodeId | None) -> PipelineFault:
    """What a broken stream is to a pipeline."""
    match error:
        case StreamStalled():
            kind = PipelineStalled
        case StreamClosed():
            kind = ShardUnavailable
        case TensorStreamError():
            kind = ShardCorrupt
        case _:
            kind = PipelineError
    return PipelineFault(node_id, kind.code, f"{what} broke: {error.message}")
