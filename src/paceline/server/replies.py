"""How routes are documented, and the answers' shapes, for the OpenAPI document only: answers are written by hand as bytes, a test holds the two
together.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from paceline.server.lazy_model import LazyModel
from paceline.server.settings import ServerSettings

Documented = dict[int | str, dict[str, Any]]
REF = "#/components/schemas/{model}"
_REASONS = {
    400: "Malformed, or a field at fault, named in `param`",
    401: "No or a wrong key",
    403: "From a web page, or by a name, that was not allowed",
    404: "No such model here",
    413: "The body is too long",
    415: "The body is compressed, or not declared as JSON",
    429: "Too busy; see Retry-After",
    500: "The generation failed",
    503: "Stopping, or machines that the model takes are gone",
}


def body_of(request: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads its body itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": REF.format(model=request.__name__)}}}}}


def refusals(model: type[BaseModel], settings: ServerSettings, *only: int) -> Documented:
    """Return the refusals that a route documents, in an API's own shape.

    Args:
        only: these statuses; none: all.
    """
    statuses = set(only or _REASONS) - (set[int]() if settings.api_key is not None else {401})
    return {status: {"model": model, "description": reason} for status, reason in _REASONS.items() if status in statuses}


FinishedBy = Literal["stop", "length"]
PARTED = "Only where a router sent a part of a request: what the other machine is told, or how the prompt came from it"


def event_stream(data: str, event: str = "") -> dict[str, Any]:
    """Describe a stream of events for the OpenAPI document. Every event has a name; if `event` describes the named ones, others have none."""
    name = {"type": "string", "description": event} if event else {"type": "string"}
    properties = {"event": name, "data": {"type": "string", "description": data}}
    required = ["data"] if event else ["event", "data"]
    return {"text/event-stream": {"schema": {"type": "object", "required": required, "properties": properties}}}


class PromptTokensDetails(LazyModel):
    cached_tokens: int


class UsageReply(LazyModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(LazyModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(LazyModel):
    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(LazyModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(LazyModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy


class ChatCompletion(LazyModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageReply
    kv_transfer_params: dict[str, Any] = Field(default_factory=dict, description=PARTED)


class CompletionLogprobs(LazyModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(LazyModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedBy


class Completion(LazyModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageReply
    kv_transfer_params: dict[str, Any] = Field(default_factory=dict, description=PARTED)


class ListedModel(LazyModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    sampling_defaults: dict[str, float] | None = Field(
        description="How tokens are drawn where a request does not say; what is missing: as OpenAI's API has it. Null: not known before the "
        "model is asked for"
    )
    via: list[str] = Field(
        description="Random marks of the nodes that a request goes through, this one's first. An endpoint that shares this one offers no model that is reached "
        "through itself"
    )
    engine: str = Field(
        default="", description="The engine of another maker that runs it. Missing, as are the fields below: Paceline's own kernels"
    )
    engine_version: str = ""
    promise: Literal["none"] = Field(default="none", description="What the engine promises of an answer's bytes")
    quantisation: str = Field(default="", description="As the engine writes it")
    leaves_network: bool = Field(default=False, description="Prompts for it leave the home network. Only requests that name it reach it")


class ModelList(LazyModel):
    object: Literal["list"]
    data: list[ListedModel]


class ErrorDetail(LazyModel):
    message: str
    type: str
    param: str | None
    code: str | None
    partial_text: str = Field(
        default="", description="What an answer that was not streamed had before it failed; missing where it had nothing"
    )


class ErrorReply(LazyModel):
    error: ErrorDetail


class Health(LazyModel):
    status: Literal["ok", "stalled", "recovering", "failed", "stopping"]
    busy: bool
    seconds_since_step: float
    error: str | None
    failing: list[str] = Field(description="Work in the background that fails again and again")
