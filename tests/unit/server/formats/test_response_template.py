"""A model's own `response_template` is read without running its expressions, and answers are read as transformers reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.server.formats.reading import read
from tests.unit.server.formats.test_families import CASES, MODELS, SCHEMAS, message
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from paceline.server.formats.find import find_format
from paceline.server.formats.format import Body, CallArguments, CallBegun, Content, Format, Reasoning
from paceline.server.formats.grammar import BranchChoice, calls_grammar
from paceline.server.formats.response_template import from_response_template

QWEN, QWEN_XML, GEMMA = (
    next(template for models, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if model in models)
    for model in ("qwen3", "qwen3_5", "gemma4")
)
TEMPLATES = {"Qwen-Qwen3-0.6B": QWEN, "Qwen-Qwen2.5-7B-Instruct": QWEN, "Qwen3.5-4B": QWEN_XML, "google-gemma-4-31B-it": GEMMA}
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": schema}} for name, schema in SCHEMAS.items()]


def turn_of(text: str, format_: Format) -> dict[str, Any]:
    """An answer as transformers gives it."""
    parts = read([text], format_, SCHEMAS)
    turn: dict[str, Any] = {"role": "assistant"}
    for key, kind in (("content", Content), ("reasoning_content", Reasoning)):
        if said := "".join(part.text for part in parts if isinstance(part, kind)):
            turn[key] = said.strip()
    calls = [part for part in parts if isinstance(part, CallBegun)]
    texts = ["".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == call.index) for call in calls]
    if calls:
        turn["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(text)}}
            for call, text in zip(calls, texts, strict=True)
        ]
    return turn


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_read_as_transformers_reads_them(name: str, case: str) -> None:
    model = next(model for model in MODELS if model.template == name)
    own = from_response_template(TEMPLATES[name])
    assert own
    calls = [
        (tool, {key: value.strip() if isinstance(value, str) else value for key, value in given.items()}) for tool, given in CASES[case]
    ]
    thoughts = {model.reasoning: "Where is\nit?"} if model.reasoning else {}
    texts = [model.turn(message(calls)), model.turn(message(calls, **thoughts))]
    texts += [model.turn(message(calls, "I look <there>."))] if model.content else []
    for text in [*texts, "Just <b>text</b>.", "<think>\nHm.\n</think>\n\nSo." if name[0] == "Q" else "<|channel>thought\nHm.<channel|>So."]:
        theirs = parse_response(text, TEMPLATES[name], prefix="", tools=TOOLS)
        assert turn_of(text, model.format()) == theirs
        assert turn_of(text, own) == theirs


def test_a_bundled_description_goes_before_one_that_says_the_same() -> None:
    for model in MODELS:
        if model.template in TEMPLATES:
            assert find_format(model.source(), TEMPLATES[model.template]).name == model.family


def own(**call: Any) -> dict[str, Any]:
    return {"start_anchor": "x", "fields": {"tool_calls": {"repeats": True, "content": "json", **call}, "content": {}}}


def test_a_models_own_way_is_followed() -> None:
    template = own(
        open="<<", close=">>", transform={"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.with}"}}
    )
    format_ = find_format("{{ tools }}", template)
    assert (format_.name, format_.knows_tools) == ("response_template", True)
    text = 'So. <<{"tool": "now", "with": {"a": 1}}>>'
    assert read([text], format_, SCHEMAS) == [Content("So."), CallBegun(0, "now"), CallArguments(0, '{"a": 1}')]
    form = calls_grammar(format_, SCHEMAS, BranchChoice.REQUIRED, parallel=True, token_id=lambda _: None)
    assert form
    assert '"<<{\\"tool\\": \\""' in form.text


def test_an_expression_of_texts_blanks_and_names_is_translated() -> None:
    found = from_response_template(own(open_pattern=r"\s*\[call\]\s*(?P<name>[\w.-]+)\s*\(", close_pattern=r"\)\s*"))
    assert found
    (way,) = found.calls
    assert (way.body, way.begin, way.open, way.head_end, way.close) == (Body.JSON, (), ("[call]",), ("(",), (")",))
    assert read(['[call] now ( {"a": 1} ) .'], found, SCHEMAS) == [CallBegun(0, "now"), CallArguments(0, '{"a": 1}'), Content(".")]


@pytest.mark.parametrize(
    "call",
    [
        {"open_pattern": r"(a+)+<", "close": ">"},
        {"open_pattern": r"<call|<tool", "close": ">"},
        {"open_pattern": r"<call(?=x)", "close": ">"},
        {"open": "<", "close_pattern": r"(?:>|$)"},
        {"open": "", "close": ">"},
        {"open": "<", "close": 5},
        {"open": ["<"] * 99, "close": ">"},
        {"open": "<" * 101, "close": ">"},
        {"open": "<", "close": ">", "content": "kv-lines"},
        {"open": "<", "close": ">", "content": "xml-inline", "content_args": {"tag_pattern": "(?P<key>.*)=(?P<value>.*)"}},
        {"open_pattern": r"<(?P<name>\w+)>(?P<more>\w+)", "close": ">"},
        {"open_pattern": ["<"], "close": ">"},
    ],
)
def test_what_no_description_says_is_not_translated(call: dict[str, Any]) -> None:
    assert from_response_template(own(**call)) is None
    assert find_format("{{ tools }}<tool_call>", own(**call)).name == "hermes"


@pytest.mark.parametrize(
    "template", [{}, {"fields": 3}, {"fields": {"tool_calls": 3}}, {"fields": {"content": {}}}, {"fields": {"tool_calls": {}}}]
)
def test_a_damaged_template_changes_nothing(template: dict[str, Any]) -> None:
    assert find_format("{{ tools }}<tool_call>", template).name == "hermes"
