"""`/completion` of llama-server: the request, the events of its answer, and the tokens that events do not name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.engines.adapter import schema_of
from paceline.engines.contract import AnswerPiece, Ask
from paceline.engines.http import Http
from paceline.engines.shapes import log_probability, number, sensible, text_of, whole
from paceline.engines.stream import Stream

FIELDS: Final = ["stop", "stop_type", "tokens", "content", "model", "tokens_evaluated", "timings"]
"""Fields of the last event. Without the list it repeats the whole prompt."""
ANY_SEED: Final = 0xFFFFFFFF
"""The seed that means "any"."""
MAX_SPELLINGS: Final = 4096
"""Number of characters of several tokens that are remembered with their ids. Raising it: more memory; lowering it: more questions in texts of many such characters."""


def completion_body(ask: Ask, look_back: int) -> dict[str, Any]:
    """Return the body of `/completion`, without the prompt.

    Args:
        look_back: number of last tokens, of prompt and answer, that penalties count. The server sets memory aside for them.

    Raises:
        InvalidRequest, NotServed: the grammar is not a JSON schema.
    """
    sampling = ask.sampling
    penalised = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)
    body: dict[str, Any] = {
        "model": ask.model,
        "stream": True,
        "return_tokens": True,
        "return_progress": True,
        "response_fields": FIELDS,
        "cache_prompt": not ask.cache_salt,
        "n_predict": -1 if ask.max_tokens is None else ask.max_tokens,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "temperature": sampling.temperature,
        "dynatemp_range": 0,
        "mirostat": 0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": look_back if penalised else 0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": ANY_SEED if sampling.seed is None else sampling.seed % ANY_SEED,
        "ignore_eos": ask.ignore_eos,
        "logit_bias": [[token, bias] for token, bias in sampling.logit_bias.items()],
        "n_probs": 0 if sampling.logprobs is None else max(1, sampling.logprobs),
    }
    if ask.grammar is not None:
        body["json_schema"] = schema_of("llama-server", ask.grammar)
    return body


@dataclass(slots=True)
class LlamaCompletion:
    """Reads the events of `/completion`."""

    stream: Stream
    stop_ids: frozenset[int]
    text: str = ""
    """Text that may have more tokens than `ids`."""
    ids: list[int] = field(default_factory=list[int])
    """Tokens since the last piece. Without text they are special tokens; the last may be the end token."""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    is_partial: bool = False
    """Events may not have named all tokens since the last piece."""
    counted: int = 0
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def take(self, event: Mapping[str, Any]) -> AnswerPiece | None:
        """Read an event. Return a piece if one is whole, or leave its `text` to `piece` if its tokens are not known for certain."""
        if event.get("stop"):
            return self._end(event)
        progress = event.get("prompt_progress")
        if progress is not None:
            self.prompt_tokens, self.cached_tokens, read = (number(progress, name) for name in ("total", "cache", "processed"))
            self.stream.has_read(read)
            return AnswerPiece(tokens_read=read, prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens)
        (token,) = map(whole, event["tokens"])
        self.stream.moved()
        if token in self.stop_ids:
            self.finish = FinishReason.STOP
            self.stream.settle()
            return self.piece(tuple(self.ids)) if self.ids else None
        counted = whole(event["tokens_predicted"])
        # More than one: a character of several tokens. None: a draft's tokens, which are counted together.
        self.is_partial = self.is_partial or counted != self.counted + 1
        self.counted = counted
        self.ids.append(token)
        if "completion_probabilities" in event:
            self.logprobs += [_logprob(each) for each in event["completion_probabilities"]]
        content: object = event["content"]
        if not isinstance(content, str):
            raise TypeError("content")
        self.text = content
        if not self.text or (self.is_partial and not self.text.isascii()):
            return None
        return self.piece(tuple(self.ids))

    def piece(self, ids: tuple[int, ...]) -> AnswerPiece:
        """Return the piece of the text so far."""
        piece = AnswerPiece(self.text, ids, tuple(self.logprobs), len(ids))
        self.text, self.is_partial = "", False
        self.ids.clear()
        self.logprobs.clear()
        return piece

    def _end(self, event: Mapping[str, Any]) -> AnswerPiece | None:
        kind = event["stop_type"]
        self.finish = {"eos": FinishReason.STOP, "limit": FinishReason.LENGTH}[kind]
        self.stream.settle()
        self.prompt_tokens, timings = number(event, "tokens_evaluated"), event.get("timings")
        self.cached_tokens = number(timings, "cache_n") if isinstance(timings, dict) and "cache_n" in timings else self.cached_tokens
        if kind == "eos" and self.ids:
            self.ids.pop()
            self.logprobs = self.logprobs[: len(self.ids)]
        return self.piece(tuple(self.ids)) if self.ids else None

    def last(self) -> AnswerPiece:
        return AnswerPiece(prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens, finish=self.finish)


def _logprob(found: Mapping[str, Any]) -> TokenLogprob:
    top = tuple((whole(each["id"]), log_probability(each["logprob"])) for each in found["top_logprobs"])
    return TokenLogprob(whole(found["id"]), log_probability(found["logprob"]), top)


class Speller:
    """Finds the tokens of characters, and remembers them."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._spelled: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}

    async def ids(self, model: str, text: str, named: tuple[int, ...]) -> tuple[int, ...]:
        """Return tokens that spell a text, if those that events named may not be all of it, or more."""
        key = text, named
        if key not in self._spelled:
            if len(self._spelled) >= MAX_SPELLINGS:
                self._spelled.clear()
            self._spelled[key] = await self._spelling(model, text, named)
        return self._spelled[key]

    async def _spelling(self, model: str, text: str, named: tuple[int, ...]) -> tuple[int, ...]:
        if await self._spelled_by(model, named) == text:
            return named
        plain = tuple(await self.tokens(model, text))
        if await self._spelled_by(model, plain) == text:
            return plain
        # The tokenizer puts a space before each text, but not inside of one.
        newline, after = await self.tokens(model, "\n"), await self.tokens(model, "\n" + text)
        rest = tuple(after[len(newline) :])
        return rest if await self._spelled_by(model, rest) == text else plain

    async def tokens(self, model: str, text: str) -> list[int]:
        found = await self._http.post("/tokenize", {"model": model, "content": text, "add_special": False, "parse_special": True})
        return sensible(self._http, lambda: [whole(token) for token in found["tokens"]])

    async def _spelled_by(self, model: str, tokens: Sequence[int]) -> str:
        return text_of(await self._http.post("/detokenize", {"model": model, "tokens": list(tokens)}), "content")
