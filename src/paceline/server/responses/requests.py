"""The body of POST /v1/responses, as pydantic models: what is accepted, and the OpenAPI schema, from one source.

A field is served, ignored because it changes no answer here, or refused: then only the value that means "off" passes. Items come back as they were
given, from this server or another one of the same API: what they carry beside their text is ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from paceline.core.generation import LOGPROBS
from paceline.server.messages import (
    MAX_TOOLS,
    MEDIA,
    NAME,
    MediaPart,
    Strict,
    joined,
    kind_of,
    off,
    only_types,
    refused,
    string_or_list,
)
from paceline.server.requests import BY_KIND_OF_FORMAT, JsonObjectFormat, JsonSchema, ResponseFormat, Sampling, TextFormat

MAX_ITEMS = 1 << 16
MAX_METADATA = 16
ItemId = Annotated[str, Field(min_length=1, max_length=256)]


class InputPart(Strict):
    """A piece of text. The parts of what the model wrote carry annotations and log probabilities."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, description="Ignored.")
    logprobs: list[Any] | None = Field(default=None, description="Ignored.")
    prompt_cache_breakpoint: Any = Field(default=None, description="Ignored.")


def _check_part(value: object) -> object:
    if kind_of(value) == "refusal":
        raise refused("A refusal can't be part of a prompt here")
    return value


def _kind_of_part(value: object) -> str:
    return "as-media" if kind_of(value) in MEDIA else "as-text"


AnyInputPart = Annotated[
    Annotated[InputPart, Tag("as-text")] | Annotated[MediaPart, Tag("as-media")], Discriminator(_kind_of_part), BeforeValidator(_check_part)
]
Parts = Annotated[list[AnyInputPart], Field(fail_fast=True)]
Content = Annotated[Annotated[str, Tag("as-string")] | Annotated[Parts, Tag("as-list")], Discriminator(string_or_list)]


def text_of(content: str | list[InputPart | MediaPart]) -> str:
    """Return the text of a content, its parts joined, with a note for each part that is not text."""
    return content if isinstance(content, str) else joined([part.text for part in content])


class Item(Strict):
    """Fields that all items may have."""

    id: ItemId | None = None
    status: str | None = Field(default=None, description="Ignored.")


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: str | None = Field(default=None, description="Ignored.")


class CallItem(Item):
    """A tool that the model called."""

    type: Literal["function_call"]
    call_id: ItemId
    name: Annotated[str, Field(pattern=NAME)]
    arguments: str = Field(description="JSON text.")
    namespace: str | None = Field(default=None, description="The namespace of the function.")
    caller: Any = Field(default=None, description="Ignored.")


class OutputItem(Item):
    """The result of a tool."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: Content
    name: str | None = Field(default=None, description="Ignored.")
    namespace: str | None = Field(default=None, description="Ignored.")
    caller: Any = Field(default=None, description="Ignored.")


class ReasoningItem(Item):
    """The model's reasoning before its answer."""

    type: Literal["reasoning"]
    summary: Parts | None = Field(default=None, description="Taken for the reasoning where there is no content.")
    content: Parts | None = None
    encrypted_content: str | None = Field(
        default=None, description="Taken where there is no text and this endpoint wrote it; else ignored."
    )


class ReferenceItem(Strict):
    """Stands for an item of a kept response."""

    type: Literal["item_reference"] | None = None
    id: ItemId


AnyItem = MessageItem | CallItem | OutputItem | ReasoningItem
ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _kind_of_item(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    item = cast("dict[str, object]", value)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    return f"as-{kind}" if kind in ITEMS else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("as-message")]
    | Annotated[CallItem, Tag("as-function_call")]
    | Annotated[OutputItem, Tag("as-function_call_output")]
    | Annotated[ReasoningItem, Tag("as-reasoning")]
    | Annotated[ReferenceItem, Tag("as-item_reference")],
    Discriminator(_kind_of_item, custom_error_type="item", custom_error_message="Input should be an item: an object with a type"),
    only_types(f"Items of type {{kind!r}} are not served, only {', '.join(ITEMS)}", *ITEMS),
]
Input = Annotated[
    Annotated[str, Tag("as-string")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("as-list")],
    Discriminator(string_or_list),
]


class FunctionTool(Strict):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema. Where missing: no parameters.")
    strict: bool | None = Field(default=None, description="The arguments are of the schema.")
    defer_loading: bool | None = Field(default=None, description="Ignored.")
    allowed_callers: list[str] | None = Field(default=None, description="Ignored.")
    output_schema: dict[str, Any] | None = Field(default=None, description="Ignored.")


ONLY_FUNCTIONS = only_types("Only tools of type function are served: no {kind}", "function", "allowed_tools")


def shown_name(namespace: str | None, name: str) -> str:
    """Return the name by which a model sees a function."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


class NamespaceTool(Strict):
    """Functions under a name in common. A model sees each as `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = Field(default=None, description="Shown in front of the first function's.")
    tools: list[Annotated[FunctionTool, ONLY_FUNCTIONS]]

    @model_validator(mode="after")
    def _short(self) -> NamespaceTool:
        if any(re.fullmatch(NAME, shown_name(self.name, tool.name)) is None for tool in self.tools):
            raise PydanticCustomError("name", "The name of a namespace and of a function in it should have at most 126 letters together")
        return self


def _kind_of_tool(value: object) -> str:
    return "as-namespace" if kind_of(value) == "namespace" else "as-function"


AnyTool = Annotated[
    Annotated[Annotated[FunctionTool, ONLY_FUNCTIONS], Tag("as-function")] | Annotated[NamespaceTool, Tag("as-namespace")],
    Discriminator(_kind_of_tool),
]


def _check_count(value: object) -> object:
    """Refuse more tools than a chat takes before each is looked at."""
    if isinstance(value, list):
        tools = [cast("dict[str, object]", tool).get("tools") if isinstance(tool, dict) else None for tool in cast("list[object]", value)]
        if sum(len(cast("list[object]", inner)) if isinstance(inner, list) else 1 for inner in tools) > MAX_TOOLS:
            raise PydanticCustomError(
                "tools", "There should be at most {most} functions, those of namespaces included", {"most": MAX_TOOLS}
            )
    return value


class NamedChoice(Strict):
    type: Literal["function"]
    name: str


class AllowedChoice(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedChoice, ONLY_FUNCTIONS]], Field(min_length=1, max_length=MAX_TOOLS)]


def _kind_of_choice(value: object) -> str:
    if isinstance(value, str):
        return "as-string"
    return "as-allowed" if kind_of(value) == "allowed_tools" else "as-named"


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as-string")]
    | Annotated[NamedChoice, Tag("as-named")]
    | Annotated[AllowedChoice, Tag("as-allowed")],
    Discriminator(_kind_of_choice),
    ONLY_FUNCTIONS,
]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


class TextAsked(Strict):
    format: (
        Annotated[
            Annotated[TextFormat, Tag("as-text")]
            | Annotated[JsonObjectFormat, Tag("as-json_object")]
            | Annotated[SchemaFormat, Tag("as-json_schema")],
            BY_KIND_OF_FORMAT,
        ]
        | None
    ) = None
    verbosity: Annotated[Literal["medium"] | None, off("Only verbosity medium is served", "medium")] = None


class ReasoningSwitches(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="How long a model that reasons does so, where its template has a switch for it: `none` turns it off."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="The reasoning comes as a summary, whole, in place of content: for clients that read no other."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(default=None, description="The older name of `summary`.")
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(default=None, description="Ignored: the model's template decides.")
    mode: Literal["standard"] | None = None

    @property
    def summarised(self) -> bool:
        return (self.summary or self.generate_summary) is not None


SAMPLING = frozenset(Sampling.model_fields) - {"n", "max_tokens", "metadata", "stream_options"}
"""Fields that mean here what they mean for a chat."""


class ResponsesRequest(Sampling):
    """Body of POST /v1/responses. Beyond OpenAI's, it has the sampling fields of a chat."""

    input: Input
    instructions: str | None = Field(default=None, description="A system message put first, for this response only.")
    previous_response_id: ItemId | None = Field(default=None, description="A kept response that this one goes on from.")
    tools: Annotated[list[AnyTool] | None, Field(max_length=MAX_TOOLS), BeforeValidator(_check_count)] = None
    tool_choice: Choice | None = Field(default=None, description="Where missing: `auto`.")
    parallel_tool_calls: bool | None = Field(default=None, description="An answer may call several tools; default true.")
    text: TextAsked | None = None
    reasoning: ReasoningSwitches | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=1 << 31, description="Where missing: the rest of the context.")
    top_logprobs: int | None = Field(default=None, ge=0, le=int(LOGPROBS.most))
    include: list[str] | None = Field(
        default=None, max_length=64, description="`message.output_text.logprobs` is served; other values are ignored."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Beyond OpenAI's: switches of the model's own template, such as `enable_thinking`."
    )

    max_tool_calls: int | None = Field(default=None, description="Ignored: it counts calls of OpenAI's own tools.")
    background_options: dict[str, Any] | None = Field(default=None, description="Ignored: nothing runs in the background.")
    access_programs: dict[str, Any] | None = Field(default=None, description="Ignored.")
    image: dict[str, Any] | None = Field(default=None, description="Ignored: there are no images.")
    client_metadata: dict[str, Any] | None = Field(default=None, description="Ignored.")

    truncation: Annotated[
        Literal["disabled"] | None, off("Only disabled is served: what does not fit is an error, and nothing is dropped", "disabled")
    ] = None
    background: Annotated[Literal[False] | None, off("Responses in the background are not served", False)] = None
    context_management: Annotated[list[Any] | None, Field(max_length=0), off("Compaction is not served", [])] = None
    conversation: Annotated[None, off("Conversations are not served: send previous_response_id, or all items")] = None
    prompt: Annotated[None, off("Prompts kept by OpenAI are not served: send instructions and input")] = None
    moderation: Annotated[None, off("Nothing is moderated here")] = None
    n: Annotated[int | None, off("A response has one answer", 1)] = None
    max_tokens: Annotated[int | None, off("Send max_output_tokens")] = None
    response_format: Annotated[ResponseFormat | None, off("Send text.format")] = None
    messages: Annotated[None, off("Send input")] = None

    @field_validator("metadata", mode="after")
    @classmethod
    def _texts(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        if metadata and (len(metadata) > MAX_METADATA or not all(isinstance(value, str) for value in metadata.values())):
            raise PydanticCustomError("metadata", "Input should be at most {most} texts by name", {"most": MAX_METADATA})
        return metadata

    @property
    def functions(self) -> list[tuple[str | None, FunctionTool]]:
        """The functions among the tools, each with its namespace; the first of one is described with it."""
        found: list[tuple[str | None, FunctionTool]] = []
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                found.append((None, tool))
                continue
            for place, inner in enumerate(tool.tools):
                parts = [tool.description if not place else None, inner.description]
                found.append((tool.name, inner.model_copy(update={"description": "\n".join(part for part in parts if part) or None})))
        return found

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
