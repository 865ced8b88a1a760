"""The request bodies of Ollama's API, as pydantic models, and the calls they become: each is made a request of `server.requests`, which has the limits.

What the models don't have, as how Ollama loads a model (`num_ctx`, `num_gpu`, `truncate`, `shift`), is ignored and named, or refused: see
`server.fields`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from paceline.core.errors import InvalidRequest
from paceline.core.generation import LOGPROBS, PRESENCE_PENALTY, REPETITION_PENALTY
from paceline.core.inference import ServedModel
from paceline.server.call import Call
from paceline.server.fields import check_fields, ignored_fields, inner_request
from paceline.server.intake import Intake
from paceline.server.messages import MAX_CALLS, MAX_TOOLS, NAME, Function, Strict, Thinker, refuse_media
from paceline.server.ollama.shape import OllamaChatShape, OllamaShape, OllamaTextShape
from paceline.server.requests import (
    FIRST_SERVED,
    ChatCompletionRequest,
    CompletionRequest,
    ModelName,
    SamplingFields,
    StopString,
    reasoning_fields,
)

_IGNORED = "Ignored."


class Options(SamplingFields):
    num_predict: int | None = Field(
        default=None, ge=-2, lt=1 << 31, description="Tokens of the answer at most; 0, -1 and -2: the rest of the context."
    )
    stop: Annotated[list[StopString], Field(max_length=16)] | None = None
    repeat_penalty: float | None = Field(default=None, gt=REPETITION_PENALTY.least, le=REPETITION_PENALTY.most, allow_inf_nan=False)
    presence_penalty: float | None = Field(default=None, ge=PRESENCE_PENALTY.least, le=PRESENCE_PENALTY.most, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=PRESENCE_PENALTY.least, le=PRESENCE_PENALTY.most, allow_inf_nan=False)
    repeat_last_n: int | None = Field(
        default=None, ge=-1, lt=1 << 31, description="0 turns the penalties off; any other is taken as -1: they count over the whole text."
    )


def _one_of(said: str, *texts: str, kinds: type | tuple[type, ...]) -> Any:
    """Return a validator for one of some texts, or for values of a type. A union of pydantic's would name itself in the errors."""

    def check(value: object) -> object:
        if value is None or isinstance(value, kinds) or (isinstance(value, str) and value in texts):
            return value
        raise PydanticCustomError("one_of", said)  # pyright: ignore[reportArgumentType] - it wants a literal

    return PlainValidator(check)


Format = Annotated[
    Literal["", "json"] | dict[str, Any] | None,
    _one_of('Input should be "json" or a JSON schema', "", "json", kinds=dict),
    WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]}),
]
Think = Annotated[
    bool | Literal["low", "medium", "high"] | None,
    _one_of("Input should be true, false, low, medium or high", "low", "medium", "high", kinds=bool),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": ["low", "medium", "high"]}, {"type": "null"}]}),
]


class OllamaRequest(Strict):
    """Fields that `/api/chat` and `/api/generate` share."""

    model: ModelName | None = Field(default=None, description=FIRST_SERVED)
    stream: bool | None = Field(default=None, description="Default true.")
    options: Options | None = None
    format: Format = Field(default=None, description='"json", or the JSON schema that the answer is to have.')
    think: Think = Field(default=None, description="Whether, or how long, a model that reasons does so.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=int(LOGPROBS.most), description="Only with `logprobs`.")

    keep_alive: Any = Field(default=None, description="0, without a prompt, unloads. Otherwise ignored: models stay loaded.")


class OllamaFunctionCall(Strict):
    name: Annotated[str, Field(pattern=NAME)]
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])
    index: int | None = Field(default=None, description=_IGNORED)


class OllamaToolCall(Strict):
    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] | None = None
    function: OllamaFunctionCall


class OllamaMessage(Thinker):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: list[Any] | None = Field(
        default=None, description="Refused in the last message, if that is the user's; elsewhere a note replaces each."
    )
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class OllamaTool(Strict):
    type: Literal["function"] = "function"
    function: Function


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat. Without messages it says that the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate. Without a prompt it says that the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(default=None, description="The prompt is taken as it is, without the model's chat template.")

    template: Literal[""] | None = None
    context: list[Any] | None = Field(default=None, max_length=0)


class OllamaShowRequest(Strict):
    """Body of POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = Field(default=None, description="Older clients' word for `model`.")


BODIES = (OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest)


FORM = "answer"
"""The name that the inner request wants of a schema."""


@dataclass(frozen=True, slots=True)
class LoadOnly:
    """Asked without a prompt: to load the model, or not to keep it."""

    model: ServedModel
    shape: type[OllamaShape]
    keep: bool = True

    @classmethod
    def of(cls, intake: Intake, asked: OllamaRequest, shape: type[OllamaShape]) -> LoadOnly:
        return cls(intake.model(asked.model), shape, asked.keep_alive not in (0, "0", "0s", "0m", "0h"))


def chat_call(intake: Intake, body: bytes) -> Call | LoadOnly:
    """Return the call of a chat; raises as `Intake.chat` does."""
    asked = intake.parse(OllamaChatRequest, body)
    if not asked.messages:
        return LoadOnly.of(intake, asked, OllamaChatShape)
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()] or None
    return _completed(
        intake.chat_of(_chat(asked, _messages(asked.messages, takes_images=intake.takes_images(asked.model)), tools)),
        asked,
        OllamaChatShape,
    )


def generate_call(intake: Intake, body: bytes) -> Call | LoadOnly:
    """Return the call of a prompt: as the only message of a chat, or raw; raises as `Intake.chat` does."""
    asked = intake.parse(OllamaGenerateRequest, body)
    if not asked.prompt:
        return LoadOnly.of(intake, asked, OllamaTextShape)
    if asked.raw:
        if asked.system:
            raise InvalidRequest("system: a raw prompt has no system message", "Write it into the prompt.", field="system")
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        fields = {**_shared(asked), "prompt": asked.prompt, "logprobs": logprobs}
        return _completed(intake.completion_of(inner_request(CompletionRequest, fields)), asked, OllamaTextShape)
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    messages = [*system, {"role": "user", "content": asked.prompt}]
    return _completed(intake.chat_of(_chat(asked, messages)), asked, OllamaTextShape)


def name_to_show(intake: Intake, body: bytes) -> str:
    """Return the name of the model that a client asks about; raises as `Intake.chat` does."""
    asked = intake.parse(OllamaShowRequest, body)
    name = asked.model or asked.name
    if name is None:
        raise InvalidRequest("model: missing", "Send the model's name.", field="model")
    return name


def _completed(call: Call, asked: OllamaRequest, shape: type[OllamaShape]) -> Call:
    """Finish a call as Ollama's: `num_predict` is a bound, which may lie beyond the context."""
    most = None if asked.options is None else asked.options.num_predict
    requests = call.requests
    if most is not None and most > 0:
        requests = tuple(replace(one, max_tokens=min(most, call.model.max_context - len(one.prompt_ids))) for one in requests)
    return replace(call, requests=requests, shape=shape, ignored=ignored_fields(asked))


def _shared(asked: OllamaRequest) -> dict[str, Any]:
    """Return the inner fields that chats and raw prompts share. An option that is missing is missing in the inner request."""
    options = asked.options or Options()
    check_fields(options, "options.")
    counts = options.repeat_last_n != 0
    fields: dict[str, Any] = {
        "model": asked.model,
        "stream": asked.stream is not False,
        **{name: getattr(options, name) for name in SamplingFields.model_fields},
        "stop": options.stop or None,
        "repetition_penalty": options.repeat_penalty if counts else 1.0,
        "presence_penalty": options.presence_penalty if counts else 0.0,
        "frequency_penalty": options.frequency_penalty if counts else 0.0,
    }
    if asked.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif asked.format:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": FORM, "schema": asked.format}}
    return fields


def _chat(asked: OllamaRequest, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> ChatCompletionRequest:
    """Return the inner chat of a request."""
    think = asked.think
    effort, thinks = (think, None) if isinstance(think, str) else ("none" if think is False else None, think)
    fields = {**_shared(asked), **reasoning_fields(effort, None, thinks=thinks), "messages": messages, "tools": tools}
    top_logprobs = asked.top_logprobs if asked.logprobs else None
    return inner_request(ChatCompletionRequest, {**fields, "logprobs": asked.logprobs, "top_logprobs": top_logprobs})


_IMAGES: Final = {"/9j/": "jpeg", "iVBOR": "png", "R0lG": "gif", "UklGR": "webp"}
"""Kinds of images by how they begin in base64."""


def _image(data: object) -> dict[str, Any]:
    """Return an image as OpenAI's API has it. Ollama's is base64 without its kind."""
    text = data if isinstance(data, str) else ""
    kind = next((kind for begin, kind in _IMAGES.items() if text.startswith(begin)), "png")
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{text}"}}


def _messages(messages: Sequence[OllamaMessage], *, takes_images: bool) -> list[dict[str, Any]]:
    """Messages as OpenAI's API has them: calls have ids there, which results name. Ollama's need not: a result without an id is of the first call of
    its tool that has none yet, or of the first call where it names no tool.

    Raises:
        InvalidRequest: a result has no call.
    """
    written: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    made = 0
    for place, message in enumerate(messages):
        one: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.images:
            if message.role == "user" and place == len(messages) - 1 and not takes_images:
                raise refuse_media("image", f"messages[{place}].images")
            one["content"] = [{"type": "text", "text": one["content"]}, *map(_image, message.images)]
        if message.thoughts and message.role == "assistant":
            one["reasoning_content"] = message.thoughts
        if message.tool_calls:
            one["tool_calls"] = calls = list[dict[str, Any]]()
            for call in message.tool_calls:
                made += 1
                call_id = call.id or f"call{made:05}"
                waiting.append((call_id, call.function.name))
                arguments = json.dumps(call.function.arguments)  # whole numbers of any size
                calls.append({"id": call_id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}})
        if message.role == "tool":
            name, given = message.tool_name, message.tool_call_id
            found = next((one for one in waiting if one[0] == given), None) if given else None
            found = found or next((one for one in waiting if name in {None, one[1]}), None)
            if found is None:
                raise InvalidRequest(f"messages[{place}]: no message before it calls a tool of which this is the result", field="messages")
            waiting.remove(found)
            one["tool_call_id"] = found[0]
        written.append(one)
    return written
