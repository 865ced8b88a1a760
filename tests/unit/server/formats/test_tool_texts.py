"""Texts of tool calls that are cut, or lack a mark, or hold the marks themselves: nothing is lost, and no call is finished that was cut.

By default a sample of the cuts is tried, drawn with a seed; with PACELINE_TEST_ALL=1 all of them are.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.fakes.scripted_inference import ByteTokenizer
from tests.unit.server.formats.reading import read
from tests.unit.server.formats.test_families import FORMATS

from paceline.cli import models
from paceline.core.inference import ServedModel
from paceline.server.formats.cursor import PLAIN, SPECIAL
from paceline.server.formats.find import find_format
from paceline.server.formats.format import Body, CallArguments, CallBegun, Calls, Content, Format, Part, Reasoning, Written
from paceline.server.formats.reader import AnswerReader
from paceline.server.tools import ModelFormats
from paceline.store import tokenizer_files
from paceline.store.catalog import LocalModel

ALL = "PACELINE_TEST_ALL" in os.environ
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "mode": {"type": "integer"}, "text": {"type": "string"}},
    "required": ["path", "mode", "text"],
}
TOOLS: dict[str, Any] = {"write_file": SCHEMA, "now": {"type": "object", "properties": {}}}
VALUES = {"path": "a b.py", "mode": 7, "text": "one\ntwo <b> & 'c, d'"}


def arguments_of(way: Calls, written: Written, values: dict[str, Any]) -> str:
    """The arguments of a call, as a model writes them."""
    match way.body:
        case Body.OBJECT | Body.JSON:
            return json.dumps(values)
        case Body.LAX:
            quoted = (
                f"{key}:{f'{way.delimiter}{value}{way.delimiter}' if isinstance(value, str) else value}" for key, value in values.items()
            )
            return "{" + ",".join(quoted) + "}"
        case Body.PYTHON:
            return ", ".join(f"{key}={value!r}" for key, value in values.items())
        case Body.PARAMETERS:
            one = written.parameter
            return "".join(
                one.replace("{string}", str(isinstance(value, str)).lower()).replace("{key}", key).replace("{value}", str(value))
                for key, value in values.items()
            )


def written_calls(format_: Format, calls: Iterable[tuple[str, dict[str, Any]]]) -> str:
    way = next(way for way in format_.calls if way.written)
    written = way.written
    assert written
    texts = [
        written.call.replace("{name}", name).replace("{index}", "0").replace("{arguments}", arguments_of(way, written, values))
        for name, values in calls
    ]
    return written.begin + (written.between or "\n").join(texts) + written.end


def read_calls(parts: Iterable[Part]) -> list[tuple[str, str]]:
    """The calls of an answer: name and arguments."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case CallBegun(_, name):
                calls.append((name, ""))
            case CallArguments(index, text):
                calls[index] = (calls[index][0], calls[index][1] + text)
            case _:
                pass
    return calls


def finished(format_: Format, text: str, *, is_cut: bool = False) -> list[tuple[str, Any]]:
    """The calls that are whole. Arguments are JSON if and only if they are whole."""
    reader = AnswerReader(format_, TOOLS)
    parts = reader.feed(text) + reader.end(is_cut=is_cut)
    whole = {part.index for part in parts if isinstance(part, CallArguments) and not part.is_open}
    found: list[tuple[str, Any]] = []
    for index, (name, arguments) in enumerate(read_calls(parts)):
        try:
            values = json.loads(arguments)
        except ValueError:
            assert index not in whole, (text, arguments)
        else:
            assert index in whole, (text, arguments)
            found.append((name, values))
    return found


def marks_of(format_: Format) -> list[str]:
    way = next(way for way in format_.calls if way.written)
    tags = way.parameters
    found = [*way.begin, *way.end, *way.open, *way.head_end, *way.close]
    found += [*tags.open, *tags.key_end, *tags.close] if tags else []
    found += format_.header.marks if format_.header else []
    return [mark for mark in dict.fromkeys(found) if mark.strip()]


def cuts(text: str) -> list[int]:
    places = range(len(text) + 1)
    return list(places) if ALL else random.Random(text).sample(places, min(len(places), 8))


@pytest.mark.parametrize("family", FORMATS)
def test_a_call_whole_cut_anywhere_and_with_each_mark_missing_once(family: str) -> None:
    format_ = FORMATS[family]
    calls = [("write_file", VALUES), ("now", {})]
    text = written_calls(format_, calls)
    whole = read([text], format_, TOOLS)
    assert [(name, json.loads(arguments)) for name, arguments in read_calls(whole)] == calls
    assert not [part for part in whole if isinstance(part, Content | Reasoning)]
    for cut in cuts(text):
        assert read([text[:cut], text[cut:]], format_, TOOLS) == whole
        assert all(call in calls for call in finished(format_, text[:cut], is_cut=True)), text[:cut]
    for mark in marks_of(format_):
        at = -1
        while (at := text.find(mark, at + 1)) >= 0:
            lacking = text[:at] + text[at + len(mark) :]
            parts = read([lacking], format_, TOOLS)
            half = len(lacking) // 2
            assert read(lacking if ALL else [lacking[:half], lacking[half:]], format_, TOOLS) == parts
            said = "".join(part.text if not isinstance(part, CallBegun) else part.name for part in parts)
            for word in ("a b.py", "two", "now"):
                assert word in said, (mark, lacking, parts)
            good = sum(VALUES.get(key) == value for _, values in finished(format_, lacking) for key, value in values.items())
            if good and way_of(format_).body is Body.PARAMETERS:
                assert good >= len(VALUES) - 1, (mark, lacking, parts)
            for cut in cuts(lacking)[:: 1 if ALL else 4]:
                finished(format_, lacking[:cut], is_cut=True)


def way_of(format_: Format) -> Calls:
    return next(way for way in format_.calls if way.written)


def has_end_within(value: str, marks: tuple[str, ...]) -> bool:
    """Return whether other text follows a closing mark: that reads as a call, and text behind it."""
    kept = value
    while kept.endswith(marks):
        kept = next(kept.removesuffix(mark) for mark in marks if kept.endswith(mark))
    return any(mark in kept for mark in marks)


TAGGED = [name for name, format_ in FORMATS.items() if way_of(format_).body is Body.PARAMETERS]


@settings(max_examples=400 if ALL else 15, deadline=None)
@given(st.data())
@pytest.mark.parametrize("family", TAGGED)
def test_a_value_made_of_the_marks_comes_back(family: str, data: st.DataObject) -> None:
    format_ = FORMATS[family]
    way = way_of(format_)
    tags = way.parameters
    assert tags
    pieces = st.sampled_from([*marks_of(format_), *tags.close, *way.close, "\n", " ", "x", "<", "}", '"', "\\"])
    value = "".join(data.draw(st.lists(pieces, max_size=6)))
    calls = [("write_file", {"path": value, "mode": 7, "text": "b"}), ("now", {})]
    # A value that ends a call, or begins an argument, and then goes on as a call does means two things.
    assume(not (value.startswith("\n") and not tags.pad))
    closing = any(close in value for close in tags.close)
    ending = any(end in value for end in (*way.close, *way.end))
    assume(not (closing or ending) or not any(mark in value for mark in (*tags.open, *way.open, *way.begin)))
    assume(not ending or not has_end_within(value, (*way.close, *way.end, *tags.close)))
    text = written_calls(format_, calls)
    assert [(name, json.loads(arguments)) for name, arguments in read_calls(read([text], format_, TOOLS))] == calls
    assert read(text, format_, TOOLS) == read([text], format_, TOOLS)
    for cut in cuts(text):
        for _, values in finished(format_, text[:cut], is_cut=True):
            assert values in [values for _, values in calls] or closing


def spelled(*marks: str) -> Format:
    return find_format("{% if tools %}" + "".join(marks))


HARMONY, QWEN, SEED, GLM, MINIMAX = (FORMATS[name] for name in ("harmony", "qwen_xml", "seed", "glm", "minimax"))
NOW = [CallBegun(0, "now"), CallArguments(0, "{}")]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}<|call|>", NOW),
        ("<|channel|>commentary to=functions.now<|message|>{}<|call|>", NOW),
        (" to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}", NOW),
        (" to=functions.now<|channel|>analysis json<|message|>{}", NOW),
        ("<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}", NOW),
        ("<|channel|>commentary to=now<|message|>{}", NOW),
        ("<|channel|>commentary to=functions.now<|message|><|call|>", NOW),
        ("commentary to=functions.now <|constrain|>json<|message|>{}", NOW),
        ("<|channel|>commentary to=functions.now <|constrain|>json{}", NOW),
        ("<|channel|>final <|constrain|>json<|message|>{}", [Content("{}")]),
        ("<|channel|>commentary to=assistant<|message|>So.", [Content("So.")]),
        ("<|channel|>commentary to=python<|message|>1 + 1", [Content("1 + 1")]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|end|>", [Reasoning("1 + 1")]),
        ("<|start|>assistant<|message|>So.", [Content("So.")]),
        ("So.", [Content("So.")]),
        ("final answer: <b>", [Content("final answer: <b>")]),
        ("<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>So.<|return|>", [Reasoning("Hm."), Content("So.")]),
        ("<|channel|>analysis<|message|>Hm.<|end|>assistant<|channel|>final<|message|>So.", [Reasoning("Hm."), Content("So.")]),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistantfinal<|message|>So.", [Reasoning("Hm."), Content("So.")]),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", [Reasoning("Hm.")]),
        ("<|channel|>comm", []),
        (f"<|channel|>commentary to=functions.now{SPECIAL}<|other|>{PLAIN}json<|message|>{{}}", NOW),
    ],
)
def test_heads_of_messages(text: str, parts: list[Part]) -> None:
    assert read([text], HARMONY, TOOLS, special=HARMONY.skipped) == parts
    assert read(text, HARMONY, TOOLS, special=HARMONY.skipped) == parts


XML = "<tool_call>\n<function=write_file>\n{}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("format_", "text", "arguments"),
    [
        (QWEN, XML.format("<parameter=text>\none </parameter> two\n</parameter>\n"), '{"text": "one </parameter> two"}'),
        (QWEN, XML.format("<parameter=text>\n</parameter>\n</parameter>\n"), '{"text": "</parameter>"}'),
        (QWEN, XML.format("<parameter=text>\n</function>\n</tool_call>\n</parameter>\n"), '{"text": "</function>\\n</tool_call>"}'),
        (QWEN, XML.format("<parameter=text>\n<parameter=bold>\nx\n</parameter>\n"), '{"text": "<parameter=bold>\\nx"}'),
        (QWEN, XML.format("<parameter=mode>\n7\n"), '{"mode": 7}'),
        (QWEN, XML.format("<parameter=mode>\n7\n\n<parameter=path>\na\n</parameter>\n"), '{"mode": 7, "path": "a"}'),
        (QWEN, XML.format("<parameter=text>\na</parameter>\n<parameter=mode>\n7\n</parameter>\n"), '{"text": "a", "mode": 7}'),
        (SEED, "<seed:tool_call><function=write_file><parameter=text>two\nlines\n</parameter></function>", '{"text": "two\\nlines\\n"}'),
        (GLM, "<tool_call>write_file\n<arg_key>mode</arg_key>\n<arg_value>7\n</tool_call>", '{"mode": 7}'),
        (GLM, "<tool_call>write_file<arg_key>mode</arg_key><arg_value>7<arg_key>path</arg_key><arg_value>a", '{"mode": 7, "path": "a'),
        (MINIMAX, '<invoke name="write_file"><parameter name="text">a</b></parameter></invoke>', '{"text": "a</b>"}'),
    ],
)
def test_where_a_tagged_value_ends(format_: Format, text: str, arguments: str) -> None:
    for pieces in ([text], text):
        assert [called for _, called in read_calls(read(pieces, format_, TOOLS))] == [arguments]


KIMI, GEMMA, DSML = FORMATS["kimi"], FORMATS["gemma4"], FORMATS["deepseek_v32"]
HERMES = spelled("<tool_call>")
SECTION = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"]
TAGS = ["<tool_call>", "</tool_call>"]


@pytest.mark.parametrize(
    ("format_", "special", "text", "parts"),
    [
        (KIMI, SECTION, "So. <|tool_calls_section_begin|><|tool_calls_section_end|>", [Content("So. ")]),
        (KIMI, SECTION, "<|tool_calls_section_begin|>hm<|tool_calls_section_end|>", [Content("hm")]),
        (GEMMA, ["<|tool_call>", "<tool_call|>"], "<|tool_call>call:now{}<tool_call|><tool_call|>", NOW),
        (GEMMA, ["<|channel>", "<channel|>"], "So.<channel|>", [Content("So.")]),
        (GEMMA, ["<|channel>", "<channel|>"], "<|channel>thought<channel|>So.", [Content("So.")]),
        (GEMMA, [], "<|tool_call>call:now{two words:1}<tool_call|>", [CallBegun(0, "now"), CallArguments(0, '{"two words":1}')]),
        (DSML, ["｜DSML｜"], '<｜DSML｜tool_calls><｜DSML｜invoke name="now"/></｜DSML｜tool_calls>', NOW),
        (HERMES, TAGS, "<tool_call>", []),
        (HERMES, [], "<tool_call>", [Content("<tool_call>")]),
        (HERMES, TAGS, '<think>Hm. <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [Reasoning("Hm."), *NOW]),
        (HERMES, [], '<think>Hm. <tool_call>\n{"name": "now"', [Reasoning('Hm. <tool_call>\n{"name": "now"')]),
        (GLM, TAGS, "<think>Hm.<tool_call>now\n</tool_call>", [Reasoning("Hm."), *NOW]),
        (HERMES, TAGS, f"So{SPECIAL}<|other|>{PLAIN} it is.", [Content("So it is.")]),
        (HERMES, [], f'<tool_call>{{"name": "now{SPECIAL}<|x|>{PLAIN}", "arguments": {{}}}}', NOW),
        (
            HERMES,
            [],
            f'<tool_call>{{"name": "now", "arguments": {{"a": "{SPECIAL}<|x|>{PLAIN}"}}}}</tool_call>',
            [CallBegun(0, "now"), CallArguments(0, '{"a": "<|x|>"}')],
        ),
    ],
)
def test_marks_that_are_special_tokens(format_: Format, special: list[str], text: str, parts: list[Part]) -> None:
    assert read([text], format_, TOOLS, special=special) == parts


@pytest.mark.parametrize("text", ["<", "<tool_call>", '<tool_call>\n{"name": "no'])
def test_an_answer_that_had_to_be_a_call_shows_nothing_of_one_that_was_cut(text: str) -> None:
    reader = AnswerReader(HERMES, TOOLS, required=True)
    assert reader.feed(text) + reader.end(is_cut=True) == []


@pytest.mark.parametrize("mark", ["<|START_ACTION|>", "[TOOL_REQUEST]", ""])
def test_a_template_whose_calls_no_reader_knows_counts_as_one_without_tools(mark: str) -> None:
    format_ = find_format("{% if tools %}{{ tools }}{% endif %}{% for call in message.tool_calls %}{{ '" + mark + "' }}{% endfor %}")
    assert (format_.name, format_.knows_tools, format_.unread) == ("hermes", False, mark)
    assert mark in (format_.why_unread or "")


@pytest.mark.parametrize(("mark", "is_said"), [("<|START_ACTION|>", True), ("[TOOL_REQUEST]", True), ("<tool_call>", False)])
def test_the_log_and_the_list_of_models_name_the_mark_of_calls_that_no_reader_knows(
    mark: str, is_said: bool, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% if tools %}{{ tools }}{% endif %}{% for call in message.tool_calls %}{{ '" + mark + "' }}{% endfor %}"
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(ByteTokenizer, "chat_template", template)
    formats, served = ModelFormats(), ServedModel("speaker", created=0, max_context=9, tokenizer=tokenizer, fingerprint="f")
    for _ in range(2):
        formats.of(served)
    assert [(mark in record.getMessage(), "speaker" in record.getMessage()) for record in caplog.records] == [(True, True)] * is_said, (
        "once"
    )
    listed = LocalModel("speaker", Path("speaker.gguf"), 1, "GGUF", "llama", 9, None)
    monkeypatch.setattr(models, "list_models", lambda home: [listed])
    monkeypatch.setattr(models, "list_parts", lambda home: [])
    monkeypatch.setattr(tokenizer_files, "template_text", lambda path: template)
    models.run_models(as_json=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("speaker: ")]
    assert [mark in line for line in lines] == [True] * is_said
