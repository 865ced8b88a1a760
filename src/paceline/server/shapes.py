"""Answers as bytes: what both endpoints' share, `chat.completion` and its chunks, and `text_completion` with the older endpoint's own shape of
logprobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import orjson

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.core.text import Vocabulary
from paceline.server.call import Call, Usage

LOWEST_LOGPROB = -9999.0
"""How OpenAI writes the logarithm of zero, which JSON can't hold."""

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Collected:
    """One sequence of an answer that is sent whole."""

    text: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: FinishReason | None = None


class Shape(ABC):
    """An endpoint's answer as bytes: as SSE events, or whole. What a stream repeats is built once; a token costs one escape."""

    whole_object: ClassVar[str]
    event_object: ClassVar[str]

    def __init__(self, call: Call) -> None:
        self._call = call
        self._vocabulary = call.model.tokenizer
        self._head = b"data: " + orjson.dumps(self._base(self.event_object))[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"

    @abstractmethod
    def first_events(self) -> bytes:
        """Events before the first text."""

    @abstractmethod
    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """What choice `index` gained, and its end where it ended."""

    @abstractmethod
    def choice(self, collected: Collected) -> dict[str, object]:
        """A choice of a whole answer, but for its index and finish reason."""

    def usage_event(self, usage: Usage) -> bytes:
        """The event with `choices: []` that ends a stream with `include_usage`."""
        return self._head + b'],"usage":' + orjson.dumps(usage.as_json()) + b"}\n\n"

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """The JSON of an answer that was not streamed."""
        listed = [{"index": index, **self.choice(collected), "finish_reason": collected.finish} for index, collected in enumerate(choices)]
        return orjson.dumps({**self._base(self.whole_object), "choices": listed, "usage": usage.as_json()})

    def _base(self, kind: str) -> dict[str, object]:
        call = self._call
        return {
            "id": call.id,
            "object": kind,
            "created": call.created,
            "model": call.model.name,
            "system_fingerprint": call.model.fingerprint,
        }


def token_text(vocabulary: Vocabulary, token_id: int) -> tuple[str, list[int]]:
    """A token's text, with U+FFFD where it is a part of a character, and its bytes."""
    raw = vocabulary.token_bytes(token_id)
    return raw.decode("utf-8", "replace"), list(raw)


def finite(logprob: float) -> float:
    """A log probability JSON can hold."""
    return max(LOWEST_LOGPROB, logprob)


class ChatShape(Shape):
    """The chat endpoint's answers."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._text_heads = [self._head + b'{"index":%d,"delta":{"content":' % index for index in range(call.n * len(call.requests))]
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._close

    def first_events(self) -> bytes:
        """One event with the role for every choice."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return b"".join(self._head + choice % index + self._close for index in range(len(self._text_heads)))

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """A delta, and the event with the finish reason after it."""
        out = b""
        if logprobs:
            listed = orjson.dumps(chat_logprobs(self._vocabulary, logprobs))
            out = self._text_heads[index] + orjson.dumps(text) + b'},"logprobs":' + listed + b',"finish_reason":null}' + self._close
        elif text:
            out = self._text_heads[index] + orjson.dumps(text) + self._tail
        if finish is not None:
            ending = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%s"}' % (index, finish.value.encode())
            out += self._head + ending + self._close
        return out

    def choice(self, collected: Collected) -> dict[str, object]:
        return {
            "message": {"role": "assistant", "content": "".join(collected.text), "refusal": None},
            "logprobs": chat_logprobs(self._vocabulary, collected.logprobs) if self._call.logprobs else None,
        }


def chat_logprobs(vocabulary: Vocabulary, logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """A choice's `logprobs`, in chat's shape."""
    return {
        "content": [
            _entry(vocabulary, one.token_id, one.logprob) | {"top_logprobs": [_entry(vocabulary, *alternative) for alternative in one.top]}
            for one in logprobs
        ],
        "refusal": None,
    }


def _entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, object]:
    text, raw = token_text(vocabulary, token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": raw}


class CompletionShape(Shape):
    """The plain completion endpoint's answers."""

    whole_object = event_object = "text_completion"

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        count = call.n * len(call.requests)
        self._text_heads = [self._head + b'{"index":%d,"text":' % index for index in range(count)]
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._close
        self._offsets = [0] * count

    def first_events(self) -> bytes:
        """Nothing: there are no roles here."""
        return b""

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """One event: the text, with the finish reason where it ended."""
        if finish is None and not logprobs:
            return self._text_heads[index] + orjson.dumps(text) + self._tail if text else b""
        listed = b"null"
        if logprobs:
            shown, self._offsets[index] = completion_logprobs(self._vocabulary, logprobs, self._offsets[index])
            listed = orjson.dumps(shown)
        ending = orjson.dumps(finish)
        return self._text_heads[index] + orjson.dumps(text) + b',"logprobs":' + listed + b',"finish_reason":' + ending + b"}" + self._close

    def choice(self, collected: Collected) -> dict[str, object]:
        return {
            "text": "".join(collected.text),
            "logprobs": completion_logprobs(self._vocabulary, collected.logprobs, 0)[0] if self._call.logprobs else None,
        }


def completion_logprobs(vocabulary: Vocabulary, logprobs: Sequence[TokenLogprob], offset: int) -> tuple[dict[str, object], int]:
    """A choice's `logprobs` in this endpoint's shape, and the text offset (in characters) after them."""
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float]] = []
    for one in logprobs:
        text, _ = token_text(vocabulary, one.token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        # Two ids may read the same; the likelier comes first and stays.
        alternatives: dict[str, float] = {}
        for token_id, logprob in one.top:
            alternatives.setdefault(token_text(vocabulary, token_id)[0], finite(logprob))
        top.append(alternatives)
    shown: dict[str, object] = {
        "tokens": tokens,
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": top,
        "text_offset": offsets,
    }
    return shown, offset
