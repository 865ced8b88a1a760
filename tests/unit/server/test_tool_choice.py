"""Which tools may be called and how often, what a function without parameters takes, and what each API shows of a call that was cut."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tests.fakes.scripted_inference import ScriptedInference

from paceline.core.generation import FinishReason, GenerationRequest
from paceline.core.ids import RequestId
from paceline.server.anthropic.shape import MessageShape
from paceline.server.call import Call
from paceline.server.formats.find import find_format
from paceline.server.formats.format import CallArguments, CallBegun, Part
from paceline.server.formats.grammar import content_grammar
from paceline.server.ollama.shape import OllamaChatShape
from paceline.server.requests import ChatCompletionRequest
from paceline.server.responses.output import Output
from paceline.server.shape import Shape, Usage
from paceline.server.shapes import ChatShape
from paceline.server.tools import Tools

MODEL = ScriptedInference().models()[0]
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def tools_of(parameters: Any = None, **fields: Any) -> Tools:
    function = {"name": "now"} | ({} if parameters is None else {"parameters": parameters})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": function}], **fields}
    return Tools.of(ChatCompletionRequest.model_validate(body))


@pytest.mark.parametrize("parallel", [None, True, False])
def test_a_named_function_is_called_once(parallel: bool | None) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    tools = tools_of(tool_choice=named, parallel_tool_calls=parallel)
    assert (tools.required, tools.parallel) == (True, False)
    assert tools_of(tool_choice="required", parallel_tool_calls=parallel).parallel is (parallel is not False)


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        (None, EMPTY),
        ({}, EMPTY),
        ({"type": "object", "properties": {}}, EMPTY),
        ({"type": "object", "properties": {}, "additionalProperties": True},) * 2,
        ({"type": "object"}, EMPTY),
        ({"properties": {}, "required": []},) * 2,
        ({"type": "object", "title": "Now"}, EMPTY | {"title": "Now"}),
        (
            {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"},
            EMPTY | {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        ),
        ({"type": "object", "additionalProperties": False}, {"type": "object", "additionalProperties": False}),
        ({"type": "object", "$ref": "#/$defs/A", "$defs": {"A": {}}},) * 2,
        ({"type": "object", "propertyNames": {"enum": ["a"]}},) * 2,
        ({"type": "object", "if": {}, "then": {"required": ["a"]}},) * 2,
        ({"type": "object", "properties": {"a": {}}},) * 2,
    ],
)
def test_parameters_of_a_function(parameters: Any, schema: Any) -> None:
    tools = tools_of(parameters)
    assert tools.schemas == {"now": schema}
    assert tools.shown[0]["function"]["parameters"] == schema


CUT: list[Part] = [CallBegun(0, "now", is_open=True), CallArguments(0, '{"a": 1', is_open=True)]


def written(of: type[Shape], finish: FinishReason, *, stream: bool) -> str:
    request = GenerationRequest(RequestId("r"), (1,), 8)
    one = of(Call("id-1", of, MODEL, 5, (request,), 1, stream=stream, include_usage=False, logprobs=False))  # pyright: ignore[reportCallIssue]
    usage = Usage(1, 2, 0)
    if stream:
        return (one.event(0, CUT, (), None) + one.event(0, [], (), finish) + one.ending(usage)).decode()
    collected = one.collected()
    collected.add(CUT, (), None)
    collected.add([], (), finish)
    return one.whole([collected], usage).decode()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("of", [ChatShape, MessageShape, OllamaChatShape])
def test_a_call_that_was_cut_is_not_shown_as_finished(of: type[Shape], finish: FinishReason, stream: bool) -> None:
    text = written(of, finish, stream=stream)
    assert '"tool_calls"' not in text if of is OllamaChatShape else '"finish_reason":"tool_calls"' not in text
    assert "tool_use" not in text
    assert "a" in text


def test_a_cut_call_is_an_incomplete_item() -> None:
    output = Output(MODEL.tokenizer, logprobs=False, summarised=False, carried=False, namespaced={})
    events = output.add(CUT, (), FinishReason.STOP)
    assert output.items[0]["status"] == "incomplete"
    assert orjson.dumps(events)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("last", [False, True])
def test_only_a_call_that_was_cut_is_incomplete(last: bool, apart: bool) -> None:
    parts: list[Part] = [
        *(CallBegun(0, "f", is_open=True), CallArguments(0, '{"a"', is_open=True), CallArguments(0, ":1}", is_open=False)),
        *(CallBegun(1, "g", is_open=True), CallArguments(1, "{}", is_open=False)),
        *(CallBegun(2, "h", is_open=True), CallArguments(2, "{", is_open=last)),
    ]
    output = Output(MODEL.tokenizer, logprobs=False, summarised=False, carried=False, namespaced={})
    for some in [[part] for part in parts] if apart else [parts]:
        output.add(some, (), None)
    output.add([], (), FinishReason.STOP)
    assert [item["status"] for item in output.items] == ["completed", "completed", "incomplete" if last else "completed"]


def test_a_form_stands_behind_the_head_of_the_answer() -> None:
    form = content_grammar(find_format("{{ tools }}<|channel|><|message|>"), {}, token_id=lambda _: None, in_reasoning=False)
    start = form.text.splitlines()[0]
    assert start.index("<|start|>assistant") < start.index("<|channel|>final<|message|>") < start.rindex("r")
