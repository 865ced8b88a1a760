"""Layers that could not be loaded a moment ago: they are not loaded again for callers that may come."""

from __future__ import annotations

from paceline.core.clock import Clock
from paceline.core.errors import PipelineError, ShardUnavailable
from paceline.core.model import LayerRange, WeightsFormat
from paceline.ways.pipeline.executor.sessions import StageRequest

RETRY_S = 120.0
"""For so long. A caller that is there has them tried at once."""

Held = tuple[str, WeightsFormat, LayerRange]
"""Layers of a model, by its digest, in one format."""


class FailedLoads:
    """Why, and when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[Held, tuple[PipelineError, float]] = {}

    def check(self, request: StageRequest) -> None:
        """Raise ShardUnavailable where its layers could not be loaded, and that is not long ago."""
        error, at_s = self._known.get(_held(request), (None, 0.0))
        if error is not None and self._clock.monotonic() - at_s < RETRY_S:
            raise ShardUnavailable(error.message, error.hint)

    def note(self, request: StageRequest, error: PipelineError) -> PipelineError:
        """They could not be loaded. Returns `error`, to be raised."""
        now = self._clock.monotonic()
        self._known = {held: known for held, known in self._known.items() if now - known[1] < RETRY_S}
        self._known[_held(request)] = error, now
        return error

    def forget(self, request: StageRequest) -> None:
        """They could."""
        self._known.pop(_held(request), None)


def _held(request: StageRequest) -> Held:
    return request.digest, request.weights, request.layers
