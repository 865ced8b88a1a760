"""Forms of answers over HTTP, in every API: what is asked for, what is refused, and how an answer fails that leaves its form."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.core.errors import FORM_NOT_FOLLOWED

from .conftest import Serve

SAID = [{"role": "user", "content": "hello"}]
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": SAID}),
    "completions": ("/v1/completions", {"prompt": "hello"}),
    "responses": ("/v1/responses", {"input": "hello"}),
    "anthropic": ("/v1/messages", {"messages": SAID, "max_tokens": 20}),
    "ollama": ("/api/chat", {"messages": SAID}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_an_answer_that_leaves_its_form_ends_with_an_error_that_carries_its_text(serve_with: Serve, api: str, *, stream: bool) -> None:
    served = serve_with(ScriptedInference(fail_after=3, fail_code=FORM_NOT_FOLLOWED))
    path, body = APIS[api]
    answer = served.http.post(path, json={"model": "echo", "stream": stream, **body})
    assert answer.status_code == (200 if stream else 400)
    assert "error" in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert '"done":true' not in answer.text
    if not stream:
        error = answer.json() if api == "ollama" else answer.json()["error"]
        assert error["partial_text"] == "hel"
        assert api in ("anthropic", "ollama") or error["code"] == FORM_NOT_FOLLOWED


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict"),
        ({"response_format": {"type": "text", "grammar": "x"}}, "response_format.grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "Schema": {}}}}, "response_format.json_schema.Schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}}, "response_format.schema"),
        ({"tools": [TOOL, {"type": "function", "function": FUNCTION | {"name": "g", "arguments": {}}}]}, "tools[1].function.arguments"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "mode": "any"}}}, "tool_choice.function.mode"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}},
            "tool_choice.allowed_tools.tools[0].function.parameters",
        ),
    ],
)
def test_a_name_that_is_unknown_where_all_change_the_answer_is_refused(shared: Served[ScriptedInference], fields: Any, named: str) -> None:
    answer = shared.http.post("/v1/chat/completions", json={"messages": SAID, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL | {"defer_loading": True}]},
        {"tools": [{"type": "function", "function": FUNCTION | {"arguments": None}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        {"invented": {"a": 1}},
    ],
)
def test_other_names_are_ignored_or_served(shared: Served[ScriptedInference], fields: Any) -> None:
    assert shared.http.post("/v1/chat/completions", json={"messages": SAID, "max_tokens": 1, **fields}).status_code == 200


BAD = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {"minLength": 1}}}}}
BAD_FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_object", "schema": BAD}}, "response_format.schema"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}}, "response_format.json_schema.schema"),
    ("completions", {"response_format": {"type": "json_object", "schema": BAD}}, "response_format.schema"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": BAD}}}, "text.format.schema"),
    ("anthropic", {"output_config": {"format": {"type": "json_schema", "schema": BAD}}}, "output_config.format.schema"),
    ("ollama", {"format": BAD}, "format"),
    (
        "chat",
        {"tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters": BAD}}], "tool_choice": "required"},
        "tools[1].function.parameters",
    ),
]


@pytest.mark.parametrize(("api", "fields", "place"), BAD_FORMS)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_place_of_its_keyword(
    shared: Served[ScriptedInference], api: str, fields: dict[str, Any], place: str
) -> None:
    path, body = APIS[api]
    answer = shared.http.post(path, json={"model": "echo", **body, **fields})
    assert answer.status_code == 400
    assert f"{place}.properties.a.items.not" in answer.text


@pytest.mark.parametrize(("grammar", "named"), [('root ::= "a" root', "rule root"), ('root ::= "a" | x', "named x")])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_grammar_that_can_not_end_or_be_read_is_refused_by_the_name_of_its_rule(
    shared: Served[ScriptedInference], api: str, grammar: str, named: str
) -> None:
    path, body = APIS[api]
    answer = shared.http.post(path, json={**body, "grammar": grammar})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grammar")
    assert named in answer.json()["error"]["message"]
