"""What both endpoints' answers share: all but a choice, a sequence collected for a whole answer, logprobs as JSON."""

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
    def opening(self) -> bytes:
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
