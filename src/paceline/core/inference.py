"""Models that answer, as the server sees them: one machine's engine (`machine.host`) and the whole fleet (`ways.forward.inference`) are served alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.model import ModelRef
from paceline.core.stats import EngineStats
from paceline.core.text import Tokenizer


def fingerprint_of(model: ModelRef, numerics_id: str) -> str:
    """What equal bytes follow from, shortened: OpenAI's `system_fingerprint`."""
    return f"fp_{model.digest[:12]}_{model.weights}_{numerics_id[:8]}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model beside what it takes to ask it. Empty or 0 where it is not: of other machines' models little is."""

    digest: str = ""
    """SHA-256 of the weights, hex."""
    size_bytes: int = 0
    """Of the weights, in their files."""
    family: str = ""
    """Hugging Face's name of it: llama, qwen3."""
    parameters: int = 0
    stored_as: str = ""
    """GGML's name of the type that holds most of the weights: Q4_K, BF16."""
    file_format: str = ""
    """`gguf` or `safetensors`."""
    hidden: int = 0
    on_gpu: bool = False


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
    """See `fingerprint_of`. Equal ones give equal bytes."""
    facts: ModelFacts = ModelFacts()


@dataclass(frozen=True, slots=True)
class Progress:
    """Whether work advances. A live process that makes no progress is not healthy."""

    busy: bool
    """There is work to do."""
    seconds_since_step: float
    """Since the engine last finished a step, or a part of one (or was last idle)."""
    seconds_since_sign: float = 0.0
    """Since the engine last said anything: beside parts of steps, that it looks for machines in place of lost ones."""
    error: str | None = None
    """The engine died of this."""
    lacks: str | None = None
    """What was lost of it and is being had again: until then nothing runs."""
    step_expected_s: float = 0.0
    """What the steps under way take, by how long steps took; 0: not known."""
    failing: tuple[str, ...] = ()
    """Work in the background that fails again and again."""


class ChunkStream(Protocol):
    """Chunks of one request, or of several. Each item is what they gained since the last one, in order, for all their sequences."""

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]: ...

    def __anext__(self) -> Awaitable[Sequence[GenerationChunk]]: ...

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Abort what has not ended, and free its blocks at once. Idempotent; cancelling `__anext__` does the same."""
        ...


class Inference(Protocol):
    """Runs generations. Every method may be called from the event loop and returns at once; `models` and `expects` from any thread."""

    def models(self) -> Sequence[ServedModel]: ...

    def expects(self, model: str) -> bool:
        """Whether a model that is not served now is about to be, or was until a moment ago."""
        ...

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        """Start a request. The caller that opens its stream closes it.

        Raises:
            UnknownModel, ContextOverflow, Overloaded: before the first item.
        """
        ...

    def stats(self) -> EngineStats: ...

    def progress(self) -> Progress: ...
