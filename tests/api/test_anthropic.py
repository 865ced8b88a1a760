"""Anthropic's API as bytes: the stream's events, keep-alives, errors, and the requests of Claude Code."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tests.fakes.scripted_inference import ScriptedInference
from tests.fakes.served import Served

from paceline.server.settings import ServerSettings

from .conftest import Serve

HELLO: dict[str, Any] = {"model": "echo", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"name": "weather", "input_schema": {"type": "object"}}
CALLED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}]},
]


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its type says."""
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_stream(shared: Served[ScriptedInference]) -> None:
    answer = shared.http.post("/v1/messages", json=HELLO | {"stream": True, "max_tokens": 2})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["request-id"].startswith("req_")
    start, *middle = events_of(answer.text)
    assert start["message"].pop("id").startswith("msg_")
    usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "input_tokens": 5, "output_tokens": 0}
    assert start["message"] == {
        "type": "message", "role": "assistant", "model": "echo", "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    assert middle == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "h"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "e"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": usage | {"cache_read_input_tokens": 1, "input_tokens": 4, "output_tokens": 2},
        },
        {"type": "message_stop"},
    ]


def test_a_silent_stream_has_pings(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(hold_after=0), ServerSettings(comment_s=0.02))
    with served.http.stream("POST", "/v1/messages", json=HELLO | {"stream": True}) as answer:
        lines = answer.iter_lines()
        while next(lines) != "event: ping":
            pass
        assert next(lines) == 'data: {"type":"ping"}'
        served.loop.call_soon_threadsafe(served.inference.release)
        assert "message_stop" in "".join(lines)


def test_a_stream_that_fails_ends_with_an_error(serve_with: Serve) -> None:
    served = serve_with(ScriptedInference(fail_after=2))
    events = events_of(served.http.post("/v1/messages", json=HELLO | {"stream": True}).text)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "The script says: fail"}}
    whole = served.http.post("/v1/messages", json=HELLO)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")


def test_what_claude_code_sends(serve_with: Serve) -> None:
    served = serve_with()
    checksum = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c0; cc_entrypoint=sdk-cli; cch=a1b2c;"}
    body = HELLO | {
        "max_tokens": 32_000,
        "system": [checksum, {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}],
        "messages": [
            *CALLED,
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain", "is_error": False, "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "And now?"},
            ]},
            {"role": "system", "content": "Agents are available."},
        ],
        "tools": [TOOL | {"description": "Of a city"}, TOOL | {"name": "mcp__server__do-it", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": '{"device_id":"1"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }  # fmt: skip
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,mid-conversation-system-2026-04-07",
        "x-app": "cli",
    }
    answer = served.http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    said = "".join(event["delta"].get("text", "") for event in events_of(answer.text) if event["type"] == "content_block_delta")
    assert said.startswith("And now?\n<system-reminder>\nAgents are available.\n</system-reminder>")
    assert served.http.head("/").status_code == 200  # it looks whether somebody is there


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"stop_sequences": [""]}, "stop_sequences[0]: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: empty"),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content[0]: A content block needs a type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "Missing required field: messages[0].content[0].text"),
        ({"messages": [{"role": "system", "content": "hi"}]}, "messages: there is nothing to answer"),
        ({"messages": [{"role": "user", "content": [CALLED[1]["content"][0]]}]}, "messages[0].content[0]: a tool_use block stands in"),
        (
            {"messages": [*CALLED, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_2"}]}]},
            "messages[2].content[0].tool_use_id: no tool_use block before it has the id 'toolu_2'",
        ),
        (
            {"messages": [*CALLED, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "search_result", "source": ""}]}]}]},
            "messages[2].content[0].content[0]: Only text, images and documents are served here, not search_result",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice: a call is required, and there are no tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice.name: missing"),
        ({"tool_choice": {"type": "some"}, "tools": [TOOL]}, "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'"),
        ({"thinking": {"type": "hard"}}, "thinking.type: Input should be 'enabled'"),
        ({"output_config": {"format": {"type": "json_object", "schema": {}}}}, "output_config.format.type: Input should be 'json_schema'"),
        ({"container": "c1"}, "container: Containers are Anthropic's"),
        ({"mcp_servers": [{"type": "url", "url": "http://a"}]}, "mcp_servers: The server connects to no MCP servers"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(shared: Served[ScriptedInference], fields: dict[str, Any], message: str) -> None:
    answer = shared.http.post("/v1/messages", json=HELLO | fields)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["message"].startswith(message), answer.text


def test_fields_that_nobody_knows_are_named(shared: Served[ScriptedInference]) -> None:
    unknown = {"mood": "good", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "tone": 1}]}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert "mood, messages[].content[].tone" in shared.http.post(path, json=HELLO | unknown).headers["x-paceline-ignored"]
    assert "x-paceline-ignored" not in shared.http.post("/v1/messages", json=HELLO).headers


def test_the_values_that_ask_for_nothing_pass(shared: Served[ScriptedInference]) -> None:
    nothing = {"container": None, "mcp_servers": [], "stop_sequences": [], "tools": [], "system": "", "thinking": {"type": "disabled"}}
    assert shared.http.post("/v1/messages", json=HELLO | nothing).json()["content"] == [{"type": "text", "text": "hello"}]
