"""The request bodies of the API, as pydantic models: what is accepted, and the OpenAPI schema, from one source.

A field of these models is served: it does what OpenAI (or, for top_k, min_p, repetition_penalty, stop_token_ids and ignore_eos, vLLM, or, for draft,
docs/reference/api.md) defines; or harmless: clients send it, it never changes an answer here, it is ignored (user, metadata, store, service_tier,
safety_identifier, prompt_cache_key, prompt_cache_retention, prompt_cache_options, prediction, cache_control, a message's name).
`server.fields` decides about all other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, cast

from pydantic import AwareDatetime, ConfigDict, Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from paceline.core.generation import (
    BIAS,
    FREQUENCY_PENALTY,
    LOGPROBS,
    MAX_BIASES,
    MAX_GRAMMAR_LETTERS,
    MIN_P,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    TEMPERATURE,
    TOP_P,
)
from paceline.server.messages import MAX_TOOLS, ClosedObject, Message, Strict, Tool, ToolChoice, is_whole, kind_of, string_or_list

UNION_TAGS = frozenset(
    f"as-{kind}"
    for kind in (
        *("string", "list", "text", "media", "json_object", "json_schema", "named", "allowed"),
        *("thinking", "redacted_thinking", "tool_use", "tool_result"),
        *("message", "function_call", "function_call_output", "reasoning", "item_reference", "function", "namespace"),
    )
)
"""Parts of a pydantic error location that are ours, not the client's."""

MAX_CHOICES = 128
MAX_PROMPT_IDS = 1 << 22


class StreamOptions(ClosedObject):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(default=None, description="Ignored.")
    include_events: bool | None = Field(
        default=None, description="Beyond OpenAI's: named events tell of machines that were lost and of those that took over."
    )


class TextFormat(ClosedObject):
    type: Literal["text"]


class JsonObjectFormat(ClosedObject):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="Beyond OpenAI's, as llama.cpp has it: the answer is of this schema."
    )


class JsonSchema(ClosedObject):
    model_config = ConfigDict(populate_by_name=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = Field(default=None, description="Ignored.")
    description: str | None = Field(default=None, description="Ignored.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="Where missing: any object.")
    strict: bool | None = Field(default=None, description="Ignored: a schema is always kept to.")


class JsonSchemaFormat(ClosedObject):
    type: Literal["json_schema"]
    json_schema: JsonSchema


def _kind_of_format(value: object) -> str | None:
    kind = kind_of(value)
    return f"as-{kind}" if kind in ("text", "json_object", "json_schema") else None  # a tuple: it may be of any type


BY_KIND_OF_FORMAT = Discriminator(
    _kind_of_format,
    custom_error_type="response_format",
    custom_error_message="Input should be an object whose type is text, json_object or json_schema",
)
"""Tells formats apart that are tagged `as-text`, `as-json_object` and `as-json_schema`."""
ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("as-text")]
    | Annotated[JsonObjectFormat, Tag("as-json_object")]
    | Annotated[JsonSchemaFormat, Tag("as-json_schema")],
    BY_KIND_OF_FORMAT,
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LETTERS)]


StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Stop = Annotated[
    Annotated[StopString, Tag("as-string")] | Annotated[list[StopString], Field(max_length=16), Tag("as-list")],
    Discriminator(string_or_list),
]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=BIAS.least, le=BIAS.most, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


DraftName = Annotated[
    str,
    Field(min_length=1, max_length=512),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "off", "ngram"]}, {"type": "string", "minLength": 1, "maxLength": 512}]}),
]


WayName = Annotated[str, Field(pattern="^[a-z_]{1,64}$")]


class SamplingFields(Strict):
    """How tokens are drawn, in every API."""

    temperature: float | None = Field(
        default=None,
        ge=TEMPERATURE.least,
        le=TEMPERATURE.most,
        allow_inf_nan=False,
        description="0 is greedy. Where missing: as the model's files say, else 1.",
    )
    top_p: float | None = Field(default=None, ge=TOP_P.least, le=TOP_P.most, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31, description="0 or -1 keeps all.")
    min_p: float | None = Field(default=None, ge=MIN_P.least, le=MIN_P.most, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)


class ExtendedSampling(SamplingFields):
    """Fields that OpenAI's and Anthropic's requests may have beyond their APIs."""

    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=64)
    draft: DraftName | None = Field(
        default=None,
        description="Beyond OpenAI's and Anthropic's: what tokens are guessed with: `off`, `ngram`, `auto`, or the id of a draft model. Changes no byte.",
    )
    ways: Annotated[list[WayName], Field(min_length=1, max_length=16)] | None = Field(
        default=None,
        description="Beyond OpenAI's and Anthropic's: ways of spreading work that may serve the request, as `paceline plan` calls them: `alone`, `draft`, "
        "`pipeline`, `tensor`. Where the model is served in none of them, 400. Changes no byte.",
    )
    exact: bool | None = Field(
        default=None,
        description="Beyond OpenAI's and Anthropic's: only machines that compute the same bytes may write the answer. "
        "Where none of them promises its bytes, 400.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(
        default=None,
        description="Beyond OpenAI's and Anthropic's: prompts are computed once for requests of the same salt. Changes no byte.",
    )


ModelName = Annotated[str, Field(min_length=1, max_length=512)]
FIRST_SERVED = "Where missing: the first one served."


class KvTransferFields(Strict):
    """Instructions of a router to the two machines that share a request, in vLLM's words."""

    do_remote_decode: bool | None = Field(default=None, description="The prompt is computed here, and the answer written elsewhere.")
    do_remote_prefill: bool | None = Field(default=None, description="The answer is written here, and the prompt computed elsewhere.")
    remote_engine_id: Annotated[str, Field(max_length=200)] | None = Field(default=None, description="That machine's name in the fleet.")
    remote_host: Annotated[str, Field(max_length=200)] | None = Field(
        default=None, description="That machine's address, with `remote_port`: instead of its name."
    )
    remote_port: int | None = Field(default=None, ge=1, lt=1 << 16, description="The port of that machine's fleet address.")
    remote_request_id: Annotated[str, Field(max_length=200)] | None = Field(
        default=None, description="The id that the other machine gave the request."
    )
    tp_size: int | None = Field(default=None, ge=1, le=1024, description="The number of ranks there.")
    remote_block_ids: Any = Field(default=None, description="Ignored: blocks are asked for by name.")


class Sampling(ExtendedSampling):
    """Fields that chat and plain completions share."""

    model: ModelName | None = Field(default=None, description=FIRST_SERVED)
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=-1, lt=1 << 31, description="Where missing, or -1: the rest of the context.")
    repetition_penalty: float | None = Field(default=None, gt=REPETITION_PENALTY.least, le=REPETITION_PENALTY.most, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=PRESENCE_PENALTY.least, le=PRESENCE_PENALTY.most, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=FREQUENCY_PENALTY.least, le=FREQUENCY_PENALTY.most, allow_inf_nan=False)
    logit_bias: dict[TokenKey, Bias] | None = Field(default=None, max_length=MAX_BIASES)
    stop: Stop | None = None
    ignore_eos: bool | None = None

    response_format: ResponseFormat | None = Field(default=None, description="The answer is JSON, of a schema where one is given.")
    grammar: GrammarText | None = Field(
        default=None,
        description="Beyond OpenAI's: the answer is of this grammar: Lark's, as llguidance reads it, or where it has `::=` GBNF, as llama.cpp has it.",
    )
    regex: GrammarText | None = Field(default=None, description="Beyond OpenAI's: the whole answer matches this regular expression.")

    user: str | None = Field(default=None, description="Ignored.")
    metadata: dict[str, Any] | None = Field(default=None, description="Ignored.")
    store: bool | None = Field(default=None, description="Ignored.")
    service_tier: str | None = Field(default=None, description="Ignored.")
    safety_identifier: str | None = Field(default=None, description="Ignored.")
    prompt_cache_key: str | None = Field(default=None, description="Ignored.")
    prompt_cache_retention: str | None = Field(default=None, description="Ignored.")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="Ignored.")


class Parted(Sampling):
    """Fields of a request that a router may send to two machines."""

    kv_transfer_params: KvTransferFields | None = Field(
        default=None, description="Beyond OpenAI's, as vLLM's: from a router, which of two machines computes the prompt for the other."
    )


class ThinkingFields(Strict):
    type: Literal["enabled", "disabled", "adaptive", "auto"]


class ChatCompletionRequest(Parted):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(default=None, ge=-1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=int(LOGPROBS.most), description="Only with `logprobs`.")
    now: AwareDatetime | None = Field(
        default=None,
        description="Beyond OpenAI's: the time that the model's chat template may show, with its offset from UTC. Where missing: when the "
        "request arrived, in the time zone of the node it arrived at.",
    )

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(default=None, description="Where missing: `auto`.")
    parallel_tool_calls: bool | None = Field(default=None, description="An answer may call several tools; default true.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Beyond OpenAI's: switches of the model's own template, such as `enable_thinking`."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None, description="How long a model that reasons does so, where its template has a switch for it: `none` turns it off."
    )
    continue_final_message: bool | None = Field(
        default=None, description="Beyond OpenAI's: the answer goes on with the last message, the assistant's, instead of being a new turn."
    )
    add_generation_prompt: bool | None = Field(default=None, description="The opposite of `continue_final_message`, which alone decides.")
    think: bool | None = Field(default=None, description="False turns reasoning off, as `reasoning_effort: none` does.")
    thinking: ThinkingFields | None = Field(default=None, description="`disabled` turns reasoning off.")

    prediction: dict[str, Any] | None = Field(default=None, description="Ignored.")

    @property
    def thinks(self) -> bool | None:
        """True if the model is to reason, False if not; None: the model's default."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        if self.think is None and self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            return self.thinking.type == "enabled"
        return self.think


def reasoning_fields(effort: str | None, switches: Mapping[str, Any] | None, *, thinks: bool | None = None) -> dict[str, Any]:
    """Return the fields that tell a chat's model how to reason. `max`, which other APIs have, is a chat's `xhigh`. Switches of the template's own win."""
    named = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    return {"reasoning_effort": "xhigh" if effort == "max" else effort, "chat_template_kwargs": {**named, **(switches or {})} or None}


def check_texts(value: object, most: int) -> str | list[str] | list[int] | list[list[int]]:
    """Check texts by hand, since a long list of ids in a pydantic union costs seconds: one pass of C loops instead."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "Input should be a string, a list of strings, a list of token ids or a list of such lists")
    items = cast("list[object]", value)
    kinds = set(map(type, items))
    if kinds == {str}:
        prompts, inner = len(items), cast("list[list[object]]", [])
    elif kinds == {list}:
        inner = cast("list[list[object]]", items)
        prompts = len(inner)
    else:
        inner = [items]
        prompts = 1
    if prompts > most:
        raise PydanticCustomError("prompt", "At most {limit} texts in one request", {"limit": most})
    for place, given in enumerate(inner):
        has_floats = float in set(map(type, given))
        ids = inner[place] = [int(cast("float", one)) if is_whole(one) else one for one in given] if has_floats else given
        if set(map(type, ids)) != {int}:
            raise PydanticCustomError("prompt", "Token ids should be integers, at least one for each text")
        if len(ids) > MAX_PROMPT_IDS:
            raise PydanticCustomError("prompt", "A text of {count} token ids is longer than any context", {"count": len(ids)})
        numbers = cast("list[int]", ids)
        if min(numbers) < 0 or max(numbers) >= 1 << 31:
            raise PydanticCustomError("prompt", "Token ids should be from the model's vocabulary")
    read = items if kinds == {str} else inner if kinds == {list} else inner[0]
    return cast("list[str] | list[int] | list[list[int]]", read)


_ID_SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}}


def texts_schema(most: int, *, shortest: int = 0) -> dict[str, Any]:
    """Return the JSON schema of the values that `check_texts` takes."""
    text: dict[str, Any] = {"type": "string", "minLength": shortest} if shortest else {"type": "string"}
    several: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [text, {**several, "items": text}, _ID_SCHEMA, {**several, "items": _ID_SCHEMA}]}


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(partial(check_texts, most=MAX_CHOICES)),
    WithJsonSchema(texts_schema(MAX_CHOICES)),
]


class CompletionRequest(Parted):
    """Body of POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = Field(
        default=None, ge=0, le=int(LOGPROBS.most), description="The number of alternatives that come with each token's own."
    )
    echo: bool | None = Field(
        default=None,
        description="The answer begins with the prompt, with `logprobs` for its tokens too; `max_tokens` may then be 0: nothing follows.",
    )
    suffix: str | None = Field(default=None, description="The text behind the answer, for models that fill in the middle.")
    add_special_tokens: bool | None = Field(
        default=None, description="A text gets the tokens that the model wants before it; default true."
    )


REFUSED = {
    "function_call": "Functions are served as tools: send tool_calls",
    "audio": "Audio is not served",
    "type": "Only parts of type text are served: no images, audio or files",
    "refusal": "A refusal can't be part of a prompt here",
    "annotations": "Annotations can't be part of a prompt here",
    "images": "Images are not served",
    "template": "The model's own template is used: send raw: true and the prompt as it is to be",
    "context": "No context is kept: send the messages so far to /api/chat",
}
"""Fields of messages that are accepted only with a value that means "off", and the error for any other value."""
TOOL_TYPES = "Only tools of type function are served"
