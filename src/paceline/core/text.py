"""The tokenizer interface of the engine and the server, and functions that make untrusted text safe to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Given:
    """Inputs of a chat template other than the messages and the time."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools, in the form of OpenAI's API."""
    switches: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The template's own variables, such as `enable_thinking`."""
    salt: str = ""
    """Cache salt. What is cached of this chat serves only chats with the same salt."""
    continues: bool = False
    """The answer continues the last message, which is the assistant's: the text ends right after its content."""
    begins_turn: bool = True
    """The text ends with the beginning of the assistant's turn."""


NOTHING_GIVEN = Given()


class Vocabulary(Protocol):
    """A vocabulary: ids to bytes. The text of a sequence is its tokens' bytes, joined and decoded as UTF-8."""

    @property
    def size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text; empty for special tokens."""
        ...


class Tokenizer(Vocabulary, Protocol):
    """Conversion from text to ids and back, and the model's chat template."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the ids of `text`. `add_special` adds the special tokens that the model expects around a text. Special tokens spelled in `text` are parsed."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of a piece of a text: the vocabulary puts no space before it. Special tokens spelled in it are plain text."""
        ...

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text that `encode` made these ids of. Special tokens are spelled out, and bytes that are not UTF-8 are replaced."""
        ...

    @property
    def strips_space(self) -> bool:
        """True if a text's first token begins with a space that is not part of the text."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens, by their text."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Text of the chat template; None: the model has none."""
        ...

    @property
    def tool_template(self) -> str | None:
        """Text of the separate template for chats with tools; None: the model has none."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The maker's defaults for sampling where a request does not say: fields of `SamplingParams`, within their ranges."""
        ...

    @property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        """Fill-in-the-middle tokens (prefix, suffix, middle); None: the model's files do not name them."""
        ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """Rules for parsing answers that the model brings (transformers' `response_template`); None: it brings none."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        """Return the ids of a chat, rendered with the model's template, ready for the assistant's answer. Special tokens spelled in a message are plain text.

        Args:
            messages: each with a role and a content.
            now: the time that the template may show; None: this machine's.
            given: inputs of the template other than messages and time.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        ...


_HARMFUL = {
    code: "?"
    for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
    if chr(code) not in "\n\t"
} | {ord("\r"): None}


def shown(text: str) -> str:
    """Return text that is safe to stream to a terminal, piece by piece. Lines, tabs and joined characters stay. Characters that could command the terminal, or
    reorder the letters, become question marks.
    """
    return text.translate(_HARMFUL)


def printable(text: str, most: int = 300) -> str:
    """Return the first `most` characters of the text, with a question mark for each that is not printable."""
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def escaped(text: str) -> str:
    """Return the text on one line: line ends, terminal escapes and other unprintable characters are written as escapes."""
    return text if text.isprintable() else "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many first tokens, or characters, two sequences share. It compares slices, which is a hundred times faster than one item at a time."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
