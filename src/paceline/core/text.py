"""What the engine and the server need of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol


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

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None) -> list[int]:
        """Ids of a chat, rendered with the model's template, ready for the assistant's answer. Special tokens spelled in a message are text.

        Args:
            messages: each with a role and a content.
            now: the time that the template may show; None: this machine's.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        ...
