"""The frame of an API's answers: their shapes, the readers that feed them, and the tokens that a call took."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import orjson

from paceline.core.generation import AnswerProgress, FinishReason, GenerationChunk, TokenLogprob
from paceline.server.faults import Fault
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning


class Reader(Protocol):
    @property
    def reasoning_tokens(self) -> int:
        """Tokens with which the model reasoned."""
        ...

    def read(self, chunk: GenerationChunk) -> list[Part]:
        """Return the parts that the answer gained."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a call took."""

    prompt: int
    completion: int
    cached: int
    """Tokens of the prompts that were found in the prefix cache."""
    first_s: float = 0.0
    """From the call's arrival to its first token."""
    whole_s: float = 0.0
    """From the call's arrival until now."""
    reasoning: int = 0
    """Tokens of the answers with which the model reasoned."""

    def as_json(self) -> dict[str, object]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


DONE = b"data: [DONE]\n\n"


COMMENT = b": the answer goes on\n\n"


def new_call_id() -> str:
    """Make an id for a call of a tool, in the form that every model's template takes (`messages.SHORT_ID`)."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class CalledTool:
    """A call of a tool, as far as it was read."""

    name: str
    id: str = field(default_factory=new_call_id)
    arguments: list[str] = field(default_factory=list[str])
    is_open: bool = False
    """It was not read to its end. One that stays open was cut off, and is not a call that a client may run."""

    def add(self, piece: CallArguments) -> None:
        self.arguments.append(piece.text)
        self.is_open = piece.is_open

    @property
    def as_text(self) -> str:
        """The call as a text, as far as it goes: for APIs that have no other way to show one that was cut off."""
        return f'{{"name": {orjson.dumps(self.name).decode()}, "arguments": {"".join(self.arguments)}'


@dataclass(slots=True)
class Collected:
    """One sequence of an answer that is sent whole."""

    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[CalledTool] = field(default_factory=list[CalledTool])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: FinishReason | None = None
    transfer: Mapping[str, object] | None = None
    """KV transfer parameters to return to a router that split the request; None otherwise."""

    @property
    def has_called(self) -> bool:
        """There are calls, and each is whole."""
        return bool(self.calls) and not any(call.is_open for call in self.calls)

    def add(self, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallBegun(_, name, is_open):
                    self.calls.append(CalledTool(name, is_open=is_open))
                case CallArguments(index):
                    self.calls[index].add(part)
        self.logprobs.extend(logprobs)
        self.finish = finish


class Streamed(Collected):
    """One sequence of an answer that is sent whole, of a shape that keeps what its events said."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape

    def add(self, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> None:
        self._shape.event(0, parts, logprobs, finish)


class Shape(ABC):
    """An API's answer as bytes: as a stream of events, or whole."""

    media_type: ClassVar[bytes] = b"text/event-stream; charset=utf-8"

    def silence(self, reading: AnswerProgress | None) -> bytes:
        """Return what a stream carries where it is silent for long.

        Args:
            reading: how far the model is loaded, or the call's prompts are read; None: not known, or they are read.
        """
        return COMMENT if reading is None else reading.comment()

    @abstractmethod
    def first_events(self) -> bytes:
        """Return the events before the first text."""

    @abstractmethod
    def event(self, index: int, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """Return the event for the parts that choice `index` gained, and for its end if it ended."""

    @abstractmethod
    def ending(self, usage: Usage) -> bytes:
        """Return the end of a stream, after all choices have ended."""

    def collected(self) -> Collected:
        """Return an empty choice, for an answer that is sent whole."""
        return Collected()

    def watching(self, readers: Sequence[Reader]) -> Sequence[Reader]:
        """Return the choices' readers. A shape may wrap them to see more."""
        return readers

    @abstractmethod
    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        """The JSON of an answer that was not streamed."""

    def fault_event(self, fault: Fault) -> bytes:
        """Return the last event of a stream that fails: its status can't change any more."""
        return b"data: " + fault.body() + b"\n\n"
