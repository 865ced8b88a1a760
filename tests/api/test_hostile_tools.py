"""Requests that were made to break what reads tools, histories and ids: each is refused with 400, or answered."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served
from tests.unit.server.formats.test_families import FORMATS

from paceline.core.errors import InvalidRequest
from paceline.server.formats.grammar import BranchChoice, calls_grammar

ITSELF = {"type": "object", "properties": {f"k{place}": {"$ref": "#"} for place in range(12)}}

OPENED = [{"role": "system", "content": "x-anthropic-billing-header: a"}, {"role": "user", "content": "hi"}]


def test_a_schema_that_refers_to_itself_again_and_again_is_a_small_grammar() -> None:
    grammar = calls_grammar(FORMATS["gemma4"], {"f": ITSELF}, BranchChoice.REQUIRED, parallel=True, token_id=lambda _: None)
    assert grammar is not None
    assert len(grammar.text) < 2000


def test_half_a_surrogate_pair_in_arguments_is_no_error(shared: Served[ScriptedInference]) -> None:
    said = '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\ud83d\\"}"}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    body: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": said}], "tools": tools, "max_tokens": len(said)}
    for stream in (False, True):
        answer = shared.http.post("/v1/chat/completions", json=body | {"stream": stream})
        assert answer.status_code == 200
        assert '"error"' not in answer.text
        assert "arguments" in answer.text


def test_a_chat_of_nothing_but_a_clients_header(shared: Served[ScriptedInference]) -> None:
    messages = [{"role": "system", "content": "x-anthropic-billing-header: a"}]
    answer = shared.http.post("/v1/chat/completions", json={"model": "echo", "messages": messages, "continue_final_message": True})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (
            "/v1/chat/completions",
            "messages[2].tool_call_id",
            {"messages": [*OPENED, {"role": "tool", "tool_call_id": "a", "content": "x"}]},
        ),
        ("/v1/responses", "input[2].call_id", {"input": [*OPENED, {"type": "function_call_output", "call_id": "a", "output": "x"}]}),
    ],
)
def test_places_are_the_clients_where_a_header_was_dropped(
    shared: Served[ScriptedInference], path: str, field: str, body: dict[str, Any]
) -> None:
    error = shared.http.post(path, json={"model": "echo", **body}).json()["error"]
    assert (error["param"], error["message"].partition(":")[0]) == (field, field)


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"properties": {"a": {}}, "required": [["a"]]}, "required"),
        ({"properties": {"a": {"type": "array", "minItems": "x"}}}, "properties.a.minItems"),
    ],
)
def test_a_schema_that_is_none(schema: dict[str, Any], at: str) -> None:
    from paceline.server.call import Reading
    from paceline.server.requests import ChatCompletionRequest
    from paceline.server.tools import Tools, answer_grammar

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    asked = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
    )
    tools = Tools.of(asked)
    reading = Reading(FORMATS["gemma4"], tools.schemas, in_reasoning=False, parallel=True, spelled={})
    with pytest.raises(InvalidRequest) as refused:
        answer_grammar(asked, tools, reading, {})
    assert refused.value.field == f"tools[0].function.parameters.{at}"


def test_many_calls_in_one_turn_of_a_conversation(shared: Served[ScriptedInference]) -> None:
    calls = [{"type": "function_call", "call_id": f"c{place}", "name": "f", "arguments": "{}"} for place in range(600)]
    answer = shared.http.post("/v1/responses", json={"model": "echo", "input": [*calls, {"role": "user", "content": "x"}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_what_a_client_calls_its_items_is_found_by_no_other(shared: Served[ScriptedInference]) -> None:
    item = {"type": "message", "id": "msg_1", "role": "user", "content": "mine"}
    kept = shared.http.post("/v1/responses", json={"model": "echo", "input": [item], "max_output_tokens": 2})
    assert kept.status_code == 200
    asked = {"model": "echo", "input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "x"}]}
    assert shared.http.post("/v1/responses", json=asked).status_code == 400
    for limit in ("%C2%B2", "000000001000", "0", "101"):
        assert shared.http.get(f"/v1/responses/{kept.json()['id']}/input_items?limit={limit}").status_code == 400
