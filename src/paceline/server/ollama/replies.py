"""The answers of Ollama's API, for the OpenAPI document only, as `server.replies`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class OllamaError(BaseModel):
    error: str


class OllamaVersion(BaseModel):
    version: str
    paceline: str


class OllamaTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTopLogprob):
    top_logprobs: list[OllamaTopLogprob] | None = None


class _Answer(BaseModel):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    logprobs: list[OllamaLogprob] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaCalledFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(BaseModel):
    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaChat(_Answer):
    message: OllamaAnswerMessage


class OllamaText(_Answer):
    response: str
    thinking: str | None = None


class OllamaDetails(BaseModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(BaseModel):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(BaseModel):
    models: list[OllamaModel]


class OllamaLoadedModel(BaseModel):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedModels(BaseModel):
    models: list[OllamaLoadedModel]


class OllamaShown(BaseModel):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modified_at: str
