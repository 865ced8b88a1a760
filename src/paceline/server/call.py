"""A client's call after intake: checked, tokenized, ready to run. One call may hold several prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from paceline.core.generation import GenerationRequest
from paceline.core.inference import ServedModel
from paceline.server.reading import ChoiceReader, PlainReader, Reader, Reading

if TYPE_CHECKING:
    from paceline.server.shapes import Shape


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True)
class Call:
    """What `/v1/chat/completions` or `/v1/completions` was asked for."""

    id: str
    endpoint: Endpoint
    model: ServedModel
    created: int
    """Unix seconds."""
    requests: tuple[GenerationRequest, ...]
    """One a prompt, each with the same `n`. Choice `i` of prompt `p` has index `p * n + i`."""
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    reading: Reading | None = None
    """How its answers are read; None: they are all content."""
    include_events: bool = False
    """The stream tells of machines lost and found, too."""
    echoed: tuple[str, ...] = ()
    """Texts that the answers begin with, one a prompt; none where prompts are not repeated."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that nobody here knows."""
    shape: Callable[[Call], Shape] | None = None
    """Of its answer, where the API is another than `endpoint`."""

    def readers(self) -> Sequence[Reader]:
        """A reader for each choice."""
        if self.reading is None:
            return [PlainReader()] * (self.n * len(self.requests))
        return [ChoiceReader(self.reading, self.model.tokenizer, request) for request in self.requests for _ in range(self.n)]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a call took."""

    prompt: int
    completion: int
    cached: int
    """Of the prompts' tokens, those found in the prefix cache."""
    first_s: float = 0.0
    """From the call's arrival to its first token."""
    whole_s: float = 0.0
    """From the call's arrival until now."""
    reasoning: int = 0
    """Of the answers' tokens, those with which the model reasoned."""

    def as_json(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
