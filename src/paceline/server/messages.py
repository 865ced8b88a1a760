"""Messages and tools of a chat, as pydantic models, and as models' templates take them.

Templates take what transformers gives them: contents as one string, a call's arguments as an object. For a template that knows no tools they are
described in plain text, in the format that most models were shown. What a template refuses of this, `server.fitting` writes in another way. Lines at
the beginning of a prompt that a client changes from request to request, for its vendor's accounts alone, are dropped: no two prompts would have
anything in common.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Annotated, Any, Literal, cast

import orjson
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError, from_json

from paceline.core.errors import NotServed
from paceline.server.formats.format import THOUGHTS
from paceline.server.lazy_model import LazyModel

MAX_TOOLS = 512
"""In one request. Raising it: a template may write more before it is refused for its length."""
MAX_CALLS = 512
"""In one message."""
NAME = r"^[a-zA-Z0-9_.:-]{1,128}$"


def json_bytes(value: object) -> bytes:
    """Write a value as JSON, with whole numbers of any size, which orjson does not take."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value).encode()


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a text as a JSON object. None: it is something else, or nested too deep."""
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def is_whole(value: object) -> bool:
    """Return whether a value is a float without a fraction, small enough to be an integer field."""
    return isinstance(value, float) and value.is_integer() and abs(value) < 2.0**63


def string_or_list(value: object) -> str:
    return "as-string" if isinstance(value, str) else "as-list"


def kind_of(value: object) -> object:
    """Return the `type` of a value that may be an object; None: it has none."""
    return cast("dict[str, object]", value).get("type") if isinstance(value, dict) else None


NOT_SERVED = "not_served"
"""The type of a validation error about something that others serve and Paceline does not."""


def refused(what: str) -> PydanticCustomError:
    """Return an error that names what is not served."""
    return PydanticCustomError(NOT_SERVED, "{what}", {"what": what})


def off(what: str, *offs: object) -> BeforeValidator:
    """Return a validator that refuses a field, unless its value, one of `offs` or null, asks for nothing. The value becomes null."""

    def check(value: object) -> None:
        if value is not None and not any(type(value) is type(one) and value == one for one in offs):
            raise refused(what)

    return BeforeValidator(check)


def only_types(why: str, *served: str) -> BeforeValidator:
    """Return a validator that refuses an object with another `type` than these. `why` has the type as `{kind}`."""

    def check(value: object) -> object:
        if isinstance(kind := kind_of(value), str) and kind not in served:
            raise refused(why.format(kind=kind[:80]))
        return value

    return BeforeValidator(check)


class Strict(LazyModel):
    """No coercion ("1" is not 1). What becomes of fields that it does not have, which are kept, `server.fields` says."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=())


class ClosedObject(Strict):
    """An object in which every field changes the answer: names that it does not have are refused, see `server.fields`."""


class TextPart(Strict):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(default=None, description="Ignored: prompts are always computed once.")


MEDIA: Mapping[str, str] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "video_url": "video",
    "input_audio": "audio",
    "file": "file",
    "input_file": "file",
    "document": "document",
}
"""Types of parts that models here can't read, and what they are."""


class MediaPart(LazyModel):
    """A part that is not text. For a model that reads text only a note replaces the part, or the request is refused."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: Literal["image_url", "input_image", "image", "video_url", "input_audio", "file", "input_file", "document"]

    @property
    def text(self) -> str:
        """A note that stands in its place."""
        return f"[{MEDIA[self.type]} left out: this model reads text only]"


def refuse_media(kind: str, field: str) -> NotServed:
    """Return the error for a part of a type of `MEDIA` in a user's last message."""
    what = f"{field}: only text is served: no images, audio or files, and the last message has one of type {kind}"
    return NotServed(
        what, "Send it without, or ask a model elsewhere. In earlier messages and in results of tools a note replaces it.", field=field
    )


def _kind_of_part(value: object) -> str:
    return "as-media" if isinstance(value, MediaPart) or kind_of(value) in MEDIA else "as-text"


AnyPart = Annotated[Annotated[TextPart, Tag("as-text")] | Annotated[MediaPart, Tag("as-media")], Discriminator(_kind_of_part)]
Content = Annotated[
    Annotated[str, Tag("as-string")] | Annotated[list[AnyPart], Field(min_length=1, fail_fast=True), Tag("as-list")],
    Discriminator(string_or_list),
]


def joined(parts: Sequence[str]) -> str:
    """Return texts as one, with line breaks between those that are not empty. Every API joins the parts of a message so."""
    return "\n".join([text for text in parts if text])


class Thinker(Strict):
    """A message with thoughts, under any of their names."""

    reasoning_content: str | None = Field(
        default=None, description="What the assistant thought before it said this. Templates show it or don't."
    )
    reasoning: str | None = Field(default=None, description="Another name of `reasoning_content`.")
    thinking: str | None = Field(default=None, description="Another name of `reasoning_content`.")

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or self.thinking or ""


class CalledFunction(Strict):
    name: Annotated[str, Field(pattern=NAME)]
    arguments: str = Field(description="JSON text.")


class ToolCall(Strict):
    """A tool that the assistant called."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(default=None, description="Ignored.")


class Function(ClosedObject):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema. Where missing: no parameters.")
    strict: bool | None = Field(default=None, description="The arguments are of the schema, always.")


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = Field(default=None, description="Ignored.")


class NamedFunction(ClosedObject):
    name: str


class NamedTool(ClosedObject):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(ClosedObject):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(ClosedObject):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(value: object) -> str:
    if isinstance(value, str):
        return "as-string"
    return "as-allowed" if isinstance(value, dict) and "allowed_tools" in value else "as-named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as-string")]
    | Annotated[NamedTool, Tag("as-named")]
    | Annotated[AllowedToolChoice, Tag("as-allowed")],
    Discriminator(_kind_of_choice),
]


class Message(Thinker):
    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(description="`developer` is rendered as `system`.")
    content: Content | None = Field(default=None, description="May be missing in an assistant's turn that has calls or is empty.")
    name: str | None = Field(default=None, description="Ignored, except in a tool's message.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="The id of the call that a tool's message answers."
    )
    cache_control: dict[str, Any] | None = Field(default=None, description="Ignored.")
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)

    @property
    def text(self) -> str:
        """The message's text, its parts joined, with a note for each that is not text."""
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else joined([part.text for part in self.content])

    @property
    def media(self) -> dict[int, str]:
        """The types of the parts that are not text, by their places."""
        parts = self.content if isinstance(self.content, list) else ()
        return {place: part.type for place, part in enumerate(parts) if isinstance(part, MediaPart)}

    @property
    def letters(self) -> list[str]:
        """Everything in it that a template may write."""
        calls = [call.function.name + call.function.arguments for call in self.tool_calls or ()]
        return [self.text, self.thoughts, *calls]


def check_messages(messages: Sequence[Message]) -> str | None:
    """Check messages together. Returns the first field at fault and the reason; None: they are valid."""
    known = set[str]()
    for place, message in enumerate(messages):
        at = f"messages[{place}]"
        if message.tool_calls and message.role != "assistant":
            return f"{at}.tool_calls: only the assistant calls tools"
        if message.content is None and message.role != "assistant":
            return f"{at}.content: missing"
        if message.role == "tool":
            if message.tool_call_id is None:
                return f"{at}.tool_call_id: missing"
            if message.tool_call_id not in known:
                return f"{at}.tool_call_id: no message before it calls a tool by that id"
        elif message.tool_call_id is not None:
            return f"{at}.tool_call_id: only in a tool's message"
        known.update(call.id for call in message.tool_calls or ())
    return None


_OPENING = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "required", "minProperties"),
        *("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "if", "const", "enum", "dependentSchemas", "dependencies"),
    }
)
"""Keywords with which a schema without properties may still allow some."""


def parameters_of(function: Function) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments; that of `{}` alone if it has none."""
    schema = function.parameters or {}
    is_empty = schema.get("properties", {}) == {} and not _OPENING & schema.keys()
    return {"type": "object", **schema, "properties": {}, "additionalProperties": False} if is_empty else schema


def check_media(messages: Sequence[Message]) -> None:
    """Refuse a question about a part that is not text: one in the last message, if that is the user's. A note stands for any other.

    Raises:
        NotServed: there is such a part.
    """
    if messages[-1].role == "user":
        for place, kind in messages[-1].media.items():
            raise refuse_media(kind, f"messages[{len(messages) - 1}].content[{place}].type")


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates take it, without the fields about how to serve it."""
    described: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    described["parameters"] = parameters_of(tool.function)
    return {"type": "function", "function": described}


class Arguments(Enum):
    """How a template is given the arguments of calls."""

    AS_READ = auto()
    """An object; other text stays text."""
    OBJECTS = auto()
    """Always an object; other text, as in a call that was cut, becomes the assistant's."""
    TEXT = auto()
    """The text that the model wrote."""


def messages_for_template(messages: Sequence[Message], arguments: Arguments = Arguments.AS_READ) -> list[dict[str, Any]]:
    """Return messages as a template that knows tools takes them."""
    names: dict[str, str] = {}
    written: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
        one |= dict.fromkeys(THOUGHTS, message.thoughts) if message.thoughts else {}
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            one["tool_calls"] = [_call_for_template(call, arguments) for call in message.tool_calls]
            if arguments is Arguments.OBJECTS:
                cut = [text for call in message.tool_calls if json_object(text := call.function.arguments or "{}") is None]
                one["content"] = joined([one["content"], *cut])
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
            one["name"] = message.name or names.get(message.tool_call_id, "")
        written.append(one)
    return written


def messages_without_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: those are described in the system message, calls and results are text."""
    written: list[dict[str, Any]] = []
    for message in messages:
        text = message.text
        for call in message.tool_calls or ():
            text += "\n" * bool(text) + _TEXT_CALL % (orjson.dumps(call.function.name).decode(), call.function.arguments or "{}")
        if message.role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if written and written[-1]["role"] == "user" and written[-1]["content"].endswith("</tool_response>"):
                written[-1]["content"] += "\n" + text  # results of one turn are one message: most templates want turns to alternate
                continue
        role = {"developer": "system", "tool": "user"}.get(message.role, message.role)
        thoughts = dict.fromkeys(THOUGHTS, message.thoughts) if message.thoughts else {}
        written.append({"role": role, "content": text, **thoughts})
    if tools:
        told = _TEXT_TOOLS % "\n".join(json_bytes(tool).decode() for tool in tools)
        if written and written[0]["role"] == "system":
            written[0]["content"] += "\n\n" + told
        else:
            written.insert(0, {"role": "system", "content": told})
    return written


_TEXT_CALL = '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>'
_TEXT_TOOLS = """You may call one or more functions to assist with the user's request.

Here are the available functions:
<tools>
%s
</tools>

For each function call, return a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{"name": <function-name>, "arguments": <arguments-object>}
</tool_call>
The results come back within <tool_response></tool_response> tags."""


def _call_for_template(call: ToolCall, arguments: Arguments) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    found: object = text if arguments is Arguments.TEXT else json_object(text)
    if found is None:
        found = {} if arguments is Arguments.OBJECTS else text
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": found}}


_HEADERS = re.compile(r"(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")
"""Claude Code's: versions of itself and a checksum of the conversation."""


def without_headers(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with such lines removed from the first one, if it is a system message. If nothing else is in it, the message is dropped."""
    first = messages[0]
    found = _HEADERS.match(first.text) if first.role in {"system", "developer"} else None
    if found is None:
        return list(messages)
    rest = first.text[found.end() :]
    if rest:
        return [first.model_copy(update={"content": rest}), *messages[1:]]
    return list(messages[1:] or messages)
