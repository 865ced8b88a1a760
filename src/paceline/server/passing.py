"""Chats that reach an engine of another maker as they are: the engine renders the prompt, and reads reasoning and calls itself.

Law: what a client may send is checked as for every chat. The fields that leave Paceline are listed in `engines.passed_chat`; all others stay here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import orjson

from paceline.core.generation import GenerationChunk
from paceline.engines.passed_chat import FIELDS, passed_chat
from paceline.server.formats.format import THOUGHTS, CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.messages import MEDIA, MediaPart, Message, json_bytes, refuse_media
from paceline.server.requests import ChatCompletionRequest

PASSED_FIELDS: Final = frozenset(FIELDS) - {"messages"}
MESSAGE_FIELDS: Final = frozenset({"role", *THOUGHTS, "tool_calls", "tool_call_id"})


def passed_body(asked: ChatCompletionRequest, *, takes_images: bool) -> str:
    """Return the body of a chat completion, JSON, without the model and how to stream.

    Args:
        takes_images: the model reads images. Otherwise a note stands in place of each.

    Raises:
        NotServed: the last message is the user's, and a part of it is neither text nor an image.
        InvalidRequest: an image is not in the body itself.
    """
    last = asked.messages[-1]
    for place, kind in last.media.items() if last.role == "user" and takes_images else ():
        if MEDIA[kind] != "image":
            raise refuse_media(kind, f"messages[{len(asked.messages) - 1}].content[{place}].type")
    # Discriminators look at raw bodies, so pydantic would warn about models.
    body = asked.model_dump(mode="json", by_alias=True, exclude_none=True, include=set(PASSED_FIELDS), warnings=False)
    for length in ("max_tokens", "max_completion_tokens"):
        if body.get(length) == -1:  # no limit, which engines write in different ways
            del body[length]
    if asked.thinks is False:
        body["reasoning_effort"] = "none"
    body["messages"] = [_message(message, takes_images=takes_images) for message in asked.messages]
    return json_bytes(passed_chat(body)).decode()


def has_notes(messages: Sequence[Message], *, takes_images: bool) -> bool:
    """Return whether notes stand in place of parts of the messages."""
    return any(not (takes_images and MEDIA[kind] == "image") for message in messages for kind in message.media.values())


def _message(message: Message, *, takes_images: bool) -> dict[str, Any]:
    written = message.model_dump(mode="json", exclude_none=True, include=set(MESSAGE_FIELDS), warnings=False)
    if message.role == "developer":
        written["role"] = "system"
    if message.role == "tool" and message.name is not None:
        written["name"] = message.name
    if isinstance(message.content, list):
        written["content"] = [
            image_part(part)
            if takes_images and isinstance(part, MediaPart) and MEDIA[part.type] == "image"
            else {"type": "text", "text": part.text}
            for part in message.content
        ]
    else:
        written["content"] = message.content
    return written


def image_part(part: MediaPart) -> dict[str, Any]:
    """Return an image as OpenAI's API has it, from any API's form. Its address is not checked."""
    said = part.model_extra or {}
    given, source = said.get("image_url"), said.get("source")
    url: object = cast("dict[str, object]", given).get("url") if isinstance(given, dict) else given
    if part.type == "image" and isinstance(source, dict):
        known = cast("dict[str, object]", source)
        url = f"data:{known.get('media_type')};base64,{known.get('data')}" if known.get("type") == "base64" else known.get("url")
    return {"type": "image_url", "image_url": {"url": url}}


class PassedReader:
    """Reads an answer that the engine has split into content, reasoning and calls."""

    reasoning_tokens = 0

    def __init__(self) -> None:
        self._open: list[int] = []

    def read(self, chunk: GenerationChunk) -> list[Part]:
        parts: list[Part] = []
        for line in chunk.deltas:
            parts += self._parts(orjson.loads(line))
        if chunk.finish_reason is not None:
            parts += [CallArguments(index, "", False) for index in self._open]
            self._open = []
        return parts

    def _parts(self, delta: Mapping[str, Any]) -> list[Part]:
        parts: list[Part] = []
        thought = next((said for name in THOUGHTS if isinstance(said := delta.get(name), str) and said), "")
        if thought:
            parts.append(Reasoning(thought))
        if isinstance(content := delta.get("content"), str) and content:
            parts.append(Content(content))
        calls = delta.get("tool_calls")
        for place, call in enumerate(cast("list[Any]", calls) if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                parts += self._call(cast("dict[str, Any]", call), place)
        return parts

    def _call(self, call: Mapping[str, Any], place: int) -> list[Part]:
        """Return the parts of a piece of a call. Calls count from 0 in the order of their beginnings."""
        index = call.get("index")
        index = index if isinstance(index, int) and 0 <= index <= len(self._open) else place
        function = call.get("function")
        said = cast("dict[str, Any]", function) if isinstance(function, dict) else {}
        parts: list[Part] = []
        if index not in self._open:
            index = len(self._open)
            self._open.append(index)
            name = said.get("name")
            parts.append(CallBegun(index, name if isinstance(name, str) else "", True))
        if isinstance(text := said.get("arguments"), str) and text:
            parts.append(CallArguments(index, text, True))
        return parts
