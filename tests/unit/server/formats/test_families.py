"""What a model's own chat template writes for an assistant's turn is read back as that turn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.server.formats.reading import read

from paceline.server.formats.find import find_format
from paceline.server.formats.format import CallArguments, CallBegun, Content, Format, Part, Reasoning
from paceline.server.formats.reader import AnswerReader
from paceline.store.chats import ChatTemplate

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"


@dataclass(frozen=True)
class Model:
    """A template, and where an assistant's turn begins and ends in what it renders."""

    template: str
    family: str
    header: str
    eos: str
    several: bool = True
    """Its template renders several calls in one turn."""
    content: bool = True
    """It renders content beside calls."""
    tools: bool = True
    """It can be given them; it renders calls without."""
    reasoning: str | None = None
    """Under what key it takes reasoning."""

    def format(self) -> Format:
        return find_format(self.source())

    def source(self) -> str:
        folder = TEMPLATES if (TEMPLATES / f"{self.template}.jinja").exists() else TEMPLATES / "more"
        return (folder / f"{self.template}.jinja").read_text("utf-8")

    def turn(self, message: dict[str, Any], **variables: Any) -> str:
        """What the model would have written to make this turn."""
        template = ChatTemplate(Path(self.template), self.source(), {})._compiled
        tools = [
            {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}} for name, schema in SCHEMAS.items()
        ]
        messages = [{"role": "user", "content": "Hello."}, message]
        text = template.render(
            messages=messages,
            tools=tools if self.tools else None,
            add_generation_prompt=False,
            bos_token="<bos>",
            eos_token=self.eos,
            strftime_now=datetime.now(UTC).strftime,
            **variables,
        )
        answer = text.rpartition(self.header)[2]
        return answer.rpartition(self.eos)[0] if self.eos else answer


CHATML = ("<|im_start|>assistant\n", "<|im_end|>")
LLAMA = ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")
DEEPSEEK = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")
MODELS = [
    Model("Qwen-Qwen2.5-7B-Instruct", "hermes", *CHATML),
    Model("Qwen-Qwen3-0.6B", "hermes", *CHATML, reasoning="reasoning_content"),
    Model("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", *CHATML, content=False),
    Model("ibm-granite-granite-4.0", "hermes", "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>"),
    Model("Qwen3-Coder", "qwen_xml", *CHATML),
    Model("Qwen3.5-4B", "qwen_xml", *CHATML, reasoning="reasoning_content"),
    Model("meta-llama-Llama-3.1-8B-Instruct", "llama", *LLAMA, several=False, content=False),
    Model("meta-llama-Llama-3.2-3B-Instruct", "llama", *LLAMA, several=False, content=False),
    Model("mistralai-Mistral-Nemo-Instruct-2407", "mistral_list", "[/INST]", "</s>", content=False),
    Model("Mistral-Small-3.2-24B-Instruct-2506", "mistral", "[/INST]", "</s>", content=False),
    Model("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "[/INST]", "</s>"),
    Model("openai-gpt-oss-120b", "harmony", "<|end|><|start|>assistant", "<|call|>", several=False, content=False),
    Model("google-gemma-4-31B-it", "gemma4", "<|turn>model\n", "<|tool_response>", content=False, reasoning="reasoning_content"),
    Model("GLM-4.6", "glm", "<|assistant|>", "", reasoning="reasoning_content"),
    Model("GLM-4.7-Flash", "glm", "<|assistant|>", "", reasoning="reasoning_content"),
    Model("llama-cpp-deepseek-r1", "deepseek", *DEEPSEEK, content=False, tools=False),
    Model("deepseek-ai-DeepSeek-V3.1", "deepseek_v31", *DEEPSEEK),
    Model("deepseek-ai-DeepSeek-V3.2", "deepseek_v32", *DEEPSEEK, reasoning="reasoning_content"),
    Model("deepseek-ai-DeepSeek-V4", "deepseek_v32", *DEEPSEEK, reasoning="reasoning_content"),
    Model("moonshotai-Kimi-K2", "kimi", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    Model("MiniMax-M2", "minimax", "]~b]ai\n", "[e~[", reasoning="reasoning_content"),
]
SCHEMAS: dict[str, Any] = {
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"type": "integer"},
            "ratio": {"type": "number"},
            "append": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object"},
            "zip": {"type": "string"},
        },
        "required": ["path"],
    },
    "now": {"type": "object", "properties": {}},
}
WRITE = {
    "path": "a b.py",
    "text": "def f():\n    return \"<b>&\\n\" + '{x}'  # ünïcode 🙂\n\n",
    "mode": 420,
    "ratio": -0.5,
    "append": False,
    "tags": ["x", 'y, "z"'],
    "more": {"k": {"n": [1, 2.5, True, "s"]}, "e": {}},
    "zip": "01234",
}
CASES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one": [("write_file", WRITE)],
    "simple": [("write_file", {"path": "x"})],
    "no arguments": [("now", {})],
    "two": [("write_file", {"path": "]", "append": True}), ("now", {})],
}


def message(calls: list[tuple[str, dict[str, Any]]], content: str = "", **fields: Any) -> dict[str, Any]:
    tool_calls = [
        {"id": f"{i:09}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls, **fields}


def check(model: Model, text: str, calls: list[tuple[str, dict[str, Any]]], content: str = "", reasoning: str = "") -> None:
    format_ = model.format()
    parts = read([text], format_, tools=SCHEMAS)
    shown = f"{text!r} was read as {parts}"
    begun = [(part.index, part.name) for part in parts if isinstance(part, CallBegun)]
    assert begun == [(i, name) for i, (name, _) in enumerate(calls)], shown
    arguments = ["".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == i) for i in range(len(calls))]
    assert [json.loads(each) for each in arguments] == [arguments for _, arguments in calls], shown
    assert "".join(part.text for part in parts if isinstance(part, Content)) == content, shown
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == reasoning, shown
    assert read(text, format_, tools=SCHEMAS) == parts
    for cut in range(1, len(text), 1 + len(text) // 50):
        assert read([text[:cut], text[cut:]], format_, tools=SCHEMAS) == parts


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.template)
class TestRoundTrip:
    def test_its_template_says_which_family_it_is(self, model: Model) -> None:
        assert model.format().name == model.family

    @pytest.mark.parametrize("case", CASES)
    def test_calls(self, model: Model, case: str) -> None:
        calls = CASES[case]
        for each in [calls] if model.several else [[call] for call in calls]:
            check(model, model.turn(message(each)), each)

    def test_content_before_calls(self, model: Model) -> None:
        if model.content:
            calls = CASES["two"] if model.several else CASES["simple"]
            check(model, model.turn(message(calls, "I look <there>.")), calls, "I look <there>.")

    def test_reasoning_before_calls(self, model: Model) -> None:
        if model.reasoning:
            calls, thought = CASES["two"], "Where is\nit?"
            text = model.turn(message(calls, **{model.reasoning: thought}), thinking=True)
            check(model, text, calls, reasoning=thought)


def spelled(*marks: str) -> Format:
    """The format of a template that has these marks."""
    return find_format("{% if tools %}" + "".join(marks))


HARMONY = spelled("<|channel|>", "<|message|>")
SPOKEN: list[tuple[Format, str, list[Part]]] = [
    (
        HARMONY,
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
        ),
        [Reasoning("Hm."), Content("I look."), CallBegun(0, "now"), CallArguments(0, "{}")],
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.",
        [Reasoning("Hm."), Content("So.")],
    ),
    (HARMONY, " to=functions.now<|channel|>commentary json<|message|>{}", [CallBegun(0, "now"), CallArguments(0, "{}")]),
    (
        HARMONY,
        "<|channel|>analysis to=python code<|message|>1<|call|>",
        [Reasoning("1")],
    ),
    (
        spelled("<start_function_call>"),
        "<start_function_call>call:write_file{path:<escape>a{b}<escape>,mode:1,tags:[<escape>x<escape>],append:true}<end_function_call>",
        [CallBegun(0, "write_file"), CallArguments(0, '{"path":"a{b}","mode":1,"tags":["x"],"append":true}')],
    ),
    (
        spelled("<|tool_call>", "call:"),
        '<|tool_call>call:now{a:b c,d:1.5,e:{f:null},g:[],"h":"i",j:12:30}<tool_call|><|channel>thought\nHm.<channel|>Done.',
        [
            CallBegun(0, "now"),
            CallArguments(0, '{"a":"b c","d":1.5,"e":{"f":null},"g":[],"h":"i","j":"12:30"}'),
            Reasoning("Hm."),
            Content("Done."),
        ],
    ),
    (
        spelled("<|tool_call|>"),
        'I look. <|tool_call|>[{"name": "now", "arguments": {}}, {"arguments": {}, "name": "now"}]',
        [Content("I look."), CallBegun(0, "now"), CallArguments(0, "{}"), CallBegun(1, "now"), CallArguments(1, "{}")],
    ),
    (
        spelled("<|tool_call_argument_begin|>"),
        (
            "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ),
        [Reasoning("Hm."), CallBegun(0, "now"), CallArguments(0, "{}")],
    ),
    (
        spelled("<function=", "<parameter="),
        "Look: <function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=mode>7</parameter></function>\n</tool_call>",
        [Content("Look:"), CallBegun(0, "write_file"), CallArguments(0, '{"path": "a", "mode": 7}')],
    ),
    (
        spelled("<function=", "<parameter="),
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> Write `<function=now>` so.',
        [CallBegun(0, "now"), CallArguments(0, "{}"), Content("Write `<function=now>` so.")],
    ),
    (
        spelled("<function=", "<parameter="),
        "<function=write_file><parameter=path>a</parameter><parameter=mode>high</parameter><parameter=append>yes, ",
        [CallBegun(0, "write_file"), CallArguments(0, '{"path": "a", "mode": "high", "append": yes, ')],
    ),
    (
        spelled("<|python_tag|>"),
        '<|python_tag|>{"name": "now", "parameters": {}}; {"type": "function", "name": "now", "parameters": {"a": 1}}',
        [CallBegun(0, "now"), CallArguments(0, "{}"), CallBegun(1, "now"), CallArguments(1, '{"a": 1}')],
    ),
    (spelled("<|python_tag|>"), '{"name": "Ann", "parameters": {}}', [Content('{"name": "Ann", "parameters": {}}')]),
    (spelled("<|python_tag|>"), '{"answer": [1]}\n', [Content('{"answer": [1]}\n')]),
    (spelled("<|python_tag|>"), 'So: {"name": "now", "parameters": {}}', [Content('So: {"name": "now", "parameters": {}}')]),
    (spelled("[ARGS]"), "[THINK]Hm.[/THINK]A [b] c", [Reasoning("Hm."), Content("A [b] c")]),
    (spelled("[ARGS]"), '[TOOL_CALLS][{"name": "now", "arguments": {}}]', [CallBegun(0, "now"), CallArguments(0, "{}")]),
    (
        spelled("<seed:tool_call>"),
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=write_file>\n<parameter=path>a</parameter>\n</function>\n</seed:tool_call>",
        [Reasoning("Hm."), CallBegun(0, "write_file"), CallArguments(0, '{"path": "a"}')],
    ),
    (
        spelled("<TOOLCALL>"),
        '<TOOLCALL>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": 1}}]</TOOLCALL>',
        [CallBegun(0, "now"), CallArguments(0, "{}"), CallBegun(1, "now"), CallArguments(1, '{"a": 1}')],
    ),
    (
        spelled("<tool_calls>"),
        '<tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {"a": 1}}\n</tool_calls>',
        [CallBegun(0, "now"), CallArguments(0, "{}"), CallBegun(1, "now"), CallArguments(1, '{"a": 1}')],
    ),
    (spelled("[ARGS]"), "[TOOL_CALLS]now{}", [CallBegun(0, "now"), CallArguments(0, "{}")]),
    (
        spelled("[func_name1(params_name1"),
        "[write_file(path='it\\'s', text=\"a\\n'b'\", tags=['x', 'y',], append=True, more={'k': None, 1: (2, 3)}), now()]",
        [
            CallBegun(0, "write_file"),
            CallArguments(
                0, '{"path": "it\'s", "text": "a\\n\'b\'", "tags": ["x", "y"], "append": true, "more": {"k": null, "1": [2, 3]}}'
            ),
            CallBegun(1, "now"),
            CallArguments(1, "{}"),
        ],
    ),
    (spelled("[func_name1(params_name1"), "[1] says f(x)", [Content("[1] says f(x)")]),
    (
        spelled("<|header_start|>", "<|header_end|>"),
        "<|python_start|>[now(), write_file('a b', mode = 7)]<|python_end|>",
        [CallBegun(0, "now"), CallArguments(0, "{}"), CallBegun(1, "write_file"), CallArguments(1, '{"path": "a b", "mode": 7}')],
    ),
    (
        spelled("<|header_start|>", "<|header_end|>"),
        '{"name": "now", "parameters": {}}',
        [CallBegun(0, "now"), CallArguments(0, "{}")],
    ),
    (
        spelled("<|tool_call_start|>"),
        "<|tool_call_start|>[write_file(path='it's', text='a, b')]<|tool_call_end|>So.",
        [CallBegun(0, "write_file"), CallArguments(0, '{"path": "it\'s", "text": "a, b"}'), Content("So.")],
    ),
    (
        spelled("<|tool_call_start|>"),
        '<|tool_call_start|>[{"name": "now", "arguments": {}, "id": "1"}]<|tool_call_end|>',
        [CallBegun(0, "now"), CallArguments(0, "{}")],
    ),
    (
        spelled("<function_calls>"),
        'I look. <function_calls>\nnow()\nwrite_file(path="a", append=false, more=null)\n</function_calls>',
        [
            Content("I look."),
            CallBegun(0, "now"),
            CallArguments(0, "{}"),
            CallBegun(1, "write_file"),
            CallArguments(1, '{"path": "a", "append": false, "more": null}'),
        ],
    ),
    (
        spelled("｜DSML｜", " invoke name="),
        (
            '<｜DSML｜ calls>\n<｜DSML｜ invoke name="write_file">\n<｜DSML｜ parameter name="path" string="true">a</｜DSML｜ parameter>\n'
            '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="now"/>\n</｜DSML｜ calls>'
        ),
        [CallBegun(0, "write_file"), CallArguments(0, '{"path": "a"}'), CallBegun(1, "now"), CallArguments(1, "{}")],
    ),
]


@pytest.mark.parametrize(("format_", "text", "parts"), SPOKEN)
def test_what_families_write_beside_their_templates(format_: Format, text: str, parts: list[Part]) -> None:
    for pieces in ([text], text, *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        assert read(pieces, format_, SCHEMAS) == parts


FORMATS = {model.family: model.format() for model in MODELS} | {format_.name: format_ for format_, _, _ in SPOKEN}


def marks(format_: Format) -> list[str]:
    """All that means something in a format."""
    found = [*format_.skipped, *(format_.thinking.open + format_.thinking.close if format_.thinking else ())]
    for way in format_.calls:
        tags = way.parameters
        found += [*way.begin, *way.end, *way.open, *way.head_end, *way.close, *way.between, way.delimiter, *way.name_prefix]
        found += [*tags.open, *tags.key_end, *tags.close, tags.pad, tags.string] if tags else []
    return [*filter(None, found), "now", '{"name": "now", "arguments": {', "{", "}", '"', "\\", "\n", " ", "a", "1", ":"]


@settings(max_examples=15, deadline=None)
@given(st.data())
@pytest.mark.parametrize("family", FORMATS)
def test_no_text_breaks_a_reader_nor_is_lost(family: str, data: st.DataObject) -> None:
    format_ = FORMATS[family]
    pieces = data.draw(st.lists(st.sampled_from(marks(format_)), max_size=30))
    text = "".join(pieces)
    whole = read([text], format_, SCHEMAS)
    assert read(pieces, format_, SCHEMAS) == whole
    assert read(text, format_, SCHEMAS) == whole
    assert not any(isinstance(part, CallBegun | CallArguments) for part in read([text], format_, {}))
    if not any(isinstance(part, CallBegun) for part in whole):
        said = "".join(part.text for part in whole)
        said, text = without_marks(format_, said), without_marks(format_, text)
        assert "".join(said.split()) == "".join(text.split())


def without_marks(format_: Format, text: str) -> str:
    """A text without what marks reasoning and channels."""
    if format_.header:  # heads are not part of a text
        return ""
    for mark in sorted([*format_.skipped, *(format_.thinking.open + format_.thinking.close if format_.thinking else ())], key=len)[::-1]:
        text = text.replace(mark.strip(), "")
    return text


@pytest.mark.parametrize("family", FORMATS)
def test_a_call_cut_off_anywhere_loses_nothing_before_it(family: str) -> None:
    for format_, text, _ in SPOKEN:
        if format_.name == family:
            said = [read([text[:end]], format_, SCHEMAS) for end in range(len(text) + 1)]
            assert all(parts or not text[:end].strip() or not without_marks(format_, text[:end]).strip() for end, parts in enumerate(said))


@pytest.mark.parametrize("family", FORMATS)
def test_reading_takes_time_in_proportion_to_the_text(family: str) -> None:
    format_ = FORMATS[family]
    for mark in marks(format_):
        text = (mark[:-1] or mark) * (3000 // len(mark)) + mark * (3000 // len(mark))
        reader = AnswerReader(format_, SCHEMAS)
        reader.feed(text)
        reader.end()
        assert reader.looked < 60 * len(text)
