"""Chats that reach an engine of another maker as they are: the engine renders the prompt, and reads reasoning and calls itself.

Law: what a client may send is checked as for every chat. Fields that are Paceline's own do not leave it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from paceline.core.generation import GenerationChunk
from paceline.server.formats.format import THOUGHTS, CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.messages import MediaPart, Message, json_bytes
from paceline.server.requests import ChatCompletionRequest

OWN_FIELDS: Final = frozenset(
    {
        *("model", "stream", "stream_options", "n", "messages", "now", "draft", "ways", "exact", "cache_salt", "kv_transfer_params"),
        *("continue_final_message", "add_generation_prompt", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "prediction", "grammar", "regex", "stop_token_ids"),
    }
)
"""Fields that are served here, ignored, or unknown to OpenAI's API. `grammar` and `regex` are refused before."""


def passed_body(asked: ChatCompletionRequest) -> str:
    """Return the body of a chat completion, JSON, without the model and how to stream."""
    # Discriminators look at raw bodies, so pydantic would warn about models.
    body = asked.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=set(OWN_FIELDS), warnings=False)
    body["messages"] = [_message(message) for message in asked.messages]
    return json_bytes(body).decode()


def _message(message: Message) -> dict[str, Any]:
    written = message.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"content", "cache_control"}, warnings=False)
    if isinstance(message.content, list):
        written["content"] = [
            image_part(part) if isinstance(part, MediaPart) else {"type": "text", "text": part.text} for part in message.content
        ]
    else:
        written["content"] = message.content
    return written


def image_part(part: MediaPart) -> dict[str, Any]:
    """Return a part as OpenAI's API has images, from any API's form of them. Parts that are no images become a note."""
    said = part.model_extra or {}
    url: object = None
    match part.type:
        case "image_url" | "input_image":
            given = said.get("image_url")
            url = cast("dict[str, object]", given).get("url") if isinstance(given, dict) else given
        case "image":
            source = said.get("source")
            if isinstance(source, dict):
                known = cast("dict[str, object]", source)
                url = f"data:{known.get('media_type')};base64,{known.get('data')}" if known.get("type") == "base64" else known.get("url")
        case _:
            pass
    if not isinstance(url, str):
        return {"type": "text", "text": part.text}
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
            parts.append(CallBegun(index, str(said.get("name") or ""), True))
        if isinstance(text := said.get("arguments"), str) and text:
            parts.append(CallArguments(index, text, True))
        return parts
