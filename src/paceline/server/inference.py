"""What the server needs of whatever runs models: the protocol it owns. `node` adapts the engine to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.stats import EngineStats
from paceline.core.text import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers here."""

    name: str
    created: int
    """Unix seconds."""
    max_context: int
    """Tokens of prompt and answer together."""
    tokenizer: Tokenizer
    fingerprint: str
    """Model digest, weights format and numerics id, shortened: OpenAI's `system_fingerprint`. Equal ones give equal bytes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Whether work advances. A live process that makes no progress is not healthy."""

    busy: bool
    """There is work to do."""
    seconds_since_step: float
    """Since the engine last finished a step (or was last idle)."""
    error: str | None = None
    """The engine died of this."""


class Inference(Protocol):
    """Runs generations. Every method may be called from the event loop and returns at once."""

    def models(self) -> Sequence[ServedModel]: ...

    def generate(self, model: str, request: GenerationRequest) -> AsyncIterator[Sequence[GenerationChunk]]:
        """Start a request. Each item is what the request gained since the last item, in order, for all its sequences.

        Closing the iterator (`aclose`, or cancellation) aborts the request and frees its blocks at once.

        Raises:
            UnknownModel, ContextOverflow, Overloaded: before the first item.
        """
        ...

    def stats(self) -> EngineStats: ...

    def progress(self) -> Progress: ...
