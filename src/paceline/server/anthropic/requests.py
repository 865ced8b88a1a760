"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, as pydantic models.

As in `server.requests` a field is *served*, *ignored* (it changes no answer here) or *refused* by name. What runs at Anthropic (tools that its servers
run, files, containers, MCP connections) is refused. For what no model here can read (images, documents) see `server.messages.MediaPart`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AwareDatetime, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from paceline.server.messages import MAX_TOOLS, MEDIA, NAME, MediaPart, Strict, kind_of, off, only_types, string_or_list
from paceline.server.requests import FIRST_SERVED, ExtendedSampling, ModelName, StopString

IGNORED = "Ignored."
CacheControl = Annotated[dict[str, Any] | None, Field(description="Ignored: prompts are always computed once.")]
BLOCKS = ("text", "image", "document", "thinking", "redacted_thinking", "tool_use", "tool_result")
TOOL_ID = Annotated[str, Field(min_length=1, max_length=256)]


def _served_block(value: object) -> object:
    """Return a block of a served type, and refuse any other type."""
    kind = kind_of(value)
    if not isinstance(value, dict) or (isinstance(kind, str) and kind in BLOCKS):
        return cast("object", value)
    if not isinstance(kind, str):
        raise PydanticCustomError("block", "A content block needs a type, such as text")
    raise PydanticCustomError("block", "Blocks of type {kind} are not served: no results of server tools", {"kind": kind})


def _tag_of_block(value: object) -> str | None:
    kind = kind_of(value)
    return "as-media" if kind in MEDIA else f"as-{kind}" if isinstance(kind, str) else None


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = Field(default=None, description=IGNORED)


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description=IGNORED)
    cache_control: CacheControl = None


class RedactedThinkingBlock(Strict):
    """Ignored: Paceline cannot read it."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: CacheControl = None


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: TOOL_ID
    name: Annotated[str, Field(pattern=NAME)]
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = Field(default=None, description=IGNORED)
    toolset_name: str | None = Field(default=None, description=IGNORED)


TextBlocks = Annotated[
    Annotated[str, Tag("as-string")]
    | Annotated[
        list[Annotated[TextBlock, only_types("Only text blocks are served here, not {kind}", "text")]],
        Field(fail_fast=True),
        Tag("as-list"),
    ],
    Discriminator(string_or_list),
]
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("as-text")] | Annotated[MediaPart, Tag("as-media")],
    Discriminator(lambda value: "as-media" if kind_of(value) in MEDIA else "as-text"),
    only_types("Only text, images and documents are served here, not {kind}", "text", "image", "document"),
]
ResultBlocks = Annotated[
    Annotated[str, Tag("as-string")] | Annotated[list[ResultBlock], Field(fail_fast=True), Tag("as-list")], Discriminator(string_or_list)
]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: TOOL_ID
    content: ResultBlocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: str | None = Field(default=None, description=IGNORED)


Block = Annotated[
    Annotated[TextBlock, Tag("as-text")]
    | Annotated[MediaPart, Tag("as-media")]
    | Annotated[ThinkingBlock, Tag("as-thinking")]
    | Annotated[RedactedThinkingBlock, Tag("as-redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("as-tool_use")]
    | Annotated[ToolResultBlock, Tag("as-tool_result")],
    Discriminator(_tag_of_block, custom_error_type="block", custom_error_message="Input should be a content block"),
]


class MessageTurn(Strict):
    role: Literal["user", "assistant", "system"] = Field(description="`system` is text that the client adds on the way.")
    content: Annotated[
        Annotated[str, Tag("as-string")]
        | Annotated[list[Annotated[Block, BeforeValidator(_served_block)]], Field(fail_fast=True), Tag("as-list")],
        Discriminator(string_or_list),
    ]

    @property
    def blocks(self) -> list[TextBlock | MediaPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


ONLY_CUSTOM = only_types("Tools of type {kind} are Anthropic's own: only tools with a name and an input_schema are served", "custom")


class ClientTool(Strict):
    """A tool that the client runs."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = Field(default=None, description="The input is of the schema, always.")
    cache_control: CacheControl = None
    allowed_callers: list[str] | None = Field(default=None, description=IGNORED)
    defer_loading: bool | None = Field(default=None, description="Ignored: every tool is shown.")
    eager_input_streaming: bool | None = Field(default=None, description="Ignored: inputs are streamed as they are written.")
    input_examples: list[dict[str, Any]] | None = Field(default=None, description=IGNORED)


class ToolChoiceAsked(Strict):
    """Which tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="With `tool`.")
    disable_parallel_tool_use: bool | None = None


class ThinkingAsked(Strict):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"] = Field(
        description="`disabled` and `between_tools` turn it off, the others on, where the model's template has a switch."
    )
    budget_tokens: int | None = Field(default=None, ge=1, description="Ignored: it counts toward max_tokens.")
    display: str | None = Field(default=None, description="Ignored: thoughts are always shown.")


class JsonOutput(Strict):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Where the template has a switch for it."
    )
    format: JsonOutput | None = None
    task_budget: dict[str, Any] | None = Field(default=None, description=IGNORED)


NOTHING: tuple[object, ...] = ([], {}, False)
"""Values that ask for nothing."""


class CountTokensRequest(Strict):
    """Body of POST /v1/messages/count_tokens."""

    model: ModelName | None = Field(default=None, description=FIRST_SERVED)
    messages: Annotated[list[MessageTurn], Field(min_length=1, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[Annotated[ClientTool, ONLY_CUSTOM]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceAsked | None = Field(default=None, description="Where missing: `auto`.")
    thinking: ThinkingAsked | None = Field(default=None, description="Where missing: as the model's template has it.")
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = Field(default=None, description="What output_config.format was called before.")

    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Beyond Anthropic's: switches of the model's own template."
    )
    now: AwareDatetime | None = Field(default=None, description="Beyond Anthropic's: the time that the model's template may show.")

    betas: list[str] | None = Field(default=None, description=IGNORED)
    billing_policy: dict[str, Any] | None = Field(default=None, description=IGNORED)
    cache_control: CacheControl = None
    context_management: dict[str, Any] | None = Field(default=None, description="Ignored: nothing is taken out of a prompt here.")
    speed: str | None = Field(default=None, description=IGNORED)
    user_profile_id: str | None = Field(default=None, description=IGNORED)
    workspace_id: str | None = Field(default=None, description=IGNORED)

    compaction: Annotated[None, off("Summaries by the server are not served", *NOTHING)] = None
    mcp_servers: Annotated[None, off("The server connects to no MCP servers: have the client do it", *NOTHING)] = None


class MessagesRequest(CountTokensRequest, ExtendedSampling):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, lt=1 << 31, description="The answer ends earlier where the context does.")
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None

    diagnostics: dict[str, Any] | None = Field(default=None, description=IGNORED)
    fallback_credit_token: Any = Field(default=None, description=IGNORED)
    fallbacks: Any = Field(default=None, description="Ignored: the model that was asked for answers.")
    inference_geo: str | None = Field(default=None, description=IGNORED)
    metadata: dict[str, Any] | None = Field(default=None, description=IGNORED)
    service_tier: str | None = Field(default=None, description=IGNORED)

    container: Annotated[None, off("Containers are Anthropic's: code runs at the client", *NOTHING)] = None
    thread: Annotated[None, off("Threads are not kept here: send the messages", *NOTHING)] = None
