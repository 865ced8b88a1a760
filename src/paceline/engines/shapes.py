"""OpenAI's shapes, which all engines have in common: lists of models, streams of text and of chat, embeddings and rerank."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.engines.contract import AnswerPiece, Ask
from paceline.engines.http import Http
from paceline.engines.sense import OTHER_VERSION
from paceline.engines.stream import Stream

T = TypeVar("T")
FINISHES: Final = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "content_filter": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
"""Finish reasons of an answer that is complete. Any other ends it as lost."""
MAX_COUNT: Final = (1 << 31) - 1
"""Greatest id or count of tokens. Protocols of Paceline, and engines, have 32 bits for one."""
MAX_BYTES: Final = (1 << 53) - 1
"""Greatest size of a file. Clients that read JSON as floats lose digits beyond it."""
LEAST_LOGPROB: Final = -3.5e38
"""Below any number of 32 bits, which engines write for the logarithm of zero."""
ROUNDING: Final = 0.01
"""Greatest sum of rounding errors in a log probability. Raising it: figures of another kind are taken for one."""
TEXTS: Final = ("content", "reasoning_content", "reasoning", "thinking")
"""Fields of a chat's delta that have text."""


def sensible(http: Http, read: Callable[..., T], *found: Any) -> T:
    """Return what `read` makes of an engine's JSON.

    Raises:
        EngineGone: the JSON has another shape than `read` expects.
    """
    try:
        return read(*found)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        raise http.gone("answers in another shape than its API has", OTHER_VERSION) from None


def number(found: Mapping[str, Any], *names: str, most: int = MAX_COUNT) -> int:
    """Return the first of these fields that is an integer from 1 to `most`, or 0."""
    for name in names:
        value = found.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
            return value
    return 0


def whole(value: object) -> int:
    """Return a token id or a count. Raises ValueError if it is something else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError("not an id or a count")
    return value


def log_probability(value: object) -> float:
    """Return a log probability. Raises ValueError if it is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_LOGPROB <= value <= ROUNDING:
        raise ValueError("not a log probability")
    return min(0.0, float(value))


def text_of(found: Mapping[str, Any], name: str) -> str:
    """Return a field that is a text, or an empty text."""
    value = found.get(name)
    return value if isinstance(value, str) else ""


def entries(found: Mapping[str, Any], name: str = "data") -> list[dict[str, Any]]:
    """Return the objects in a list of an answer. Raises TypeError if it has no list there."""
    listed = found[name]
    if not isinstance(listed, list):
        raise TypeError(name)
    return [each for each in listed if isinstance(each, dict)]


def chat_body(ask: Ask) -> dict[str, Any]:
    """Return the body of a chat completion as it is sent: as the client wrote it, but for the model, the stream and the length."""
    assert isinstance(ask.prompt, Mapping)
    body = dict(ask.prompt) | {"model": ask.model, "stream": True, "stream_options": {"include_usage": True}}
    if ask.max_tokens is not None:
        body["max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"] = ask.max_tokens
    return body


@dataclass(slots=True)
class EngineUsage:
    """Figures at the end of an answer, in tokens."""

    prompt: int = 0
    cached: int = 0
    answer: int = 0

    def read(self, usage: Mapping[str, Any]) -> None:
        self.prompt, self.answer = number(usage, "prompt_tokens"), number(usage, "completion_tokens")
        details = usage.get("prompt_tokens_details")
        self.cached = number(details, "cached_tokens") if isinstance(details, dict) else 0


@dataclass(slots=True)
class Choices:
    """Reads the events of one answer, of a text completion or a chat completion."""

    http: Http
    stream: Stream
    asked: str
    is_other: Callable[[str, str], bool]
    """Returns true if a name in an answer means another model than the one that was asked for."""
    n_top: int = 0
    """Alternatives of each log probability."""
    counted: int = 0
    ids: list[int] = field(default_factory=list[int])
    """Tokens without text so far: the first of a character, or the end token."""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    usage: EngineUsage | None = None
    finish: FinishReason | None = None

    def take(self, event: Mapping[str, Any] | bytes) -> AnswerPiece | None:
        """Read an event. Return a piece if it has one.

        Raises:
            EngineGone: another model answers, or the event has another shape.
        """
        return self._progress(event) if isinstance(event, bytes) else sensible(self.http, self._piece, event)

    def last(self) -> AnswerPiece:
        """Return the piece with `finish`, at the end of the stream."""
        usage = self.usage or EngineUsage()
        tokens = max(0, usage.answer - self.counted)
        return AnswerPiece(n_tokens=tokens, prompt_tokens=usage.prompt, cached_tokens=usage.cached, finish=self.finish)

    def _piece(self, event: Mapping[str, Any]) -> AnswerPiece | None:
        said = event.get("model")
        if said and said != self.asked and self.is_other(self.asked, said):
            raise self.http.gone(f"answers with another model than {self.asked}", "Look at which models it has.")
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = self.usage or EngineUsage()
            self.usage.read(usage)
        progress = event.get("prompt_progress")
        if isinstance(progress, dict):
            return self._read(number(progress, "processed"))
        choices = event.get("choices")
        if not choices or self.finish is not None:
            return None
        choice = choices[0]
        if choice.get("index"):
            raise ValueError("several answers at once")
        reason = choice.get("finish_reason")
        if reason is not None:
            self.finish = FINISHES[reason]
            self.stream.settle()
        return self._gained(choice)

    def _read(self, tokens: int, prompt: int = 0) -> AnswerPiece:
        self.stream.has_read(tokens)
        return AnswerPiece(tokens_read=tokens, prompt_tokens=prompt)

    def _gained(self, choice: Mapping[str, Any]) -> AnswerPiece | None:
        delta = choice.get("delta")
        if delta is None:
            return self._text(choice)
        if not _has_text(delta):
            return None
        self.stream.moved()
        self.counted += 1
        text = delta.get("content")
        return AnswerPiece(text=text if isinstance(text, str) else "", n_tokens=1, delta=delta)

    def _text(self, choice: Mapping[str, Any]) -> AnswerPiece | None:
        text, ids = choice.get("text") or "", choice.get("token_ids")
        if not isinstance(text, str):
            raise TypeError("text")
        if text or ids:
            self.stream.moved()
        if ids is None:
            self.counted += bool(text)
            return AnswerPiece(text=text, n_tokens=1) if text else None
        if not isinstance(ids, list):
            raise TypeError("token_ids")
        self.counted += len(ids)
        self.ids += map(whole, ids)
        if choice.get("logprobs"):
            self.logprobs += _logprobs(choice["logprobs"], self.n_top)
        if choice.get("finish_reason") == "stop" and self.ids:  # the last token is the one that ends the answer
            self.ids.pop()
            self.logprobs = self.logprobs[: len(self.ids)]
        if not text and (not self.ids or self.finish is None):
            return None
        piece = AnswerPiece(text=text, token_ids=tuple(self.ids), logprobs=tuple(self.logprobs), n_tokens=len(self.ids))
        self.ids.clear()
        self.logprobs.clear()
        return piece

    def _progress(self, comment: bytes) -> AnswerPiece | None:
        """Return the progress in a comment such as mlx-lm's `: keepalive 512/2048`."""
        found = _KEEPALIVE.fullmatch(comment)
        return None if found is None else self._read(int(found[1]), int(found[2]))


_KEEPALIVE: Final = re.compile(rb":\s*keepalive\s+(\d{1,9})/(\d{1,9})\s*")


def _has_text(delta: Mapping[str, Any]) -> bool:
    """Return whether a delta adds to the answer."""
    if any(isinstance(delta.get(name), str) and delta[name] for name in TEXTS):
        return True
    calls = delta.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return any(isinstance(each, dict) and (each.get("name") or each.get("arguments")) for each in functions)


def _logprobs(found: Mapping[str, Any], n_top: int) -> list[TokenLogprob]:
    """Return the log probabilities of a text completion that names tokens `token_id:5`."""
    logprobs: list[TokenLogprob] = []
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        others = [(_id_of(name), log_probability(value)) for name, value in (top or {}).items()]
        logprobs.append(TokenLogprob(_id_of(token), log_probability(logprob), tuple(sorted(others, key=lambda each: -each[1])[:n_top])))
    return logprobs


def _id_of(token: str) -> int:
    return whole(int(token.removeprefix("token_id:")))
