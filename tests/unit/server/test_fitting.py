"""Chats fitted to templates: what one refuses is written otherwise, and every answer of every family can be sent back."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest

from paceline.core.errors import TemplateRefused
from paceline.core.text import Given
from paceline.server.fitting import FittedChat, fit_chat
from paceline.server.formats.find import find_format
from paceline.server.requests import ChatCompletionRequest
from paceline.server.tools import Tools, chat_of
from paceline.store.chats import ChatTemplate

NOW = datetime(2026, 3, 1, tzinfo=UTC)
FOLDER = Path(__file__).parents[2] / "data" / "templates"
TEMPLATES = sorted(FOLDER.rglob("*.jinja"))
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}]

# Templates with one trait each of those that models come with.
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('role') }}{% endif %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
)
CALLS = "{# <tool_call> #}"
"""A mark of calls that can be read: without one, tools are described in words from the start."""
PLAIN = (
    CALLS + "{% for m in messages %}[{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<%s>{% endfor %}]{% endfor %}{{ tools }}"
)
ONE_CALL = PLAIN.replace("<%s>", "{% if loop.length > 1 %}{{ raise_exception('one') }}{% endif %}{{ c.function.name }}")
OBJECTS = PLAIN.replace("<%s>", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}")
TEXTS = PLAIN.replace("<%s>", "{{ '(' + c.function.arguments + ')' }}")
LONG_IDS = PLAIN.replace("<%s>", "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }}")
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "[{{ m.role }}: {{ m.content }}]{% endfor %}"
)
NO_TOOLS = CALLS + "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + FIRST_SYSTEM
NO_SILENCE = (
    "{% for m in messages %}{% if not m.content and not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}{% endfor %}" + FIRST_SYSTEM
)
NOTHING = "{{ raise_exception('nothing') }}"

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "Be brief."}


def said(text: str = "yes", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(*ids: str, arguments: str = '{"a": 1}', results: bool = True, **more: Any) -> list[dict[str, Any]]:
    """A turn with calls, and their results."""
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}} for i in ids]
    given = [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i in ids] if results else []
    return [{"role": "assistant", "content": None, "tool_calls": calls, **more}, *given]


@cache
def compiled(source: str) -> tuple[ChatTemplate, bool]:
    return ChatTemplate(Path("t"), source, {"bos_token": "<s>", "eos_token": "</s>"}), find_format(source).knows_tools


def fitted(source: str, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, FittedChat]:
    template, knows_tools = compiled(source)
    asked = ChatCompletionRequest.model_validate_json(orjson.dumps({"messages": messages} | fields))
    texts: list[str] = []

    def render(messages: list[dict[str, Any]], given: Given) -> list[int]:
        texts.append(template.render(messages, NOW, given))
        return []

    chat = chat_of(asked, Tools.of(asked), source, knows_tools=knows_tools)
    found = fit_chat(chat, render)
    return texts[-1], found


A1, B2 = "call0aaa1", "call0bbb2"


@pytest.mark.parametrize(
    ("source", "messages", "changes", "shows"),
    [
        (TURNS, [USER], [], "[user: hi]"),
        (TURNS, [SYSTEM, USER], ["system"], "[user: Be brief.\n\nhi]"),
        (TURNS, [SYSTEM, SYSTEM, USER, said(), USER], ["system"], "[user: Be brief.\n\nBe brief.\n\nhi][assistant: yes][user: hi]"),
        (TURNS, [USER, USER], ["turns"], "[user: hi\n\nhi]"),
        (TURNS, [USER, said("a"), said("b"), USER], ["turns"], "[user: hi][assistant: a\n\nb][user: hi]"),
        (TURNS, [USER, said(), SYSTEM, USER], ["turns"], "[assistant: yes][user: Be brief.\n\nhi]"),
        (TURNS, [said("Hello"), USER], ["gaps"], "[user: ][assistant: Hello][user: hi]"),
        (TURNS, [SYSTEM, said("Hello"), USER], ["system"], "[user: Be brief.][assistant: Hello][user: hi]"),
        (FIRST_SYSTEM, [SYSTEM, SYSTEM, USER], ["turns"], "[system: Be brief.\n\nBe brief.][user: hi]"),
        (FIRST_SYSTEM, [SYSTEM, USER, SYSTEM], ["turns"], "[system: Be brief.][user: hi\n\nBe brief.]"),
        (ONE_CALL, [USER, *calling(A1)], [], "[assistant: f][tool: result call0aaa1]"),
        (ONE_CALL, [USER, *calling(A1, B2)], ["calls"], "[assistant: f][tool: result call0aaa1][assistant: f][tool: result call0bbb2]"),
        (ONE_CALL, [USER, *calling(A1, B2, results=False), USER], ["calls"], "[assistant: f][assistant: f][user: hi]"),
        (NO_SILENCE, [USER, said(""), USER], ["empty"], "[assistant: ...]"),
        (NO_SILENCE, [USER, *calling(A1), USER], [], "[user: hi]"),
        (OBJECTS, [USER, *calling(A1)], [], "a=1"),
        (OBJECTS, [USER, *calling(A1, arguments='{"a": ')], ["arguments"], '[assistant: {"a": ]'),
        (TEXTS, [USER, *calling(A1, arguments='{"a":1}')], ["arguments"], '({"a":1})'),
        (TEXTS, [USER, *calling(A1, arguments="")], ["arguments"], "({})"),
        (LONG_IDS, [USER, *calling("call_1"), *calling(A1)], ["ids"], A1),
        (NOTHING.replace("}}", "if messages[0].role == 'system' }}") + TEXTS, [SYSTEM, USER, *calling(A1)], ["arguments", "system"], "({"),
    ],
)
def test_a_template_is_given_what_it_takes(source: str, messages: list[dict[str, Any]], changes: list[str], shows: str) -> None:
    text, found = fitted(source, messages)
    assert shows in text
    assert list(found.changes) == changes


def test_tools_reach_templates_that_refuse_them() -> None:
    for source, changes in ((TURNS, ["system"]), (NO_TOOLS, ["tools"])):
        text, found = fitted(source, [USER, *calling(A1), USER], tools=TOOLS)
        assert "<tools>" in text
        assert "<tool_call>" in text
        assert "result call0aaa1" in text
        assert set(changes) <= set(found.changes)
        assert found.in_words == (source is NO_TOOLS)


def test_a_template_that_takes_nothing_says_its_own_words() -> None:
    with pytest.raises(TemplateRefused, match="nothing"):
        fitted(NOTHING, [SYSTEM, USER, *calling("a", "b"), USER], tools=TOOLS)


CUT = '{"a": "hello th'
ENDS: dict[str, list[dict[str, Any]]] = {
    "stop": [said()],
    "stop, thoughts": [said(reasoning_content="hm")],
    "nothing": [said("")],
    "null": [{"role": "assistant", "content": None}],
    "length": [said("ye")],
    "length, in thoughts": [{"role": "assistant", "content": None, "reasoning_content": "hm"}],
    "length, in a call": calling(A1, arguments=CUT),
    "length, in the second call": [*calling(A1), *calling(B2, arguments=CUT)],
    "length, in a call that nobody ran": calling(A1, arguments=CUT, results=False),
    **{f"{n} calls": calling(*(f"call0{n}{i:03}" for i in range(n))) for n in (1, 2, 3)},
    "a call of another server": calling("call_1"),
    "text, thoughts and a call": calling(A1, content="look", reasoning_content="hm"),
    "text and 2 cut calls": calling(A1, B2, arguments=CUT, content="look"),
}
NEXT: dict[str, list[dict[str, Any]]] = {"user": [USER], "nothing": [], "system, user": [SYSTEM, USER]}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_answer_can_be_sent_back(path: Path) -> None:
    source, refused = path.read_text("utf-8"), list[str]()
    for (end, turn), (goes_on, behind), before, tools in product(ENDS.items(), NEXT.items(), ([], [SYSTEM]), (None, TOOLS)):
        if not behind and turn[-1]["role"] == "assistant":
            continue
        try:
            text, _ = fitted(source, [*before, USER, *turn, *behind], tools=tools)
        except TemplateRefused as error:
            refused.append(f"{end}; {goes_on}; system {bool(before)}; tools {bool(tools)}: {error.message}")
            continue
        lost = [m["content"] for m in turn if m["role"] == "tool" and m["content"] not in text]
        refused += [f"{end}; {goes_on}: lost {lost}"] if lost else []
    assert not refused
