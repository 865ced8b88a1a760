"""Reads the answers of a call: chunks of text in, parts out (`formats.parts`).

Where a format's markers are special tokens, which spell nothing in a chunk's text, the text is spelled here again from the chunk's tokens, with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest
from paceline.core.text import Vocabulary
from paceline.engine.stops import TextStream
from paceline.server.formats.format import Format
from paceline.server.formats.parts import CallArguments, Content, Part, Reasoning
from paceline.server.formats.reader import AnswerReader


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of a call are to be read."""

    format: Format
    tools: Mapping[str, Mapping[str, Any]]
    """The schema of each tool's parameters, by name. Empty: text that looks like a call is text."""
    in_reasoning: bool
    """The prompt ended where the model reasons."""
    parallel: bool
    """An answer may have several calls."""
    spelled: Mapping[int, bytes]
    """The special tokens among the format's markers."""


class Reader(Protocol):
    """Reads one answer."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens with which the model reasoned."""
        ...

    def read(self, chunk: GenerationChunk) -> list[Part]:
        """What the answer gained."""
        ...


class PlainReader:
    """Reads an answer that is all content."""

    reasoning_tokens = 0

    def read(self, chunk: GenerationChunk) -> list[Part]:
        return [Content(chunk.text)] if chunk.text else []


class ChoiceReader:
    """Reads one answer."""

    def __init__(self, reading: Reading, vocabulary: Vocabulary, request: GenerationRequest) -> None:
        self._reader = AnswerReader(reading.format, reading.tools, in_reasoning=reading.in_reasoning, parallel=reading.parallel)
        self._ends = request.stop_ids if request.ignore_eos else request.stop_ids | vocabulary.eos_ids
        respelled = reading.spelled or reading.format.thinking is not None
        self._text = TextStream(_Spelling(vocabulary, reading.spelled), request.stop) if respelled else None
        self._reasons = reading.in_reasoning
        self.reasoning_tokens = 0
        """With which the model reasoned."""

    def read(self, chunk: GenerationChunk) -> list[Part]:
        """What the answer gained."""
        parts = self._reader.feed(chunk.text) if self._text is None else self._by_token(self._text, chunk)
        return parts if chunk.finish_reason is None else parts + self._reader.end()

    def _by_token(self, stream: TextStream, chunk: GenerationChunk) -> list[Part]:
        """Read token by token: how many of them are reasoning does not depend on how they were cut into chunks."""
        tokens = chunk.token_ids
        if chunk.finish_reason is FinishReason.STOP and tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]  # it ended the answer, and is no part of it
        parts: list[Part] = []
        for token in tokens:
            gained = self._reader.feed(stream.push(token))
            if any(isinstance(part, Reasoning) for part in gained) if gained else self._reasons:
                self.reasoning_tokens += 1
            if gained:
                self._reasons = isinstance(gained[-1], Reasoning)
                _join(parts, gained)
        if chunk.finish_reason is not None:
            _join(parts, self._reader.feed(stream.flush()))
        return parts


def _join(parts: list[Part], more: Sequence[Part]) -> None:
    """Append parts; texts of one kind become one."""
    for part in more:
        match parts[-1] if parts else None, part:
            case (Content(before), Content(text)):
                parts[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                parts[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(other, text)) if index == other:
                parts[-1] = CallArguments(index, before + text)
            case _:
                parts.append(part)


class _Spelling:
    """A vocabulary in which some special tokens spell their names."""

    def __init__(self, vocabulary: Vocabulary, spelled: Mapping[int, bytes]) -> None:
        self._vocabulary, self._spelled = vocabulary, spelled
        self.size, self.eos_ids = vocabulary.size, vocabulary.eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._spelled.get(token_id) or self._vocabulary.token_bytes(token_id)
