"""What the event loop and the engine say to each other, in plain values.

Commands go in and are counted; a report comes out after each step, for all requests at once, and says how many commands it has seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import PacelineError
from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.core.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, if it has not ended."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Stop:
    """End the engine's loop after the step in progress."""


Command = Add | Abort | Stop


@dataclass(frozen=True, slots=True)
class Report:
    """What changed since the last one."""

    taken: int
    """Commands taken, since the start."""
    has_work: bool
    chunks: list[GenerationChunk]
    refused: list[tuple[RequestId, PacelineError]]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Died:
    """The engine ended by an error. What it ran is lost."""

    reason: str
    for_good: bool
    """Nothing follows; else another takes its place."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """Another engine took its place."""
