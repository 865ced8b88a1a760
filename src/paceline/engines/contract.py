"""The contract with engines of other makers: the requests that Paceline makes, and the answers. Each adapter implements `ForeignEngine`; one conformance suite tests them all.

Laws:
- Nothing but `load`, `unload` and `generate` makes an engine work: `identify`, `models`, `is_ready` and `busy` only read.
- Every wait for the engine has a bound. An engine that is gone, silent or talks nonsense raises `EngineGone`, never an error of the HTTP library.
- An engine's key reaches no message, log or error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from paceline.core.generation import FinishReason, Grammar, SamplingParams, TokenLogprob


class Takes(StrEnum):
    """A form of prompt. After the loss of its engine, an answer goes on elsewhere from `IDS` or `TEXT`. An answer to `MESSAGES` can't once it has begun."""

    IDS = "ids"
    """Token ids; the engine's answer has ids too."""
    TEXT = "text"
    """The rendered prompt. Special tokens spelled in it are parsed."""
    MESSAGES = "messages"
    """The body of an OpenAI chat completion, passed through. The engine renders the prompt and reads tool calls itself."""


class Capability(StrEnum):
    """Something that a model can do in an engine besides writing text."""

    IMAGES = "images"
    """Takes images in messages."""
    TOOLS = "tools"
    """Reads tool calls itself. It matters for `Takes.MESSAGES` alone."""
    SCHEMAS = "schemas"
    """Follows a JSON schema."""
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Which engine answers at a URL."""

    name: str
    """`llama-server`, `ollama`, `lmstudio`, `vllm`, `mlx_lm.server` or `openai`."""
    version: str = ""
    """Version, in the engine's own words. Empty if it does not say."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model that an engine can run. Fields are empty or 0 where the engine does not say."""

    name: str
    """The name that requests to the engine use."""
    takes: frozenset[Takes]
    digest: str = ""
    """SHA-256 of the weights file, hex, if the engine knows it."""
    path: Path | None = None
    """Where the engine says that its weights lie: a file or a folder. It may be on a disk that this process can't read."""
    quantisation: str = ""
    """The engine's own name of it, such as Q4_K_M."""
    context: int = 0
    """Maximum tokens of prompt and answer together, of one request: the engine's context divided by its slots where slots share it."""
    slots: int = 0
    """Number of requests that run at once; more wait."""
    size_bytes: int = 0
    loaded: bool = True
    """False: a request would make the engine load it, and may make it unload another."""
    capabilities: frozenset[Capability] = frozenset()
    via: tuple[str, ...] = ()
    """Marks of the nodes that a request for it goes through, if the engine is an endpoint of Paceline; see `core.via`."""

    @property
    def works(self) -> bool:
        """It does something besides writing: vectors, or ranks."""
        return not self.capabilities.isdisjoint({Capability.EMBEDDINGS, Capability.RERANK})


@dataclass(frozen=True, slots=True)
class Busy:
    """Load of an engine. None where it does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    """Fraction of the KV memory, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One sequence to write."""

    model: str
    prompt: tuple[int, ...] | str | Mapping[str, Any]
    """Token ids, a rendered text, or the body of a chat completion: one of the forms that the model takes. What was written so far stands at the end of ids
    and texts. A body's own sampling fields count, and the fields below but `max_tokens` are not used."""
    max_tokens: int | None = None
    """None: as many as the context leaves."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    cache_salt: str = ""
    via: tuple[str, ...] = ()
    """Marks of the nodes that the request went through, this one's last; see `core.via`. Sent as a header, with every form of prompt."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """The next part of an answer."""

    text: str = ""
    """Whole characters."""
    token_ids: tuple[int, ...] = ()
    """Their tokens, for `Takes.IDS`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """For `Takes.IDS`, if they were asked for."""
    n_tokens: int = 0
    """Tokens gained, as far as the engine tells them apart. With ids: their number."""
    delta: Mapping[str, Any] | None = None
    """For `Takes.MESSAGES`: the `delta` of the choice, as the engine wrote it."""
    prompt_tokens: int = 0
    """Length of the prompt as the engine counted it; on the piece that tells it."""
    cached_tokens: int = 0
    """Prompt tokens that the engine did not compute again; on the piece that tells it."""
    tokens_read: int | None = None
    """Progress through the prompt, on pieces that carry nothing else; None: no progress."""
    finish: FinishReason | None = None
    """STOP or LENGTH, on the last piece. `finish` is STOP if the answer ends in tool calls."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of texts, in their order."""

    vectors: list[list[float]]
    tokens: int = 0
    """Tokens of all texts, as the engine counts them; 0: it does not say."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Relevance of texts, in their order."""

    scores: list[float]
    tokens: int = 0
    """Tokens of all texts and queries, as the engine counts them; 0: it does not say."""


@dataclass(frozen=True, slots=True)
class Door:
    """How an engine is reached."""

    url: str
    """Without a path's end slash, such as http://127.0.0.1:8080."""
    api_key: str = field(default="", repr=False)
    socket: Path | None = None
    """Unix socket to connect to instead of the URL's host and port."""
    may_leave: bool = False
    """The host may have an address outside of the home network. False: a connection to one is refused, also if the name meant another address before."""
    is_held: Callable[[], bool] | None = field(default=None, repr=False, compare=False)
    """Says whether the engine still listens there, for an engine at a port that this node started. Blocks for milliseconds, from any thread. It is asked after
    connecting and before anything is sent."""


class ForeignEngine(Protocol):
    """A server of another maker. Its methods are for one event loop."""

    @property
    def door(self) -> Door: ...

    async def identify(self) -> EngineIdentity | None:
        """Return which engine answers at the door, by an endpoint that only this engine has. None: it is not this adapter's engine.

        Raises:
            EngineGone: nothing answers, or not in time.
        """
        ...

    async def models(self) -> tuple[EngineModel, ...]:
        """Return the models that requests may name. Loads nothing.

        Raises:
            EngineGone: it does not answer, or with something else than its API describes.
        """
        ...

    async def is_ready(self) -> bool:
        """Return whether the engine takes requests now: False while a server loads its only model.

        Raises:
            EngineGone: as `models`.
        """
        ...

    async def busy(self) -> Busy:
        """Return the engine's load.

        Raises:
            EngineGone: as `models`.
        """
        ...

    async def load(self, model: str) -> None:
        """Have the engine load a model, and return once it is loaded.

        Raises:
            NotServed: the engine can't load on demand.
            UnknownModel: it has no such model.
            EngineGone: it failed to.
        """
        ...

    async def unload(self, model: str) -> None:
        """Have the engine unload a model. Raises as `load`."""
        ...

    def generate(self, ask: Ask) -> AsyncGenerator[AnswerPiece, None]:
        """Write one sequence. Closing the generator ends the request at the engine. A sequence that ends without a piece that has `finish` was lost.

        Raises:
            InvalidRequest, NotServed: the engine refuses the request, or can't do a part of it (a grammar, log probabilities).
            ContextOverflow: the prompt and `max_tokens` exceed the engine's context.
            UnknownModel: it has no such model.
            ModelAway: it is loading.
            Overloaded: it takes no more requests now.
            EngineGone: it can't be reached, fails, breaks off, is silent for too long, or talks nonsense.
        """
        ...

    async def embed(self, model: str, texts: tuple[str, ...], via: tuple[str, ...] = ()) -> Vectors:
        """Return a vector for each text.

        Args:
            via: see `Ask.via`.

        Raises:
            NotServed: the engine or the model makes none.
            InvalidRequest, UnknownModel, Overloaded, EngineGone: as `generate`.
        """
        ...

    async def rerank(self, model: str, query: str, texts: tuple[str, ...], via: tuple[str, ...] = ()) -> Scores:
        """Return the relevance of each text to the query. Raises as `embed`."""
        ...

    async def close(self) -> None:
        """Close the connections. Running requests end. Idempotent."""
        ...
