"""Ollama's answers as bytes: lines of JSON, of which the last has `done: true` and the figures; or one object with all of it.

Calls of tools come whole, each in a line of its own as soon as the next part begins, with its arguments as an object. A call that the answer's end
cut off is text: nothing that the model wrote is lost.

The answers of Ollama's API, for the OpenAPI document only, as `server.replies`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from paceline.core.generation import AnswerProgress, FinishReason, TokenLogprob
from paceline.core.inference import ServedModel
from paceline.server.call import Call
from paceline.server.faults import Api, Fault
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.lazy_model import LazyModel
from paceline.server.logprobs import TokenTexts, logprob_entries
from paceline.server.messages import json_bytes, json_object
from paceline.server.replies import TopLogprob
from paceline.server.shape import CalledTool, Collected, Shape, Usage


class OllamaError(LazyModel):
    error: str


class OllamaVersion(LazyModel):
    version: str
    paceline: str


class OllamaLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] | None = None


class _Answer(LazyModel):
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


class OllamaCalledFunction(LazyModel):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(LazyModel):
    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(LazyModel):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaChat(_Answer):
    message: OllamaAnswerMessage


class OllamaText(_Answer):
    response: str
    thinking: str | None = None


class OllamaDetails(LazyModel):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _Model(LazyModel):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModel(_Model):
    modified_at: str


class OllamaModels(LazyModel):
    models: list[OllamaModel]


class OllamaLoadedModel(_Model):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoadedModels(LazyModel):
    models: list[OllamaLoadedModel]


class OllamaShown(LazyModel):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modified_at: str


Fields = dict[str, object]


def rfc3339(unix_s: float) -> str:
    """Write a time as RFC 3339 does."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def line_head(model: ServedModel, now_s: float) -> Fields:
    """Return the fields that every line begins with."""
    return {"model": model.name, "created_at": rfc3339(now_s)}


class OllamaShape(Shape):
    """Common part of the shapes for chats and texts."""

    media_type = b"application/x-ndjson"

    def __init__(self, call: Call) -> None:
        self._call = call
        self._head: Fields = line_head(call.model, call.created)
        self._texts = TokenTexts(call.model.tokenizer, has_space=call.has_space(0))
        self._finish: FinishReason | None = None
        self._open: CalledTool | None = None
        self._calls = 0

    @staticmethod
    @abstractmethod
    def gained(content: str = "", thinking: str = "", calls: Sequence[Fields] = ()) -> Fields:
        """The fields of an answer that have text and calls."""

    def silence(self, reading: AnswerProgress | None) -> bytes:
        """Return a line without text: lines of JSON have no comments, and the API has no field for what was read."""
        del reading
        return self._line(self.gained())

    def first_events(self) -> bytes:
        """Return nothing: a line is complete in itself."""
        return b""

    def event(self, index: int, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        """Return a line for each part; logprobs are in the first one."""
        del index
        self._finish = finish
        gained = list[Fields]()
        for part in parts:
            if isinstance(part, CallArguments):
                if self._open is not None:
                    self._open.add(part)
                continue
            gained += self._close()
            match part:
                case Content(text):
                    gained.append(self.gained(text))
                case Reasoning(text):
                    gained.append(self.gained(thinking=text))
                case CallBegun(_, name, is_open):
                    self._open = CalledTool(name, is_open=is_open)
        if finish is not None:
            gained += self._close()
        if logprobs:
            first = gained[0] if gained else self.gained()
            gained[:1] = [first | {"logprobs": self._logprobs(logprobs)}]
        return b"".join([self._line(fields) for fields in gained])

    def ending(self, usage: Usage) -> bytes:
        return self._line(self.gained() | self._figures(self._finish, usage), done=True)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        one = choices[0]
        content, calls = "".join(one.content), list[Fields]()
        for called in one.calls:
            written = _written(called, len(calls))
            if isinstance(written, str):
                content += written
            else:
                calls.append(written)
        fields = self.gained(content, "".join(one.reasoning), calls)
        if self._call.logprobs:
            fields["logprobs"] = self._logprobs(one.logprobs)
        return self._line(fields | self._figures(one.finish, usage), done=True)

    def fault_event(self, fault: Fault) -> bytes:
        return fault.body(Api.OLLAMA) + b"\n"

    def _close(self) -> list[Fields]:
        """Close the open call, and return it."""
        if self._open is None:
            return []
        written, self._open = _written(self._open, self._calls), None
        if isinstance(written, str):
            return [self.gained(written)]
        self._calls += 1
        return [self.gained(calls=[written])]

    def _line(self, fields: Fields, *, done: bool = False) -> bytes:
        return json_bytes({**self._head, **fields, "done": done}) + b"\n"

    def _figures(self, finish: FinishReason | None, usage: Usage) -> Fields:
        """Return how the answer ended and how long it took, in ns. The time before the first token includes all waiting."""
        first_ns, whole_ns = int(usage.first_s * 1e9), int(usage.whole_s * 1e9)
        return {
            "done_reason": str(finish),
            "total_duration": whole_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": first_ns,
            "eval_count": usage.completion,
            "eval_duration": whole_ns - first_ns,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[Fields]:
        return [{**own, **({"top_logprobs": others} if others else {})} for own, others in logprob_entries(self._texts, logprobs)]


class OllamaChatShape(OllamaShape):
    """`/api/chat`: what was gained is a message."""

    @staticmethod
    def gained(content: str = "", thinking: str = "", calls: Sequence[Fields] = ()) -> Fields:
        message: Fields = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class OllamaTextShape(OllamaShape):
    """`/api/generate`: what was gained is a text. There are no tools."""

    @staticmethod
    def gained(content: str = "", thinking: str = "", calls: Sequence[Fields] = ()) -> Fields:
        del calls
        return {"response": content, "thinking": thinking} if thinking else {"response": content}


def _written(called: CalledTool, index: int) -> Fields | str:
    """Return a call as Ollama writes it; as text if it was cut off, or its arguments are not an object."""
    arguments = json_object("".join(called.arguments) or "{}") if not called.is_open else None
    if arguments is None:
        return called.as_text
    return {"id": f"call_{called.id}", "function": {"index": index, "name": called.name, "arguments": arguments}}
