"""Models that answer, as the server sees them. The server treats one machine's engine (`machine.host`) and the whole fleet (`ways.forward.inference`) alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline.core.generation import GenerationChunk, GenerationRequest
from paceline.core.model import ModelRef
from paceline.core.stats import EngineStats
from paceline.core.text import Tokenizer


def fingerprint_of(model: ModelRef, numerics_id: str) -> str:
    """Return OpenAI's `system_fingerprint`: the weights' digest, their format and the numerics id, shortened. Equal ones give equal bytes, except those that
    end in `none`: no bytes are promised.
    """
    return f"fp_{model.digest[:12]}_{model.weights}_{_shown(numerics_id)}"


def _shown(numerics_id: str) -> str:
    return numerics_id[:8].replace("_", "-") or "none"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that are not needed to run a request. Fields are empty or 0 where unknown; little is known of other machines' models."""

    digest: str = ""
    """SHA-256 of the weights, hex."""
    size_bytes: int = 0
    """Bytes of the weights in their files."""
    family: str = ""
    """Hugging Face's name of the model family, such as llama or qwen3."""
    parameters: int = 0
    stored_as: str = ""
    """GGML's name of the type that holds most of the weights, such as Q4_K or BF16; the quantisation that a foreign engine names."""
    file_format: str = ""
    """`gguf` or `safetensors`."""
    hidden: int = 0
    on_gpu: bool = False
    engine: str = ""
    """Name and version of the engine of another maker that runs it; empty: Paceline's own kernels."""
    leaves_network: bool = False
    """Prompts for it leave the home network, so only requests that name it reach it."""
    via: tuple[str, ...] = ()
    """Marks of the nodes that requests go through after this one, as far as they are known; see `core.via`."""
    on_disk: bool = False
    """An engine of another maker has it on its disk and loads it for a request, so only requests that name it reach it."""


@dataclass(frozen=True, slots=True)
class PassedChats:
    """Which chats reach a model's engine as they are."""

    always: bool
    """All of them: no prompt can be rendered here."""
    images: bool = False
    """The model takes images."""
    tools: bool = False
    """The engine reads calls of tools."""
    schemas: bool = False
    """The engine follows a JSON schema."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers here."""

    name: str
    created: int
    """Time in seconds since the Unix epoch."""
    max_context: int
    """Maximum tokens of prompt and answer together."""
    tokenizer: Tokenizer
    fingerprint: str
    """The `fingerprint_of` the model. Models with equal ones give equal bytes."""
    facts: ModelFacts = ModelFacts()
    chats: PassedChats | None = None
    """None: every prompt is rendered here."""
    numerics_id: str | None = None
    """Numerics id of what runs now, if it changed since the model was loaded. None: it is the one that it was loaded with."""

    def of_numerics(self, numerics_id: str) -> ServedModel:
        """Return the model as other numerics compute it now."""
        if numerics_id == self.numerics_id:
            return self
        named = self.fingerprint.rpartition("_")[0]
        return replace(self, numerics_id=numerics_id, fingerprint=f"{named}_{_shown(numerics_id)}")


def default_model(models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the model of requests that name none, and of aliases: the first to which prompts go without leaving the home network, and which no engine of
    another maker has to load.
    """
    return next((model for model in models if not (model.facts.leaves_network or model.facts.on_disk)), None)


@dataclass(frozen=True, slots=True)
class Progress:
    """Liveness of an engine or a fleet. A process that lives but makes no progress is not healthy."""

    busy: bool
    """There is work to do."""
    seconds_since_step: float
    """Seconds since the engine last finished a step or a part of one, or was last idle."""
    seconds_since_sign: float = 0.0
    """Seconds since the engine last gave any sign of life. Besides parts of steps, the search for replacement machines counts."""
    error: str | None = None
    """The error that ended the engine. None: it runs."""
    lacks: str | None = None
    """The lost part that is being replaced; nothing runs until then. None: nothing is missing."""
    step_expected_s: float = 0.0
    """Expected seconds of the steps under way, from how long steps took; 0: not known."""
    failing: tuple[str, ...] = ()
    """Names of background work that fails repeatedly."""


class ChunkStream(Protocol):
    """Chunks of one or several requests. Each item holds what all their sequences gained since the last item, in order."""

    def __aiter__(self) -> AsyncIterator[Sequence[GenerationChunk]]: ...

    def __anext__(self) -> Awaitable[Sequence[GenerationChunk]]: ...

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Abort unfinished sequences and free their blocks at once. Idempotent; cancelling `__anext__` does the same."""
        ...


class Inference(Protocol):
    """A runner of generations. Every method may be called from the event loop and returns at once; `models` and `expects` from any thread."""

    def models(self) -> Sequence[ServedModel]: ...

    def expects(self, model: str) -> bool:
        """Return whether a model that is not served now will be soon, or was until a moment ago."""
        ...

    def generate(self, model: str, request: GenerationRequest) -> ChunkStream:
        """Start a request. The caller must close the returned stream.

        Raises:
            UnknownModel, ContextOverflow, Overloaded: before the first item.
        """
        ...

    def stats(self) -> EngineStats: ...

    def progress(self) -> Progress: ...
