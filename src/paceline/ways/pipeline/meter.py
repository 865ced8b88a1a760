"""What a node counts of its pipelines, and of the shards that it runs for others: the threads of engines and of sessions count, and what they share has a
lock. And an engine whose requests are timed: until their first token, and how fast the others come.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection

from paceline.core.clock import Clock
from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats, Histogram, LabelledHistograms, Metrics, Row, counter, gauge, histogram
from paceline.machine.engine_thread import StepEngine
from paceline.ways.pipeline.executor.events import PipelineWatch
from paceline.ways.pipeline.executor.route import PipelineFault, RouteStage

LATENCY_BOUNDS_MS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0)
WINDOW = 256
"""Batches of which a session's p95 is."""


class Latencies:
    """The last few of one session, in milliseconds. Written by its thread, read by any."""

    def __init__(self) -> None:
        self._ring = [0.0] * WINDOW
        self._count = 0
        self.sum_ms = 0.0
        """Of all there were."""

    def add(self, ms: float) -> None:
        self.sum_ms += ms
        self._ring[self._count % WINDOW] = ms
        self._count += 1

    @property
    def p95(self) -> float:
        """0 where there are none."""
        n = min(self._count, WINDOW)
        return sorted(self._ring[:n])[(95 * n - 1) // 100] if n else 0.0


class ShardMeter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.latency = LabelledHistograms(LATENCY_BOUNDS_MS, "others")
        """Of a batch, in milliseconds, by shard."""
        self.sessions_opened = 0
        self.sessions_refused = 0
        self.evictions = 0
        self.loads = 0
        self.corruption = 0
        """Times that something came which is no activations."""
        self._blocks: Counter[str] = Counter()

    @property
    def blocks(self) -> Counter[str]:
        """KV blocks on the disk, of sessions that have ended, by what became of them."""
        with self._lock:
            return Counter(self._blocks)

    def note_blocks(self, counts: Counter[str]) -> None:
        with self._lock:
            self._blocks += counts

    def corrupt(self) -> None:
        with self._lock:
            self.corruption += 1


CONSTRUCT_BOUNDS_MS = (25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0)
FIRST_TOKEN_BOUNDS_MS = (10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0, 6400.0, 12800.0, 25600.0, 60000.0)
RATE_BOUNDS = (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0)


class PipelineMeter(PipelineWatch):
    """Counted by the engine's thread and by the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.corruption = 0
        """Stages that sent garbage, or wrong numbers."""
        self.construct_ms = {"first": Histogram(CONSTRUCT_BOUNDS_MS), "failover": Histogram(CONSTRUCT_BOUNDS_MS)}
        self.step_ms = Histogram(LATENCY_BOUNDS_MS)
        self.hop_ms = LabelledHistograms[tuple[str, str]](LATENCY_BOUNDS_MS, ("others", "others"))
        self.first_token_ms = Histogram(FIRST_TOKEN_BOUNDS_MS)
        self.tokens_per_second = Histogram(RATE_BOUNDS)
        self.losses = self.failovers = self.fallbacks = 0
        self.open: dict[tuple[str, str], Callable[[], int]] = {}
        """How many other machines run layers of each pipeline, by its id and its model."""

    def corrupt(self) -> None:
        with self._lock:
            self.corruption += 1

    # ---------------------------------------------------------------------------------- as a PipelineWatch, in the engine's thread

    def constructed(self, seconds: float, *, failover: bool) -> None:
        self.failovers += failover
        self.construct_ms["failover" if failover else "first"].observe(seconds * 1000)

    def stepped(self, seconds: float) -> None:
        self.step_ms.observe(seconds * 1000)

    def hopped(self, stage: RouteStage, seconds: float, batches: int) -> None:
        self.hop_ms.observe((stage.node_id, stage.shard_id), seconds * 1000, batches)

    def lost(self, fault: PipelineFault) -> None:
        del fault
        self.losses += 1

    def fell_back(self) -> None:
        self.fallbacks += 1


# fmt: off
ROWS: tuple[Row[PipelineMeter], ...] = (
    histogram("paceline_pipeline_construct_ms", "Milliseconds until machines for all layers were found and ready: first, or in place of a pipeline that broke.",
            lambda meter: meter.construct_ms, "opening"),
    histogram("paceline_pipeline_step_ms", "Milliseconds from a batch's departure for a pipeline's first machine to its return: at each hop, on the wire, and waiting for either.",
            lambda meter: meter.step_ms),
    histogram("paceline_pipeline_hop_ms", "Milliseconds of a batch at one machine of a pipeline, as that machine says: means of what it ran between two of its reports.",
            lambda meter: meter.hop_ms.all(), "node", "shard_id"),
    histogram("paceline_first_token_ms", "Milliseconds from a request to its first token, over a pipeline.", lambda meter: meter.first_token_ms),
    histogram("paceline_tokens_per_second", "Of a request over a pipeline, after its first token.", lambda meter: meter.tokens_per_second),
    gauge("paceline_pipeline_machines", "Other machines that run layers of a pipeline; 0 while they are looked for.",
            lambda meter: {key: count() for key, count in tuple(meter.open.items())}, "pipeline", "model"),
    counter("paceline_pipelines_lost", "Times that a pipeline in use broke.", lambda meter: meter.losses),
    counter("paceline_failovers", "Times that other machines took over.", lambda meter: meter.failovers),
    counter("paceline_fallback_to_local", "Times that this machine took over alone.", lambda meter: meter.fallbacks),
)
# fmt: on


def pipeline_metrics(pipelines: PipelineMeter, shards: ShardMeter | None) -> Metrics[PipelineMeter]:
    """Of one node's pipelines.

    Args:
        shards: of the layers it runs for others, where it does.
    """
    corruption: Row[PipelineMeter] = counter(
        "paceline_shard_corruption_detected",
        "Times that another machine sent what is no activations, or was found to compute wrong numbers.",
        lambda meter: meter.corruption + (0 if shards is None else shards.corruption),
    )
    return Metrics((*ROWS, corruption), lambda: pipelines)


class _Timed:
    __slots__ = ("added_s", "first_s", "last_s", "left", "tokens")

    def __init__(self, added_s: float, left: int) -> None:
        self.added_s, self.left = added_s, left
        self.first_s: float | None = None
        self.last_s = added_s
        self.tokens = 0
        """After the first."""


class MeteredEngine:
    """A `StepEngine` over another."""

    def __init__(self, engine: StepEngine, meter: PipelineMeter, clock: Clock) -> None:
        self._engine, self._meter, self._clock = engine, meter, clock
        self._timed: dict[RequestId, _Timed] = {}

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def add(self, request: GenerationRequest) -> None:
        self._engine.add(request)
        self._timed[request.request_id] = _Timed(self._clock.monotonic(), len(request.indices))

    def abort(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)

    def recall(self, gone: Collection[RequestId], shortest: int | None, *, stops: bool) -> None:
        self._engine.recall(gone, shortest, stops=stops)

    @property
    def advanced(self) -> int:
        return self._engine.advanced

    def submit(self) -> None:
        self._engine.submit()

    def collect(self) -> list[GenerationChunk]:
        chunks = self._engine.collect()
        now_s = self._clock.monotonic()
        for chunk in chunks:
            timed = self._timed[chunk.request_id]
            if chunk.token_ids:
                self._count(timed, len(chunk.token_ids), now_s)
            if chunk.finish_reason is not None:
                timed.left -= 1
                if not timed.left:
                    self._end(self._timed.pop(chunk.request_id))
        return chunks

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def check_invariants(self) -> None:
        self._engine.check_invariants()

    def _count(self, timed: _Timed, tokens: int, now_s: float) -> None:
        if timed.first_s is None:
            timed.first_s = now_s
            self._meter.first_token_ms.observe((now_s - timed.added_s) * 1000)
        else:
            timed.tokens += tokens
        timed.last_s = now_s

    def _end(self, timed: _Timed) -> None:
        if timed.first_s is not None and timed.last_s > timed.first_s:
            self._meter.tokens_per_second.observe(timed.tokens / (timed.last_s - timed.first_s))
