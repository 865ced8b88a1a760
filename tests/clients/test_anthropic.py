"""Anthropic's official client gets what Anthropic's own server would give it. The model repeats the user's last message: a test says what it writes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from tests.fakes.api_clients import OPEN_CLIENTS
from tests.fakes.scripted_inference import ByteTokenizer, ScriptedInference
from tests.fakes.served import Served

from paceline.server.anthropic.requests import (
    BLOCKS,
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline.server.settings import ServerSettings

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed: make install-dev")

from anthropic import types as plain_types  # noqa: E402  (behind importorskip)
from anthropic.types import beta as beta_types  # noqa: E402
from anthropic.types.beta import message_count_tokens_params as beta_count  # noqa: E402
from anthropic.types.beta import message_create_params as beta_create  # noqa: E402

Scripted = Served[ScriptedInference]

WEATHER = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
END = "~"
"""Ends the script's answers."""
BODY: dict[str, Any] = {"model": "echo", "max_tokens": 1024, "extra_body": {"stop_token_ids": [ord(END)]}}


class Thinker(ByteTokenizer):
    """Of a model that thinks and calls tools."""

    @property
    def chat_template(self) -> str:
        return "{{ tools }} <tool_call> <think> </think>"


@pytest.fixture(scope="module")
def start() -> Generator[Callable[..., Scripted], None, None]:
    started: list[Scripted] = []

    def start(settings: ServerSettings | None = None, **script: Any) -> Scripted:
        started.append(Served(ScriptedInference(**script), settings))
        return started[-1]

    yield start
    for served in started:
        served.close()
        assert served.inference.stats().blocks_in_use == 0


@pytest.fixture(scope="module", params=[1, 7, 64], ids=lambda count: f"{count} tokens an event")
def served(start: Callable[..., Scripted], request: pytest.FixtureRequest) -> Scripted:
    return start(tokens_per_item=request.param, tokenizer=Thinker())


@pytest.fixture(scope="module")
def shared(start: Callable[..., Scripted]) -> Scripted:
    return start(max_context=512)


def client_of(served: Scripted, key: str = "unused") -> Any:
    return OPEN_CLIENTS.enter_context(anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0))


def ask(served: Scripted, text: str, **fields: Any) -> Any:
    """The answer whole; what the client accumulates from the same one streamed must be the same."""
    body = BODY | {"messages": [{"role": "user", "content": text + END}]} | fields
    with client_of(served) as client:
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
    assert without_ids(whole) == without_ids(streamed)
    assert whole.id.startswith("msg_")
    return whole


def without_ids(message: Any) -> dict[str, Any]:
    dumped = message.model_dump(exclude={"id"})
    for block in dumped["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
        block.pop("parsed_output", None)
    return dumped


def kinds(message: Any) -> list[str]:
    return [block.type for block in message.content]


def test_text(served: Scripted) -> None:
    answer = ask(served, 'a "b"\né')
    assert (answer.type, answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "message",
        "assistant",
        "echo",
        "end_turn",
        None,
    )
    assert [block.text for block in answer.content] == ['a "b"\né']
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.output_tokens) == (8, 1, 0, 9)


def test_the_end_of_the_room(served: Scripted, start: Callable[..., Scripted]) -> None:
    assert ask(served, "hello", max_tokens=3).stop_reason == "max_tokens"
    small = start(max_context=16)
    answer = ask(small, "hello", max_tokens=8192, extra_body={})
    assert (answer.stop_reason, answer.usage.output_tokens) == ("model_context_window_exceeded", 10)


def test_thinking(served: Scripted) -> None:
    answer = ask(served, "<think>\nIs it so?\n</think>\n\nYes.", thinking={"type": "enabled", "budget_tokens": 1024})
    assert kinds(answer) == ["thinking", "text"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("Is it so?", "Yes.")
    assert answer.content[0].signature  # clients that find none send no thinking back


def test_tools(served: Scripted) -> None:
    answer = ask(served, f"<think>Paris.</think>Let me see.\n{CALL}", tools=[WEATHER])
    assert kinds(answer) == ["thinking", "text", "tool_use"]
    assert (answer.content[2].name, answer.content[2].input, answer.stop_reason) == ("weather", {"city": "Paris"}, "tool_use")


def test_several_tools(served: Scripted) -> None:
    clock = WEATHER | {"name": "clock"}
    answer = ask(served, f"Both.\n{CALL}\n{CALL.replace('weather', 'clock')} So much for that.", tools=[WEATHER, clock])
    assert kinds(answer) == ["text", "tool_use", "tool_use", "text"]
    assert [block.name for block in answer.content[1:3]] == ["weather", "clock"]
    assert len({block.id for block in answer.content[1:3]}) == 2
    alone = ask(served, f"{CALL}\n{CALL}", tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert kinds(alone) == ["tool_use"]
    assert kinds(ask(served, CALL, tools=[WEATHER], tool_choice={"type": "none"})) == ["text"]


def test_a_call_that_was_cut_is_text(served: Scripted) -> None:
    cut = ask(served, CALL, tools=[WEATHER], max_tokens=CALL.index("ris"))
    assert (kinds(cut), cut.stop_reason) == (["text"], "max_tokens")
    two = CALL.replace('"Paris"', '"Paris", "day": "Mon')
    assert "Paris" in ask(served, two, tools=[WEATHER], max_tokens=two.index("on")).content[0].text


def test_a_conversation_goes_on(served: Scripted) -> None:
    said = f"<think>Paris.</think>Let me see.\n{CALL}"
    answer = ask(served, said, tools=[WEATHER])
    result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": [{"type": "text", "text": "Rain"}], "is_error": False}
    history = [
        {"role": "user", "content": "What is the weather?"},
        answer.to_param(),
        {"role": "user", "content": [result, {"type": "text", "text": "And now?" + END, "cache_control": {"type": "ephemeral"}}]},
    ]
    assert ask(served, "", messages=history, tools=[WEATHER]).content[0].text == "And now?"


def test_the_order_of_events(shared: Scripted) -> None:
    with client_of(shared) as client, client.messages.stream(**BODY, messages=[{"role": "user", "content": "hi" + END}]) as stream:
        names = [event.type for event in stream if event.type not in {"text", "content_block_delta"}]
    assert names == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


def test_tokens_are_counted(shared: Scripted) -> None:
    body: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "system": "Be brief."}
    with client_of(shared) as client:
        counted = client.messages.count_tokens(**body).input_tokens
        usage = client.messages.create(**body, max_tokens=1).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens == 5
        assert client.messages.count_tokens(model="echo", messages=[{"role": "user", "content": "x" * 600}]).input_tokens == 600


def test_errors_are_of_the_clients_types() -> None:
    served = Served(ScriptedInference(max_context=512), ServerSettings(api_key="a key of the house"))
    try:
        hello: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
        with client_of(served, "a key of the house") as client:
            assert client.messages.create(model="echo", **hello).content[0].text == "hello"
            with pytest.raises(anthropic.NotFoundError) as missing:
                client.messages.create(model="claude-none", **hello)
            assert missing.value.body["error"]["type"] == "not_found_error"
            assert missing.value.request_id.startswith("req_")
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 512 tokens > 511 maximum"):
                client.messages.create(model="echo", max_tokens=5, messages=[{"role": "user", "content": "x" * 512}])
        with client_of(served, "another") as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model="echo", **hello)
    finally:
        served.close()


# ------------------------------------------------------------------------------------------- every field that the client knows


def types_of(union: Any) -> set[str]:
    """The `type`s of the members of a union of the client's, and of the unions among them."""
    found = set[str]()
    for member in get_args(union):
        if get_origin(member) is not None:
            found |= types_of(get_args(member)[0])  # one with a discriminator
        elif (said := getattr(member, "model_fields", {}).get("type")) is not None:
            found |= set(get_args(said.annotation))
        elif (kind := get_type_hints(member).get("type")) is not None:
            found |= {name for literal in get_args(kind) for name in (literal, *get_args(literal)) if isinstance(name, str)}
    return found


@pytest.mark.parametrize(
    ("described", "model"),
    [
        (plain_types.message_create_params.MessageCreateParamsBase, MessagesRequest),
        (plain_types.message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
        (beta_create.MessageCreateParamsBase, MessagesRequest),
        (beta_count.MessageCountTokensParams, CountTokensRequest),
        (plain_types.ToolParam, ClientTool),
        (plain_types.TextBlockParam, TextBlock),
        (plain_types.ToolUseBlockParam, ToolUseBlock),
        (plain_types.ToolResultBlockParam, ToolResultBlock),
        (beta_types.BetaToolParam, ClientTool),
        (beta_types.BetaTextBlockParam, TextBlock),
        (beta_types.BetaToolUseBlockParam, ToolUseBlock),
        (beta_types.BetaToolResultBlockParam, ToolResultBlock),
    ],
)
def test_every_field_is_served_ignored_or_refused_by_name(described: Any, model: Any) -> None:
    assert set(described.__annotations__) <= set(model.model_fields)


@pytest.mark.parametrize("union", [plain_types.ContentBlockParam, beta_types.BetaContentBlockParam])
def test_every_block_is_served_or_refused_by_name(shared: Scripted, union: Any) -> None:
    known = types_of(union)
    assert set(BLOCKS) <= known
    for kind in known - set(BLOCKS):
        body = {"model": "echo", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": kind}]}]}
        answer = shared.http.post("/v1/messages", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert f"messages[0].content[0]: Blocks of type {kind} are not served" in answer.json()["error"]["message"]


@pytest.mark.parametrize("union", [plain_types.ToolUnionParam, beta_types.BetaToolUnionParam])
def test_every_tool_of_anthropics_own_is_refused_by_name(shared: Scripted, union: Any) -> None:
    known = types_of(union) - {"custom"}
    assert len(known) > 10
    for kind in known:
        body = {"model": "echo", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": kind, "name": "it"}]}
        answer = shared.http.post("/v1/messages", json=body)
        assert answer.status_code == 400
        assert f"tools[0]: Tools of type {kind} are Anthropic's own" in answer.json()["error"]["message"]
