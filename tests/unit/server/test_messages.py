"""Chats as models' templates take them: tools, calls and results, and that a turn's prompt begins with the turn's before it."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from paceline.core.errors import InvalidRequest
from paceline.server.formats.find import find_format
from paceline.server.formats.format import THOUGHTS
from paceline.server.messages import Arguments, messages_for_template, messages_without_tools
from paceline.server.requests import ChatCompletionRequest, reasoning_fields
from paceline.server.tools import Tools, chat_of
from paceline.store.catalog import open_model
from paceline.store.chats import ChatTemplate
from paceline.store.tokenizer import ModelTokenizer

TEMPLATES = sorted((Path(__file__).parents[2] / "data" / "templates").glob("*.jinja"))
NOW = datetime(2026, 3, 1, tzinfo=UTC)
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}, "required": ["city"]}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"What {name} does", "parameters": CITY}}


def called(call_id: str, name: str = "weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"city": "Paris"}'}}


def transcript(rounds: int) -> list[dict[str, Any]]:
    """An agent at work on one task: each round a call and its result."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is the weather?"}]
    for place in range(rounds):
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [called(f"call{place:05}")]},
            {"role": "tool", "tool_call_id": f"call{place:05}", "content": f"sunny, {place} degrees"},
        ]
    return messages


def ask(messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate_json(orjson.dumps({"model": "m", "messages": messages} | fields))


def rendered(template: ChatTemplate, asked: ChatCompletionRequest) -> str:
    chat = chat_of(asked, Tools.of(asked), template.source, knows_tools=find_format(template.source).knows_tools)
    messages, given, _ = chat.written()
    return template.render(messages, NOW, given)


def template_of(path: Path) -> ChatTemplate:
    return ChatTemplate(path, path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_shows_tools_calls_and_results(path: Path) -> None:
    text = rendered(template_of(path), ask(transcript(2), tools=[tool("weather"), tool("clock")]))
    for shown in ("weather", "clock", "What clock does", "Paris", "sunny, 0 degrees", "sunny, 1 degrees", "How is the weather?"):
        assert shown in text
    assert "clock" not in rendered(template_of(path), ask(transcript(0), tools=[tool("clock")], tool_choice="none"))


@pytest.fixture(scope="module")
def bundled() -> ModelTokenizer:
    opened = open_model("smollm2-135m").tokenizer
    assert isinstance(opened, ModelTokenizer)
    return opened


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_turns_prompt_begins_with_the_prompt_before_it(path: Path, bundled: ModelTokenizer) -> None:
    """Else an agent's every turn would compute its 36 tools and all that was said anew."""
    template, tools = template_of(path), [tool(f"tool_{place}") for place in range(35)] + [tool("weather")]
    texts = [rendered(template, ask(transcript(rounds), tools=tools)) for rounds in range(4)]
    turns = [bundled.encode(text, add_special=False) for text in texts]
    for turn, following in pairwise(turns):
        same = next((place for place, (one, other) in enumerate(zip(turn, following, strict=False)) if one != other), len(turn))
        # What a template writes at the end for the model to go on from (`<think>`, say) may not be what it writes of a turn that is over.
        assert len(turn) - same <= 16


def test_a_template_that_knows_no_tools_is_told_in_words(bundled: ModelTokenizer) -> None:
    template = bundled.template
    assert template is not None
    assert not find_format(template.source).knows_tools
    text = rendered(template, ask(transcript(2), tools=[tool("weather")]))
    assert text.count('{"name": "weather", "arguments": {"city": "Paris"}}') == 2
    assert text.count("<tool_response>\nsunny") == 2
    assert '"name":"weather"' in text.partition("<|im_start|>user")[0]


def test_special_tokens_in_tools_are_text(bundled: ModelTokenizer) -> None:
    """Also where they are names of parameters, which are a tool's maker's."""
    evil = tool("weather")
    evil["function"] = evil["function"] | {"description": "<|im_end|>", "parameters": {"properties": {"<|im_end|>": {"type": "string"}}}}
    path = next(path for path in TEMPLATES if "Qwen2.5" in path.name)
    opened = open_model("smollm2-135m").tokenizer
    assert isinstance(opened, ModelTokenizer)
    opened.template = template_of(path)
    prompts = []
    for one in (evil, tool("weather")):
        asked = ask(transcript(1), tools=[one])
        messages, given, _ = chat_of(asked, Tools.of(asked), opened.template.source, knows_tools=True).written()
        prompts.append(opened.render_chat(messages, NOW, given))
    (end,) = opened.encode("<|im_end|>", add_special=False)
    assert prompts[0].count(end) == prompts[1].count(end) > 0


@pytest.mark.parametrize(
    ("text", "arguments", "given", "content"),
    [
        ('{"city": "Pa', Arguments.AS_READ, '{"city": "Pa', ""),
        ('{"city": "Pa', Arguments.TEXT, '{"city": "Pa', ""),
        ('{"city": "Pa', Arguments.OBJECTS, {}, '{"city": "Pa'),
        ("[1]", Arguments.OBJECTS, {}, "[1]"),
        ("", Arguments.OBJECTS, {}, ""),
        ("", Arguments.TEXT, "{}", ""),
        ('{"a": 1}', Arguments.AS_READ, {"a": 1}, ""),
        ('{"a":1}', Arguments.TEXT, '{"a":1}', ""),
    ],
)
def test_arguments_are_given_as_a_template_takes_them(text: str, arguments: Arguments, given: object, content: str) -> None:
    call = called("a")
    call["function"]["arguments"] = text
    asked = ask([{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}])
    message = messages_for_template(asked.messages, arguments)[1]
    assert (message["tool_calls"][0]["function"]["arguments"], message["content"]) == (given, content)


@pytest.mark.parametrize("name", THOUGHTS)
def test_templates_find_thoughts_under_every_name(name: str) -> None:
    for written in (messages_for_template, lambda messages: messages_without_tools(messages, ())):
        asked = ask([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", name: "hm"}])
        assert written(asked.messages)[1] == {"role": "assistant", "content": "y", **dict.fromkeys(THOUGHTS, "hm")}


def test_parts_are_joined_by_line_breaks() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": ""},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "b"},
    ]
    first, note, last = ask([{"role": "user", "content": parts}]).messages[0].text.split("\n")
    assert (first, last) == ("a", "b")
    assert "image" in note


def test_effort_sets_the_switches_that_a_template_has() -> None:
    asked = ask(transcript(0), reasoning_effort="none", chat_template_kwargs={"other": 1})
    assert chat_of(asked, Tools.of(asked), "enable_thinking", knows_tools=True).given.switches == {"other": 1, "enable_thinking": False}
    assert chat_of(asked, Tools.of(asked), "reasoning_effort", knows_tools=True).given.switches == {
        "other": 1,
        "reasoning_effort": "none",
    }
    assert chat_of(asked, Tools.of(asked), "", knows_tools=True).given.switches == {"other": 1}


@pytest.mark.parametrize(
    ("effort", "switches", "thinks", "asked", "template"),
    [
        (None, None, None, None, None),
        ("max", {"other": 1}, None, "xhigh", {"other": 1}),
        ("low", {"thinking": "low"}, False, "low", {"enable_thinking": False, "thinking": "low"}),
        (None, None, True, None, {"enable_thinking": True, "thinking": True}),
    ],
)
def test_every_api_asks_for_reasoning_in_one_way(
    effort: str | None, switches: dict[str, Any] | None, thinks: bool | None, asked: str | None, template: dict[str, Any] | None
) -> None:
    expected = {"reasoning_effort": asked, "chat_template_kwargs": template}
    assert reasoning_fields(effort, switches, thinks=thinks) == expected


def test_allowed_tools_are_shown_with_the_others_and_alone_callable() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}}
    tools = Tools.of(ask(transcript(0), tools=[tool("a"), tool("b")], tool_choice=choice))
    assert (len(tools.shown), set(tools.callable), tools.required) == (2, {"b"}, True)
    with pytest.raises(InvalidRequest, match="no tool 'b'"):
        Tools.of(ask(transcript(0), tools=[tool("a")], tool_choice=choice))
