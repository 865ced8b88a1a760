"""Calls of tools and reasoning through the API, by OpenAI's own client. The model repeats the user's last message, so a test says what it writes."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tests.fakes.api_clients import openai_client
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from .conftest import Serve

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
END = "~"
"""Ends the script's answers."""


def client_of(served: Served[ScriptedInference]) -> openai.OpenAI:
    return openai_client(served.url)


def ask(served: Served[ScriptedInference], text: str, **fields: Any) -> Any:
    """The answer whole; the same streamed must say the same."""
    client = client_of(served)
    body: dict[str, Any] = {
        "model": "echo", "messages": [{"role": "user", "content": text + END}], "tools": [WEATHER], "extra_body": {"stop_token_ids": [ord(END)]},
    } | fields  # fmt: skip
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body) as stream:
        streamed = stream.get_final_completion()
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert (one.finish_reason, one.message.content or "") == (other.finish_reason, other.message.content or "")
        assert [call.function.model_dump(include={"name", "arguments"}) for call in one.message.tool_calls or ()] == [
            call.function.model_dump(include={"name", "arguments"}) for call in other.message.tool_calls or ()
        ]
    return whole


@pytest.fixture(params=[1, 7, 64], ids=lambda count: f"{count} tokens an event")
def served(serve_with: Serve, request: pytest.FixtureRequest) -> Served[ScriptedInference]:
    return serve_with(ScriptedInference(tokens_per_item=request.param))


def test_calls_are_read(served: Served[ScriptedInference]) -> None:
    answer = ask(served, f"Let me see.\n{CALL}\n{CALL}")
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Paris"}'] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_what_is_no_call_is_content(served: Served[ScriptedInference]) -> None:
    for text in (CALL.replace("weather", "clock"), "<tool_call>\nno json\n</tool_call>", "<tool_", "a <tool_call> b"):
        message = ask(served, text).choices[0].message
        assert (message.tool_calls, message.content) == (None, text)
    message = ask(served, CALL, tool_choice="none").choices[0].message
    assert (message.tool_calls, message.content) == (None, CALL)


def test_one_call_alone_where_several_are_not_wanted(served: Served[ScriptedInference]) -> None:
    message = ask(served, f"{CALL}\n{CALL}", parallel_tool_calls=False).choices[0].message
    assert len(message.tool_calls) == 1


def test_each_choice_has_its_own_calls(served: Served[ScriptedInference]) -> None:
    assert [len(choice.message.tool_calls) for choice in ask(served, CALL, n=2).choices] == [1, 1]


HUGE = 10**30
SCHEMA = {"type": "object", "properties": {"count": {"type": "integer", "maximum": HUGE}}}
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "count", "parameters": SCHEMA}}]}),
    ("/v1/responses", {"tools": [{"type": "function", "name": "count", "parameters": SCHEMA}]}),
    ("/v1/messages", {"tools": [{"name": "count", "input_schema": SCHEMA}], "max_tokens": 100}),
    ("/api/chat", {"tools": [{"type": "function", "function": {"name": "count", "parameters": SCHEMA}}], "stream": False}),
]


@pytest.mark.parametrize(("path", "fields"), PATHS, ids=[path for path, _ in PATHS])
def test_whole_numbers_of_any_size_are_taken_and_given(shared: Served[ScriptedInference], path: str, fields: dict[str, Any]) -> None:
    said = f'<tool_call>\n{{"name": "count", "arguments": {{"count": {HUGE}}}}}\n</tool_call>'
    asked = {"input": said} if path == "/v1/responses" else {"messages": [{"role": "user", "content": said}]}
    limit = (
        {"max_output_tokens": len(said)}
        if path == "/v1/responses"
        else {"options": {"num_predict": len(said)}}
        if "api" in path
        else {"max_tokens": len(said)}
    )
    answer = shared.http.post(path, json={"model": "echo", **asked, **fields, **limit})
    assert answer.status_code == 200, answer.text
    assert str(HUGE) in answer.text
