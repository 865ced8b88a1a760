"""What both endpoints' answers share: the protocol of a shape, a sequence collected for a whole answer, logprobs as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.generation import FinishReason, TokenLogprob
from paceline.core.text import Vocabulary
from paceline.server.call import Usage

LOWEST_LOGPROB = -9999.0
"""How OpenAI writes the logarithm of zero, which JSON can't hold."""

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Collected:
    """One sequence of an answer that is sent whole."""

    text: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: FinishReason | None = None


class Shape(Protocol):
    """An endpoint's answer as bytes: as SSE events, or whole."""

    def opening(self) -> bytes:
        """Events before the first text."""
        ...

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """What choice `index` gained, and its end where it ended."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The event with `choices: []` that ends a stream with `include_usage`."""
        ...

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """The JSON of an answer that was not streamed."""
        ...


def token_text(vocabulary: Vocabulary, token_id: int) -> tuple[str, list[int]]:
    """A token's text, with U+FFFD where it is a part of a character, and its bytes."""
    raw = vocabulary.token_bytes(token_id)
    return raw.decode("utf-8", "replace"), list(raw)


def finite(logprob: float) -> float:
    """A log probability JSON can hold."""
    return max(LOWEST_LOGPROB, logprob)
