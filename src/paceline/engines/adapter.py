"""The adapter of an engine with OpenAI's API. Each engine's module says how it differs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar, Final

import orjson

from paceline.core.errors import InvalidRequest, NotServed, PacelineError
from paceline.core.generation import Grammar, GrammarKind
from paceline.engines.contract import AnswerPiece, Ask, Busy, Door, EngineIdentity, EngineModel, Scores, Takes, Vectors
from paceline.engines.http import Http
from paceline.engines.passed_chat import check_references
from paceline.engines.patience import EnginePatience
from paceline.engines.shapes import Choices, chat_body, entries, number, sensible
from paceline.engines.stream import Stream

TEXT_AND_MESSAGES: Final = frozenset({Takes.TEXT, Takes.MESSAGES})
VECTOR_BYTES: Final = 512 << 10
"""Maximum size of one vector as JSON. Raising it: a broken engine can fill more memory; 16,384 numbers of 20 digits take 340 KiB."""


class Adapter(ABC):
    """An engine with OpenAI's API. Subclasses override what their engine does otherwise."""

    name: ClassVar[str]
    """The engine's name, as in `EngineIdentity`."""
    alive_path: ClassVar[str] = "/v1/models"
    """A cheap page that the engine answers while its model is at work."""

    verifies: ClassVar[bool] = False
    """Look whether the model is still the same while a prompt is read. For engines that say so quickly."""

    def __init__(self, door: Door, patience: EnginePatience | None = None) -> None:
        self.http = Http(door, self.name, patience or EnginePatience())
        self._marks: dict[str, Hashable] = {}
        """Marks of the listed models, by name. An engine may change its model under a name."""

    @property
    def door(self) -> Door:
        return self.http.door

    @abstractmethod
    async def identify(self) -> EngineIdentity | None:
        """See `ForeignEngine.identify`."""

    @abstractmethod
    async def models(self) -> tuple[EngineModel, ...]:
        """See `ForeignEngine.models`."""

    async def is_ready(self) -> bool:
        return bool(await self.models())

    async def busy(self) -> Busy:
        return Busy()

    async def load(self, model: str) -> None:
        raise NotServed(f"{self.name} can't load {model} on demand", f"Start {self.name} with it.")

    async def unload(self, model: str) -> None:
        raise NotServed(f"{self.name} can't unload {model} on demand", f"Stop {self.name} to free its memory.")

    def generate(self, ask: Ask) -> AsyncGenerator[AnswerPiece, None]:
        if isinstance(ask.prompt, Mapping):
            return self._openai("/v1/chat/completions", self.chat_body, ask)
        return self.write(ask)

    def write(self, ask: Ask) -> AsyncGenerator[AnswerPiece]:
        """Write after token ids or a text."""
        return self._openai("/v1/completions", self.text_body, ask)

    async def prepare(self, ask: Ask) -> None:  # noqa: B027 - most engines refuse nothing
        """Refuse a request that the engine would take for something else."""

    def chat_body(self, ask: Ask) -> dict[str, Any]:
        return chat_body(ask)

    def text_body(self, ask: Ask) -> dict[str, Any]:
        """Return the body of a request with a rendered prompt. An engine that takes them otherwise, or not at all, has none."""
        raise NotServed(f"{self.name} takes no rendered prompt for {ask.model}", "Send a chat.")

    async def _openai(self, path: str, write_body: Callable[[Ask], Mapping[str, Any]], ask: Ask) -> AsyncGenerator[AnswerPiece]:
        body = write_body(ask)
        await self.prepare(ask)
        async with self.stream(path, body, ask.model, via=ask.via) as stream:
            choices = Choices(self.http, stream, body["model"], self.is_other, ask.sampling.logprobs or 0)
            async for event in stream:
                piece = choices.take(event)
                if piece is not None:
                    if piece.tokens_read is None and not stream.began:
                        await stream.begin()
                    yield piece
            yield choices.last()

    def stream(
        self, path: str, body: Mapping[str, Any], model: str, *, lines: bool = False, via: tuple[str, ...] = ()
    ) -> AbstractAsyncContextManager[Stream]:
        """Send a request for an answer of a model."""
        verify = partial(self._verify, model) if self.verifies else None
        return self.http.stream(path, body, self.explain, verify=verify, lines=lines, refusal=self.refusal, via=via)

    def is_other(self, asked: str, said: str) -> bool:
        """Return whether a name in an answer means another model than the one that was asked for."""
        return said != asked

    def refusal(self, status: int, message: str) -> PacelineError | None:
        """Return the error for a refusal of this engine alone. None: the common reading is right."""
        del status, message
        return None

    async def explain(self) -> None:
        """Find out whether the engine lives, while its answer is silent.

        Raises:
            EngineGone: it does not.
        """
        reply = await self.http.ask("GET", self.alive_path)
        if reply.status >= 500:
            raise self.http.gone(f"answers {self.alive_path} with status {reply.status}", "See its own log for the cause.")

    async def mark(self, model: str) -> Hashable:
        """Return what tells a model from another of the same name. None: the engine does not say now."""
        listed = entries(await self.http.get("/v1/models"))
        return next((self.mark_of(each) for each in listed if each.get("id") == model), None)

    def mark_of(self, listed: Mapping[str, Any]) -> Hashable:
        """Return the mark of an entry in the list of models."""
        return tuple(listed.get(name) for name in ("root", "max_model_len"))

    async def _verify(self, model: str) -> None:
        try:
            now = await self.mark(model)
        except (PacelineError, TypeError, KeyError):  # it says nothing else about a model that answers
            return
        known = self._marks.get(model)
        if now is None or known is None:
            self._marks[model] = now or known
        elif now != known:
            raise self.http.gone(f"has another model under the name {model}", "Ask again: its list of models is read anew.")

    async def embed(self, model: str, texts: tuple[str, ...], via: tuple[str, ...] = ()) -> Vectors:
        body = {"model": model, "input": list(texts), "encoding_format": "float"}
        found = await self.work("/v1/embeddings", body, len(texts), via)
        return Vectors(vectors_of(self.http, in_order(self.http, found, "data", "embedding", len(texts))), _prompt_tokens(found))

    async def rerank(self, model: str, query: str, texts: tuple[str, ...], via: tuple[str, ...] = ()) -> Scores:
        found = await self.work("/v1/rerank", {"model": model, "query": query, "documents": list(texts)}, len(texts), via)
        scores = in_order(self.http, found, "results", "relevance_score", len(texts))
        return Scores(vectors_of(self.http, [scores])[0], _prompt_tokens(found))

    async def work(self, path: str, body: Mapping[str, Any], count: int, via: tuple[str, ...]) -> dict[str, Any]:
        """Have the engine work on texts, and return its answer.

        Args:
            count: number of texts, which bounds the answer.
        """
        wait_s, max_bytes = self.http.patience.first_token_s, (1 << 20) + VECTOR_BYTES * count
        return await self.http.post(path, body, wait_s=wait_s, max_bytes=max_bytes, refusal=self.refusal, via=via)

    async def close(self) -> None:
        await self.http.close()


def vectors_of(http: Http, vectors: list[Any]) -> list[list[float]]:
    """Return vectors that were checked.

    Raises:
        EngineGone: one is not made of numbers, or has another length than the others.
    """
    for vector in vectors:
        if not isinstance(vector, list) or len(vector) != len(vectors[0]) or any(type(value) not in {float, int} for value in vector):
            raise http.gone("returned something else than numbers", "See its own log for the cause.")
    return vectors


def _prompt_tokens(found: Mapping[str, Any]) -> int:
    usage = found.get("usage")
    return number(usage, "prompt_tokens", "total_tokens") if isinstance(usage, dict) else 0


def in_order(http: Http, found: Mapping[str, Any], listed: str, field: str, count: int) -> list[Any]:
    """Return a field of each result, in the order of the texts that were sent.

    Raises:
        EngineGone: results are missing.
    """
    by_index = sensible(http, lambda: {each["index"]: each[field] for each in entries(found, listed)})
    if sorted(by_index) != list(range(count)):
        raise http.gone(f"returned {len(by_index)} results for {count} texts")
    return [by_index[index] for index in range(count)]


def needs(name: str, **unmet: bool) -> None:
    """Refuse a request with a part that the engine can't do.

    Raises:
        NotServed: a part is asked for.
    """
    for part, asked in unmet.items():
        if asked:
            raise NotServed(f"{name} can't do {part}", "Ask without it, or another engine.", field=part)


def schema_of(name: str, grammar: Grammar) -> Any:
    """Return a JSON schema, for engines that follow one.

    Raises:
        NotServed: the grammar is of another kind.
        InvalidRequest: it is not JSON, or refers to something outside of itself.
    """
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise NotServed(f"{name} can't follow this form of an answer", "Ask for a JSON schema, or another engine.", field="response_format")
    try:
        schema = orjson.loads(grammar.text)
    except orjson.JSONDecodeError:
        raise InvalidRequest("The JSON schema is not JSON", "Send a JSON schema.", field="response_format") from None
    check_references(schema)
    return schema
