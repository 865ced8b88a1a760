"""A request of Anthropic's as a chat, and the lines of clients that are kept from prompts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.server.anthropic.requests import MessagesRequest
from paceline.server.anthropic.routes import chat_of
from paceline.server.messages import Message, NamedTool, without_headers
from paceline.server.requests import ChatCompletionRequest, JsonSchemaFormat


def chat(messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    return chat_of(MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": messages} | fields))


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def result(call: str, said: Any = "", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": said} | fields


USES = [{"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": {"x": [1]}} for name in ("a", "b")]


def test_turns_become_messages() -> None:
    thought = {"type": "thinking", "thinking": "Both.", "signature": "s"}
    written = chat(
        [
            {"role": "user", "content": [text("one"), text("two")]},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "d"}, thought, text("I call"), *USES, text(" them")]},
            {"role": "user", "content": [text("So?"), result("toolu_a", [text("1"), text("2")]), result("toolu_b", "gone", is_error=True)]},
        ],
        system=[text("Be"), text("brief.")],
    ).messages
    assert [(message.role, message.text) for message in written] == [
        ("system", "Be\nbrief."),
        ("user", "one\ntwo\nthree"),
        ("assistant", "I call\n them"),
        ("tool", "1\n2"),
        ("tool", "Error: gone"),
        ("user", "So?"),
    ]
    assert written[2].reasoning_content == "Both."
    assert [(call.id, call.function.name, call.function.arguments) for call in written[2].tool_calls or ()] == [
        ("toolu_a", "a", '{"x":[1]}'),
        ("toolu_b", "b", '{"x":[1]}'),
    ]
    assert [message.tool_call_id for message in written[3:5]] == ["toolu_a", "toolu_b"]


def test_system_messages() -> None:
    written = chat(
        [{"role": "system", "content": "First."}, {"role": "user", "content": "Hi"}, {"role": "system", "content": [text("Later.")]}],
        system="Zeroth.",
    ).messages
    assert [(message.role, message.text) for message in written] == [
        ("system", "Zeroth.\nFirst."),
        ("user", "Hi\n<system-reminder>\nLater.\n</system-reminder>"),
    ]


def test_turns_that_follow_only_append() -> None:
    """What a prompt was is how the next one begins: the prefix cache has it."""
    turns = [
        {"role": "user", "content": [text("Weather?")]},
        {"role": "assistant", "content": USES},
        {"role": "user", "content": [result("toolu_a", "rain"), result("toolu_b", "sun")]},
        {"role": "assistant", "content": [text("Rain.")]},
        {"role": "user", "content": "Thanks"},
    ]
    whole = chat(turns, system="Brief.").messages
    for count in (1, 3, 5):
        part = chat(turns[:count], system="Brief.").messages
        assert part == whole[: len(part)]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "none"}, "none", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "a"}, "a", True),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], expected: str, parallel: bool) -> None:
    tool = {"name": "a", "description": "d", "input_schema": {"type": "object"}, "type": "custom", "strict": True}
    asked = chat([{"role": "user", "content": "hi"}], tools=[tool], tool_choice=choice)
    chosen = asked.tool_choice
    assert (chosen.function.name if isinstance(chosen, NamedTool) else chosen, asked.parallel_tool_calls) == (expected, parallel)
    assert asked.tools is not None
    function = asked.tools[0].function
    assert (function.name, function.description, function.parameters, function.strict) == ("a", "d", {"type": "object"}, True)


def test_an_answer_that_is_begun_is_gone_on_with() -> None:
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [text("Hel")]}]
    asked = chat(begun)
    assert (asked.continue_final_message, asked.messages[-1].text) == (True, "Hel")
    assert chat(begun[:1]).continue_final_message is None
    with pytest.raises(InvalidRequest, match=r"messages\[1\]: the last message is the assistant's"):
        chat([begun[0], {"role": "assistant", "content": USES}])


def test_sampling_thinking_and_forms() -> None:
    hello = [{"role": "user", "content": "hi"}]
    asked = chat(
        hello, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["."], thinking={"type": "enabled", "budget_tokens": 1024}, stream=True
    )
    assert (asked.temperature, asked.top_p, asked.top_k, asked.stop, asked.stream, asked.max_tokens) == (0.5, 0.9, 3, ["."], True, None)
    assert asked.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    kept = chat(hello, thinking={"type": "disabled"}, chat_template_kwargs={"thinking": "low"}).chat_template_kwargs
    assert kept == {"enable_thinking": False, "thinking": "low"}
    assert chat(hello).chat_template_kwargs is None
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form, "effort": "max"}}, {"output_format": form}):
        asked = chat(hello, **fields)
        assert isinstance(asked.response_format, JsonSchemaFormat)
        assert asked.response_format.json_schema.schema_ == {"type": "object"}
    assert chat(hello, output_config={"effort": "max"}).reasoning_effort == "xhigh"


HEADER = "x-anthropic-billing-header: cc_version=2.1.{}; cch={};"


def test_lines_of_clients_are_dropped() -> None:
    user = Message(role="user", content="hi")
    kept = [Message(role="system", content="You are an agent."), user]
    for said in (HEADER.format(1, "a1"), HEADER.format(2, "b2")):
        assert without_headers([Message(role="system", content=f"{said}\nYou are an agent."), user]) == kept
        assert without_headers([Message(role="system", content=said), user]) == [user]
        late = [Message(role="system", content=f"You are an agent.\n{said}"), user]
        assert without_headers(late) == late
        spoken = [Message(role="user", content=said)]
        assert without_headers(spoken) == spoken
