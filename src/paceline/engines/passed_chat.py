"""Chats that reach an engine as they are: the fields that leave Paceline, and no others.

Law: a body holds only what is listed here, whether a client of this machine or another machine wrote it. An engine may take any other field for an order: to
load a model, to read a file, to ask an address.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, cast

from paceline.core.errors import InvalidRequest
from paceline.core.text import printable

Shape: TypeAlias = "Mapping[str, Shape] | tuple[Shape] | None"
"""The fields of an object, the shape of each entry of a list, or None: any value."""

_CALLS: Final[Shape] = ({"id": None, "type": None, "function": {"name": None, "arguments": None}},)
_NAMED: Final[Shape] = {"type": None, "function": {"name": None}}
_MESSAGE: Final[Mapping[str, Shape]] = {
    **dict.fromkeys(("role", "content", "name", "reasoning_content", "reasoning", "thinking", "tool_call_id")),
    "tool_calls": _CALLS,
}
FIELDS: Final[Mapping[str, Shape]] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty")),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "logit_bias", "stop", "parallel_tool_calls", "reasoning_effort")),
    "chat_template_kwargs": None,
    "messages": (_MESSAGE,),
    "tools": ({"type": None, "function": dict.fromkeys(("name", "description", "parameters", "strict"))},),
    "tool_choice": {**_NAMED, "allowed_tools": {"mode": None, "tools": (_NAMED,)}},
    "response_format": {"type": None, "schema": None, "json_schema": dict.fromkeys(("name", "description", "schema", "strict"))},
}
"""Fields of a chat completion that change an answer. The model, the length and how to stream are set for each engine (`shapes.chat_body`)."""
NO_SWITCHES: Final = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "strftime_now"),
    }
)
"""Arguments of the function that renders a chat, which engines fill from `chat_template_kwargs` too. They are not switches of a template."""
_IMAGE: Final = re.compile(r"data:image/([a-z0-9.-]{1,40})(?:;[a-z0-9.=-]{1,40}){0,4}?;base64,", re.IGNORECASE)
MAX_QUOTED: Final = 60
"""Maximum characters of an image's address in a message. Raising it: messages fill the screen."""
SEND_IT: Final = "Send the image itself: data:image/png;base64,..."


def passed_chat(body: object) -> dict[str, Any]:
    """Return the body of a chat completion with the fields in `FIELDS` alone.

    Raises:
        InvalidRequest: it has another shape, a part that is neither text nor an image, or needs something that is not in the body itself.
    """
    found = cast("dict[str, Any]", _kept(body, FIELDS, "body"))
    if not isinstance(found.get("messages"), list):
        raise _malformed("messages")
    for message in found["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = [_part(part) for part in cast("list[object]", content)]
        elif content is not None and not isinstance(content, str):
            raise _malformed("content")
    switches = found.get("chat_template_kwargs")
    if switches is not None and not isinstance(switches, dict):
        raise _malformed("chat_template_kwargs")
    if taken := NO_SWITCHES & set(cast("dict[str, Any]", switches or {})):
        raise InvalidRequest(
            f"chat_template_kwargs.{min(taken)}: is not a switch of a template",
            "Send the field itself where there is one.",
            field="chat_template_kwargs",
        )
    for schema in (found.get("response_format"), *(found.get("tools") or ())):
        check_references(schema)
    return found


def check_references(schema: object) -> None:
    """Refuse a JSON schema that refers to something outside of itself.

    Raises:
        InvalidRequest: an engine would look for it, in files or at an address.
    """
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as fields:
                named = cast("dict[str, object]", fields)
                for name in ("$ref", "$dynamicRef"):
                    if isinstance(where := named.get(name), str) and not where.startswith("#"):
                        what = f"A schema refers to {printable(where[:MAX_QUOTED])!r}, which is not in it"
                        raise InvalidRequest(what, "Put it into the schema, under $defs.", field="response_format")
                waiting += named.values()
            case list() as entries:
                waiting += cast("list[object]", entries)
            case _:
                pass


def image_url(url: object) -> str:
    """Return the data URL of an image.

    Raises:
        InvalidRequest: it is an address, which an engine would ask from inside the home network, or is not base64.
    """
    found = _IMAGE.match(url) if isinstance(url, str) else None
    if found is None:
        what = printable(url[:MAX_QUOTED]) if isinstance(url, str) else ""
        why = "only images as base64 are taken" if what.lower().startswith("data:") else "addresses are not fetched"
        what = f"An image is given as {what!r}, and {why}" if what else "An image has no data"
        raise InvalidRequest(what, SEND_IT, field="messages")
    data = "".join(cast("str", url)[found.end() :].split())
    data += "=" * (-len(data) % 4)
    try:
        is_image = bool(binascii.a2b_base64(data, strict_mode=True))
    except ValueError:
        is_image = False
    if not is_image:
        raise InvalidRequest("The data of an image is not base64", SEND_IT, field="messages")
    return f"data:image/{found[1].lower()};base64,{data}"


def _part(part: object) -> dict[str, Any]:
    """Return a part of a message."""
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": url}}:
            return {"type": "image_url", "image_url": {"url": image_url(url)}}
        case _:
            raise _malformed("content")


def _kept(value: object, shape: Shape, field: str) -> object:
    """Return a value without the fields that its shape does not have."""
    if shape is None or (field == "tool_choice" and isinstance(value, str)):
        return value
    if isinstance(shape, tuple):
        if not isinstance(value, list):
            raise _malformed(field)
        return [_kept(each, shape[0], field) for each in cast("list[object]", value)]
    if not isinstance(value, dict):
        raise _malformed(field)
    given = cast("dict[str, object]", value)
    named = {name: (given[name], inner) for name, inner in shape.items() if name in given and (inner is None or given[name] is not None)}
    return {name: _kept(each, inner, name) for name, (each, inner) in named.items()}


def _malformed(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: not as a chat completion has it", "Send a chat completion.", field=field)
