"""An engine whose requests are timed: until their first token, and how fast the others come."""

from __future__ import annotations

from collections.abc import Collection

from paceline.core.clock import Clock
from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats
from paceline.node.engine_thread import StepEngine
from paceline.node.pipelines.meter import PipelineMeter


class _Timed:
    """A request under way."""

    __slots__ = ("added_s", "first_s", "last_s", "left", "tokens")

    def __init__(self, added_s: float, left: int) -> None:
        self.added_s, self.left = added_s, left
        self.first_s: float | None = None
        self.last_s = added_s
        self.tokens = 0
        """After the first."""


class MeteredEngine:
    """A `StepEngine` over another.

    Args:
        engine: the pipeline's.
    """

    def __init__(self, engine: StepEngine, meter: PipelineMeter, clock: Clock) -> None:
        self._engine, self._meter, self._clock = engine, meter, clock
        self._timed: dict[RequestId, _Timed] = {}

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def add(self, request: GenerationRequest) -> None:
        self._engine.add(request)
        self._timed[request.request_id] = _Timed(self._clock.monotonic(), request.n)

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
            self._meter.first_token(now_s - timed.added_s)
        else:
            timed.tokens += tokens
        timed.last_s = now_s

    def _end(self, timed: _Timed) -> None:
        if timed.first_s is not None and timed.last_s > timed.first_s:
            self._meter.answered(timed.tokens / (timed.last_s - timed.first_s))
