"""A client's call after intake: checked, tokenized, ready to run. One call may hold several prompts.

Reads the answers of a call: chunks of text in, parts out (`formats.parts`).

A chunk's text says where the answer ends. Special tokens spell nothing in it: those that are markers of the format are put where their tokens stand,
and the names of the others between two characters that no text has.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any, Final

from paceline.core.errors import InvalidRequest
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest, GrammarKind
from paceline.core.inference import ServedModel
from paceline.core.text import Vocabulary
from paceline.server.formats.cursor import PLAIN, SPECIAL
from paceline.server.formats.format import CallArguments, Content, Format, Part, Reasoning
from paceline.server.formats.reader import AnswerReader
from paceline.server.passing import PassedReader
from paceline.server.shape import Reader, Shape

EVERY_LETTER: Final = frozenset({GrammarKind.REGEX, GrammarKind.LARK})
"""Forms of the client's own, whose answers it may compare letter by letter."""


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
    unnamed: Mapping[int, str] = field(default_factory=dict[int, str])
    """The names of the other special tokens."""
    required: bool = False
    """An answer has to be calls."""


class Beginning:
    """The beginning of an answer's text. A vocabulary may begin every text with a space that is not part of it."""

    def __init__(self, *, has_space: bool) -> None:
        self._has_space = has_space

    def cut(self, text: str) -> str:
        """Return the next piece of the answer, without that space."""
        if not self._has_space or not text:
            return text
        self._has_space = False
        return text.removeprefix(" ")


class PlainReader:
    """Reads an answer that is all content."""

    reasoning_tokens = 0

    def __init__(self, *, has_space: bool = False) -> None:
        self._beginning = Beginning(has_space=has_space)

    def read(self, chunk: GenerationChunk) -> list[Part]:
        text = self._beginning.cut(chunk.text)
        return [Content(text)] if text else []


class ChoiceReader:
    """Reads one answer, token by token: how many of them are reasoning does not depend on how they were cut into chunks."""

    def __init__(self, reading: Reading, vocabulary: Vocabulary, request: GenerationRequest, *, has_space: bool = False) -> None:
        self._beginning = Beginning(has_space=has_space)
        self._spelled = {token: spelled.decode() for token, spelled in reading.spelled.items()}
        self._reader = AnswerReader(
            reading.format,
            reading.tools,
            in_reasoning=reading.in_reasoning,
            parallel=reading.parallel,
            special=self._spelled.values(),
            required=reading.required,
        )
        self._ends = request.stop_ids if request.ignore_eos else request.stop_ids | vocabulary.eos_ids
        if reading.tools:  # without calls such a token would spell nothing anywhere
            self._spelled |= {token: f"{SPECIAL}{name}{PLAIN}" for token, name in reading.unnamed.items() if token not in self._ends}
        self._token_bytes = vocabulary.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._waiting: deque[tuple[int, str]] = deque()
        """Tokens that wait for their text: the number of characters to come, and the marker that the token spells."""
        self._reasons = reading.in_reasoning
        self._told: bool | None = None
        """The text of the first waiting token so far is reasoning. None: no text came."""
        self.reasoning_tokens = 0
        """Number of tokens with which the model reasoned."""

    def read(self, chunk: GenerationChunk) -> list[Part]:
        tokens, text = chunk.token_ids, chunk.text
        is_own_end = chunk.finish_reason is FinishReason.STOP and tokens[-1:] and tokens[-1] in self._ends
        if is_own_end:
            tokens = tokens[:-1]  # it ends the answer and is not part of it
        self._waiting.extend(self._expected(token) for token in tokens)
        parts: list[Part] = []
        while self._waiting:
            missing, mark = self._waiting.popleft()
            piece, text = text[:missing], text[missing:]
            self._feed(mark or self._beginning.cut(piece), parts)
            if len(piece) < missing:  # the rest may belong to a stop string
                self._waiting.appendleft((missing - len(piece), mark))
                break
            self._count()
        if chunk.finish_reason is not None:
            self._feed(self._beginning.cut(text), parts)
            for _ in self._waiting:  # a stop string took their text
                self._count()
            has_failed = chunk.finish_reason not in {FinishReason.STOP, FinishReason.LENGTH}
            _join(parts, self._reader.end(is_cut=not is_own_end, has_failed=has_failed))
        return parts

    def _expected(self, token: int) -> tuple[int, str]:
        length = len(self._decode(self._token_bytes(token)))
        return length, "" if length else self._spelled.get(token, "")

    def _feed(self, text: str, parts: list[Part]) -> None:
        if gained := self._reader.feed(text):
            self._told = bool(self._told) or any(isinstance(part, Reasoning) for part in gained)
            self._reasons = isinstance(gained[-1], Reasoning)
            _join(parts, gained)

    def _count(self) -> None:
        """Count a token once all its text is there."""
        self.reasoning_tokens += self._reasons if self._told is None else self._told
        self._told = None


def _join(parts: list[Part], more: Sequence[Part]) -> None:
    """Append parts; texts of one kind become one."""
    for part in more:
        match parts[-1] if parts else None, part:
            case (Content(before), Content(text)):
                parts[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                parts[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(other, text, is_open)) if index == other:
                parts[-1] = CallArguments(index, before + text, is_open)
            case _:
                parts.append(part)


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request of any of the APIs."""

    id: str
    shape: Callable[[Call], Shape]
    """Factory of the shape that writes the answer as its API does."""
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
    """Description of how to read its answers; None: they are all content."""
    is_turn: bool = False
    """Each answer is a text of its own, and does not go on with the prompt's last one."""
    include_events: bool = False
    """The stream tells of machines lost and found, too."""
    echoed: tuple[str, ...] = ()
    """Texts that the answers begin with, one a prompt; none where prompts are not repeated."""
    ignored: tuple[str, ...] = ()
    """Fields of the body that the server does not know."""
    fitted: tuple[str, ...] = ()
    """Names of what was changed to fit the chat to the model's template."""

    def sent_by(self, client: str, via: tuple[str, ...] = ()) -> Call:
        """Return it as the call of a client at a network address, which came through nodes with these marks."""
        return replace(self, requests=tuple(replace(request, client=client, via=via) for request in self.requests))

    def named(self, request_id: str) -> Call:
        """Return the call with named legs: the client's X-Request-Id, the place of each prompt, and 8 hex digits of this node's own, as vLLM names them.

        Raises:
            InvalidRequest: the id has a colon.
        """
        if all(request.leg is None for request in self.requests):
            return self
        if ":" in request_id:
            raise InvalidRequest("X-Request-Id: a request with kv_transfer_params has none with a colon", field="kv_transfer_params")
        kind = self.id.partition("-")[0]

        def named(one: GenerationRequest) -> GenerationRequest:
            if one.leg is None:
                return one
            return replace(one, leg=replace(one.leg, request_id=f"{kind}-{request_id}{one.leg.request_id}-{token_hex(4)}"))

        return replace(self, requests=tuple(map(named, self.requests)))

    def readers(self) -> Sequence[Reader]:
        return [self._reader(request) for request in self.requests for _ in range(self.n)]

    def _reader(self, request: GenerationRequest) -> Reader:
        has_space = self.model.tokenizer.strips_space and self._begins_text(request)
        if request.chat:
            return PassedReader()
        if self.reading is None:
            return PlainReader(has_space=has_space)
        return ChoiceReader(self.reading, self.model.tokenizer, request, has_space=has_space)

    def has_space(self, place: int) -> bool:
        """Return whether choices of a prompt begin with a token that has a leading space outside their text. A repeated prompt comes first."""
        request, tokenizer = self.requests[place], self.model.tokenizer
        repeats = bool(self.echoed) and any(map(tokenizer.token_bytes, request.prompt_ids))
        return tokenizer.strips_space and (repeats or self._begins_text(request))

    def _begins_text(self, request: GenerationRequest) -> bool:
        """Return whether an answer is the beginning of a text. A form decides every letter of one, its first space too."""
        if request.grammar is not None and request.grammar.kind in EVERY_LETTER:
            return False
        return self.is_turn or not any(map(self.model.tokenizer.token_bytes, request.prompt_ids))
