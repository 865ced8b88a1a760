"""The tokenizer of a model that takes whole chats only, because its engine keeps its own to itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from paceline.core.errors import NotServed
from paceline.core.text import NOTHING_GIVEN, Given


class NoTokenizer:
    """Implements `core.text.Tokenizer`: an empty vocabulary. What needs a real one raises `NotServed`."""

    size = 0
    eos_ids: frozenset[int] = frozenset()
    strips_space = False
    chat_template = None
    tool_template = None
    infill_tokens = None
    response_template = None

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return {}

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        return {}

    def token_bytes(self, token_id: int) -> bytes:
        del token_id
        return b""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        _refuse(text, add_special)

    def encode_inside(self, text: str) -> list[int]:
        _refuse(text)

    def text_of(self, ids: Sequence[int]) -> str:
        _refuse(ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], now: datetime | None = None, given: Given = NOTHING_GIVEN) -> list[int]:
        _refuse(messages, now, given)


def _refuse(*_: object) -> NoReturn:
    raise NotServed("model: its engine takes whole chats only, no texts and no token ids", "Send a chat.", field="model")
