"""A response as bytes: as a stream of numbered events, or whole. Its last event has what the whole one is.

The answers' shapes, for the OpenAPI document only: answers are written by hand, a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import TypeAdapter

from paceline.core.clock import Clock
from paceline.core.generation import FinishReason, TokenLogprob
from paceline.server.call import Call
from paceline.server.faults import Fault
from paceline.server.formats.format import Part
from paceline.server.lazy_model import LazyModel
from paceline.server.logprobs import TokenTexts
from paceline.server.messages import json_bytes
from paceline.server.replies import ChatTokenLogprob
from paceline.server.responses.conversation import Kept, KeptItem, KeptResponses, keep_item
from paceline.server.responses.output import Event, Output
from paceline.server.responses.requests import AnyItem, ResponsesRequest, shown_name
from paceline.server.shape import Collected, Shape, Streamed, Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(LazyModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class SummaryText(LazyModel):
    type: Literal["summary_text"]
    text: str


class ReasoningText(LazyModel):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(LazyModel):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(LazyModel):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | None = None


class OutputCall(LazyModel):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class InputTokensDetails(LazyModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(LazyModel):
    reasoning_tokens: int


class ResponseUsage(LazyModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(LazyModel):
    reason: Literal["max_output_tokens"]


class ReasoningEcho(LazyModel):
    effort: str | None
    summary: str | None


class TextEcho(LazyModel):
    format: dict[str, Any]
    verbosity: Literal["medium"]


class ResponseReply(LazyModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    completed_at: int | None
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None


class ItemList(LazyModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(LazyModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(LazyModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


_ITEM: TypeAdapter[AnyItem] = TypeAdapter(AnyItem)


@dataclass(frozen=True, slots=True)
class AnswerTurn:
    """One response of a conversation: what it was asked, and where it is kept."""

    asked: ResponsesRequest
    before: Sequence[KeptItem]
    input: Sequence[KeptItem]
    kept: KeptResponses | None
    """None: nothing is."""
    clock: Clock

    def shape(self, call: Call) -> ResponsesShape:
        return ResponsesShape(call, self)


class ResponsesShape(Shape):
    def __init__(self, call: Call, turn: AnswerTurn) -> None:
        self._call, self._turn = call, turn
        asked = turn.asked
        summarised = asked.reasoning is not None and asked.reasoning.summarised
        carried = "reasoning.encrypted_content" in (asked.include or ())
        named = {
            shown_name(space, tool.name): {"name": tool.name, "namespace": space} for space, tool in asked.functions if space is not None
        }
        texts = TokenTexts(call.model.tokenizer, has_space=call.has_space(0))
        self._output = Output(texts, logprobs=asked.wants_logprobs, summarised=summarised, carried=carried, namespaced=named)
        self._next = 2
        """The number of the next event; the first two open the stream."""

    def first_events(self) -> bytes:
        begun = self._response("in_progress", [])
        opening = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        return b"".join([_written(event, number) for number, event in enumerate(opening)])

    def event(self, index: int, parts: Sequence[Part], logprobs: Sequence[TokenLogprob], finish: FinishReason | None) -> bytes:
        del index  # an answer has one choice
        return self._events(self._output.add(parts, logprobs, finish))

    def ending(self, usage: Usage) -> bytes:
        response = self._final(usage)
        return self._events([{"type": f"response.{response['status']}", "response": response}])

    def collected(self) -> Collected:
        return Streamed(self)

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        del choices  # `collected` made the one there is
        return json_bytes(self._final(usage))

    def fault_event(self, fault: Fault) -> bytes:
        """Return the error, on which most clients raise, and the failed response, which others wait for."""
        message = fault.message.encode("utf-8", "replace").decode()
        told = {"type": fault.type, "code": fault.code, "message": message, "param": fault.param}
        code = "rate_limit_exceeded" if fault.status == 429 else "server_error"
        failed = self._response("failed", self._output.items) | {"error": {"code": code, "message": message}}
        return self._events([{**told, "type": "error", "error": told}, {"type": "response.failed", "response": failed}])

    def _events(self, events: Iterable[Event]) -> bytes:
        out = b""
        for event in events:
            out += _written(event, self._next)
            self._next += 1
        return out

    def _final(self, usage: Usage) -> dict[str, object]:
        """Return the response that has ended, and keep it from here on."""
        cut = self._output.finish is FinishReason.LENGTH
        response = self._response("incomplete" if cut else "completed", self._output.items)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(self._turn.clock.wall())
        response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }
        turn = self._turn
        if turn.kept is not None:
            output = [keep_item(_ITEM.validate_python(_without_logprobs(item))) for item in self._output.items]
            turn.kept.put(Kept(self._call.id, json_bytes(response), turn.before, turn.input, output))
        return response

    def _response(self, status: str, output: Sequence[object]) -> dict[str, object]:
        """Return the response, with the request's fields as they were understood."""
        call, asked = self._call, self._turn.asked
        sampling = call.requests[0].sampling
        text, reasoning = asked.text, asked.reasoning
        form = (
            text.format.model_dump(by_alias=True, exclude_none=True) if text is not None and text.format is not None else {"type": "text"}
        )
        return {
            "id": call.id,
            "object": "response",
            "created_at": call.created,
            "status": status,
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": call.model.name,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {
                "effort": reasoning and reasoning.effort,
                "summary": reasoning and (reasoning.summary or reasoning.generate_summary),
            },
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": self._turn.kept is not None,
            "temperature": sampling.temperature,
            "text": {"format": form, "verbosity": "medium"},
            "tool_choice": "auto" if asked.tool_choice is None else _dumped(asked.tool_choice),
            "tools": [_dumped(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": sampling.top_p if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
        }


def _written(event: Event, number: int) -> bytes:
    return b"event: " + cast("str", event["type"]).encode() + b"\ndata: " + json_bytes({**event, "sequence_number": number}) + b"\n\n"


def _dumped(value: object) -> object:
    return value if isinstance(value, str) else cast("ResponsesRequest", value).model_dump(exclude_none=True)


def _without_logprobs(item: dict[str, object]) -> dict[str, object]:
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in cast("list[dict[str, object]]", item["content"])]}
