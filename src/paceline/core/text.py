"""What the engine and the server need of a tokenizer; and text that others wrote, made safe to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Given:
    """What a chat template is given beside messages and the time."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As OpenAI's API writes them."""
    switches: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The template's own, such as `enable_thinking`."""
    salt: str = ""
    """What is remembered of this chat serves chats of the same salt alone."""
    continues: bool = False
    """The last message, the assistant's, is gone on with: the text ends behind its content."""
    begins_turn: bool = True
    """The text ends with the beginning of the assistant's turn."""


NOTHING_GIVEN = Given()


class Vocabulary(Protocol):
    """Ids to bytes. The text of a sequence is its tokens' bytes, joined and decoded as UTF-8."""

    @property
    def size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; empty for special tokens."""
        ...


class Tokenizer(Vocabulary, Protocol):
    """Text to ids and back, and the model's chat template."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`, with what the model wants around one if `add_special`. Special tokens spelled in it are those tokens."""
        ...

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of a piece of a text: the vocabulary puts no space before it. Special tokens spelled in it are text."""
        ...

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text that `encode` made these ids of. Special tokens are spelled, and bytes that are not UTF-8 replaced."""
        ...

    @property
    def strips_space(self) -> bool:
        """A text's first token begins with a space that is not part of the text."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The special tokens, by what they spell."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's text; None for a model without one."""
        ...

    @property
    def tool_template(self) -> str | None:
        """The text of the template for chats with tools, where the model has another one for them."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """How its maker wants the model's tokens drawn where a request does not say: fields of `SamplingParams`, within their ranges."""
        ...

    @property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        """What stands before the text before a gap, before the text behind it, and before what fills it, where the model's files name these tokens."""
        ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """How answers are to be read, where the model brings it: transformers' `response_template`."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        """Ids of a chat, rendered with the model's template, ready for the assistant's answer. Special tokens spelled in a message are text.

        Args:
            messages: each with a role and a content.
            now: the time that the template may show; None: this machine's.
            given: to the template, beside messages and time.

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
    """Text that streams to a terminal, in pieces as it comes: its lines, tabs and joined characters stay; what could command the terminal, or
    show letters in another order than they are in, is a question mark.
    """
    return text.translate(_HARMFUL)


def printable(text: str, most: int = 300) -> str:
    """The text, cut, with a question mark for whatever is not a plain character."""
    return "".join(char if char.isprintable() else "?" for char in text[:most])


def escaped(text: str) -> str:
    """Return the text on one line: line ends, terminal escapes and other characters that are not plain are written out."""
    return text if text.isprintable() else "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many first tokens, or letters, two texts share. Compares slices, which is a hundred times faster than one by one."""
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
