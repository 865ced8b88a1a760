"""Answers are read into the same parts however they are cut, and nothing that was written is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import examples
from tests.unit.server.formats.reading import read as read_as

from paceline.server.formats.find import find_format
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning
from paceline.server.formats.reader import AnswerReader

TOOLS: Mapping[str, Mapping[str, Any]] = {"look_up": {"type": "object", "properties": {"word": {"type": "string"}}}, "now": {}}
HERMES = find_format("{% if tools %}<tool_call>{% endif %}")


def read(pieces: Iterable[str], **fields: Any) -> list[Part]:
    return read_as(pieces, HERMES, **{"tools": TOOLS, **fields})


def call(arguments: str, index: int = 0, name: str = "look_up") -> list[Part]:
    return [CallBegun(index, name), CallArguments(index, arguments)]


ONE = '<tool_call>\n{"name": "look_up", "arguments": {"word": "a }\\" b"}}\n</tool_call>'
ARGUMENTS = '{"word": "a }\\" b"}'
SAMPLES: list[tuple[str, list[Part]]] = [
    ("", []),
    ("  plain  ", [Content("  plain  ")]),
    (ONE, call(ARGUMENTS)),
    (f"Let me see.\n\n{ONE}\n{ONE}\n", [Content("Let me see."), *call(ARGUMENTS), *call(ARGUMENTS, 1)]),
    (f"{ONE}\nThere.", [*call(ARGUMENTS), Content("There.")]),
    (f"<think>\nhm <tool_call>\n\n</think>\n\nSo: {ONE}", [Reasoning("hm <tool_call>"), Content("So:"), *call(ARGUMENTS)]),
    (f"<tool_call>\n{ONE}", [Content("<tool_call>\n"), *call(ARGUMENTS)]),
    ('<tool_call>{"name":"now"}</tool_call>', call("{}", name="now")),
    ('<tool_call>{"name":"now", "arguments": null}</tool_call>', call("{}", name="now")),
    ('<tool_call>{"arguments":{"a":[1,"]"]},"name":"now"}</tool_call>', call('{"a":[1,"]"]}', name="now")),
    ('<tool_call>{"name":"now","arguments":"{\\"a\\": 1}"}</tool_call>', call('{"a": 1}', name="now")),
    ('<tool_call>{"id":"x","name":"now","parameters":{},"more":[{}]}</tool_call>', call("{}", name="now")),
    ('<tool_call>{"name":"now","arguments":{}}{"name":"now","arguments":{}}', [*call("{}", name="now"), *call("{}", 1, "now")]),
    # What models get wrong, made right: line ends and backslashes in strings, a brace too few.
    ('<tool_call>{"name":"now","arguments":{"a":"\n\\d"}</tool_call>ok', [*call('{"a":"\\n\\\\d"}', name="now"), Content("ok")]),
    # A call that breaks off once it has begun.
    ('<tool_call>{"name":"now","arguments":{"a":"b', call('{"a":"b', name="now")),
    ('<tool_call>{"name":"now","arguments":{}, "id": 1, "b', [*call("{}", name="now"), Content(', "id": 1, "b')]),
    ('<tool_call>{"name":"now","arguments":{"a" <', [*call('{"a" ', name="now"), Content("<")]),
]
NO_CALLS = [
    "Write `<tool_call>` before and `</tool_call>` behind it.",
    '<tool_call>\n{"name": "other", "arguments": {"a": 1}}\n</tool_call>',
    '<tool_call>\n{"title": "look_up", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "look_up", "arguments": 5}\n</tool_call>',
    '<tool_call>\n{"name": "look_up", "arguments": ',
    '<tool_call> {"name": {"a": 1}}',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    "<tool_call></tool_call>",
    '```json\n{"name": "look_up", "arguments": {}}\n```\n',
    "a < b <tool <tool_call <tool_call>",
    "Closed </think> before it was open <think> ",
]


@pytest.mark.parametrize(("text", "parts"), SAMPLES)
def test_an_answer_is_read_the_same_however_it_is_cut(text: str, parts: list[Part]) -> None:
    assert read([text]) == parts
    assert read(text) == parts
    for cut in range(1, len(text)):
        assert read([text[:cut], text[cut:]]) == parts


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content(text: str) -> None:
    for pieces in ([text], text, *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        assert read(pieces) == [Content(text)]


def test_without_tools_a_call_is_content() -> None:
    assert read(f"Now. {ONE}\n", tools={}) == [Content(f"Now. {ONE}\n")]


def test_without_parallel_calls_later_ones_are_left_out() -> None:
    assert read(f"a {ONE} b {ONE}{ONE} c", parallel=False) == [Content("a"), *call(ARGUMENTS), Content(" b c")]


def test_an_answer_may_begin_in_reasoning() -> None:
    assert HERMES.begins_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert not HERMES.begins_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert read("hm\n</think>\n\nyes", in_reasoning=True) == [Reasoning("hm"), Content("yes")]
    assert read("<think>\nhm\n</think>\n\nyes", in_reasoning=True) == [Reasoning("hm"), Content("yes")]
    assert read("cut off ", in_reasoning=True) == [Reasoning("cut off ")]


def test_text_is_held_back_no_longer_than_it_may_become_a_call() -> None:
    reader = AnswerReader(HERMES, TOOLS)
    assert reader.feed("One <tool") == [Content("One")]
    assert reader.feed("box>") == [Content(" <toolbox>")]
    reader.feed('<tool_call>{"name": "now", "arguments": ')
    assert reader.feed('{"a') == [CallBegun(0, "now"), CallArguments(0, '{"a')]
    assert AnswerReader(HERMES, {"now": {}}).feed('<tool_call>{"name": "then"') == [Content('<tool_call>{"name": "then"')]


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name":', '"now"', ', "arguments":', "{", "}", '"', "\\", "\n", " a ", "<"]
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(PIECES | st.text(max_size=3), max_size=25), st.data())
def test_nothing_is_lost_and_no_cut_matters(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    whole = read([text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert read(text) == whole
    if not any(isinstance(part, CallBegun) for part in whole):
        said = "".join(part.text for part in whole)
        for mark in HERMES.thinking.open + HERMES.thinking.close:
            text, said = text.replace(mark, ""), said.replace(mark, "")
        assert "".join(said.split()) == "".join(text.split())


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "<tool_cal",
        "<",
        " ",
        '<tool_call>{"arguments":{"a":',
        "<tool_call>{",
        '<tool_call>{"name":"now","arguments":{"a":"\\',
        "{",
    ],
)
def test_reading_takes_time_in_proportion_to_the_text(unit: str) -> None:
    n = 30_000 // len(unit)
    for pieces in ([unit * n], [unit] * n):
        reader = AnswerReader(HERMES, TOOLS)
        for piece in pieces:
            reader.feed(piece)
        reader.end()
        assert reader.looked < 12 * n * len(unit)


def test_arguments_are_json() -> None:
    for text, parts in SAMPLES:
        for part in parts:
            if isinstance(part, CallArguments) and text.endswith("</tool_call>"):
                assert isinstance(json.loads(part.text), dict)
