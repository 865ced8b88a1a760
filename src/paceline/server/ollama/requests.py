"""The request bodies of Ollama's API, as pydantic models: what is accepted, and the OpenAPI schema, from one source.

What they don't have, as how Ollama loads a model (`num_ctx`, `num_gpu`, `truncate`, `shift`), is ignored and named, or refused: see `server.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from paceline.core.generation import LOGPROBS, MIN_P, PRESENCE_PENALTY, REPETITION_PENALTY, TEMPERATURE, TOP_P
from paceline.server.messages import MAX_CALLS, MAX_TOOLS, NAME, Function, Strict
from paceline.server.requests import StopString

_IGNORED = "Ignored."


class Options(Strict):
    temperature: float | None = Field(default=None, ge=TEMPERATURE.least, le=TEMPERATURE.most, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31, description="0 or -1 keeps all.")
    top_p: float | None = Field(default=None, ge=TOP_P.least, le=TOP_P.most, allow_inf_nan=False)
    min_p: float | None = Field(default=None, ge=MIN_P.least, le=MIN_P.most, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
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
    """A validator for what is one of some texts, or of a kind. A union of pydantic's would name itself in the errors."""

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
    """What `/api/chat` and `/api/generate` share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
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


class OllamaMessage(Strict):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = Field(default=None, max_length=0)
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

    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=512)] | None = Field(default=None, description="Older clients' word for `model`.")


BODIES = (OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest)
