"""Reads the answers of a call: chunks of text in, parts out (`formats.parts`).

Where a format's markers are special tokens, which spell nothing in a chunk's text, the text is spelled here again from the chunk's tokens, with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest
from paceline.core.text import Vocabulary
from paceline.engine.stops import TextStream
from paceline.server.formats.format import Format
from paceline.server.formats.parts import Content, Part
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

    def read(self, chunk: GenerationChunk) -> list[Part]:
        """What the answer gained."""
        ...


class PlainReader:
    """Reads an answer that is all content."""

    def read(self, chunk: GenerationChunk) -> list[Part]:
        return [Content(chunk.text)] if chunk.text else []


class ChoiceReader:
    """Reads one answer."""

    def __init__(self, reading: Reading, vocabulary: Vocabulary, request: GenerationRequest) -> None:
        self._reader = AnswerReader(reading.format, reading.tools, in_reasoning=reading.in_reasoning, parallel=reading.parallel)
        self._ends = request.stop_ids if request.ignore_eos else request.stop_ids | vocabulary.eos_ids
        self._text = TextStream(_Spelling(vocabulary, reading.spelled), request.stop) if reading.spelled else None

    def read(self, chunk: GenerationChunk) -> list[Part]:
        """What the answer gained."""
        parts = self._reader.feed(chunk.text if self._text is None else self._spell(self._text, chunk))
        return parts if chunk.finish_reason is None else parts + self._reader.end()

    def _spell(self, stream: TextStream, chunk: GenerationChunk) -> str:
        tokens = chunk.token_ids
        if chunk.finish_reason is FinishReason.STOP and tokens and tokens[-1] in self._ends:
            tokens = tokens[:-1]  # it ended the answer, and is no part of it
        text = "".join([stream.push(token) for token in tokens])
        return text if chunk.finish_reason is None else text + stream.flush()


class _Spelling:
    """A vocabulary in which some special tokens spell their names."""

    def __init__(self, vocabulary: Vocabulary, spelled: Mapping[int, bytes]) -> None:
        self._vocabulary, self._spelled = vocabulary, spelled
        self.size, self.eos_ids = vocabulary.size, vocabulary.eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._spelled.get(token_id) or self._vocabulary.token_bytes(token_id)
