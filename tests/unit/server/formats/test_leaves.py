"""Forms of calls that are not JSON follow a tool's schema as JSON does, or refuse the keyword with its path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
from tests.unit.engine.test_whole_forms import DIGITS
from tests.unit.server.formats.test_families import FORMATS

from paceline.core.errors import InvalidRequest
from paceline.core.generation import Grammar, GrammarKind
from paceline.engine.grammar import Grammars
from paceline.server import tools
from paceline.server.formats.grammar import BranchChoice, calls_grammar
from paceline.server.formats.leaves import Leaf, members
from paceline.server.formats.schema import followed_schema
from paceline.server.formats.text_grammar import FORMATS as TEXTS
from paceline.server.formats.text_grammar import in_regex

GRAMMARS = Grammars(DIGITS, tried=True)
AT = "tools[0].function.parameters"
CALLS = {
    "gemma4": ('<|tool_call>call:f{o:<|"|>', '<|"|>}<tool_call|>'),
    "qwen_xml": ("<tool_call>\n<function=f>\n<parameter=o>\n", "\n</parameter>\n</function>\n</tool_call>"),
    "pythonic": ('[f(o="', '")]'),
}


def form(family: str, schema: dict[str, Any]) -> Grammar:
    tool = {"$comment": AT, **followed_schema({"type": "object", "properties": {"o": schema}, "required": ["o"]}, AT)}
    found = calls_grammar(FORMATS[family], {"f": tool}, BranchChoice.REQUIRED, parallel=False, token_id=lambda _: None)
    assert found
    return found


def allows(grammar: Grammar, text: str) -> bool:
    matcher, tokens = GRAMMARS.matcher(grammar), DIGITS.encode(text)
    if matcher.mask(tokens) is None:
        return False
    for token in tokens:
        matcher.take(token)
    return matcher.is_accepting


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize(
    ("schema", "text", "other"),
    [
        ({"type": "string", "pattern": "^a+$"}, "aa", "zz"),
        ({"type": "string", "format": "date"}, "2026-02-03", "zzz"),
        ({"type": "string", "maxLength": 3, "pattern": "^a"}, "abc", "abcd"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 2}, "ab", "abc"),
        ({"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^a"}]}, "ab", "a"),
        ({"pattern": "^a$"}, "a", "b"),
    ],
)
def test_a_string_follows_all_that_its_schema_says(family: str, schema: dict[str, Any], text: str, other: str) -> None:
    begin, end = CALLS[family]
    grammar = form(family, schema)
    assert allows(grammar, begin + text + end)
    assert not allows(grammar, begin + other + end)


@pytest.mark.parametrize("family", ["gemma4", "functiongemma", "qwen_xml", "glm", "pythonic", "olmo3", "hermes"])
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "minProperties"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"type": "array", "items": {"type": "string", "pattern": "("}}, "items.pattern"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties"),
    ],
)
def test_a_refusal_names_the_path_in_every_form_of_calls(family: str, schema: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        GRAMMARS.prepare(form(family, schema))
    assert refused.value.field == f"{AT}.properties.o.{path}"


EXAMPLES = {
    "date": ["2026-01-31"],
    "time": ["23:59:59Z", "00:00:00.5+02:00"],
    "date-time": ["2026-04-30T10:00:00Z"],
    "duration": ["P3W", "P1Y2M3DT4H5M6S", "PT5M"],
    "email": ["a.b+c@example.org"],
    "hostname": ["a-b.example.org"],
    "ipv4": ["192.168.0.255"],
    "ipv6": ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    "uri": ["https://example.org:80/a/b?c=d#e", "urn:a:b", "mailto:a@b.org"],
}
NEAR = [
    *(text for texts in EXAMPLES.values() for text in texts),
    "",
    "2026-13-01",
    "2026-02-30",
    "24:00:00Z",
    "P",
    "PT",
    "a@",
    "-a",
    "256.1.1.1",
    "1::2::3",
    "1:2:3:4:5:6:7:8::",
    "a b",
    ":",
]


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_a_format_are_of_it(name: str) -> None:
    is_of = jsonschema_rs.validator_for({"format": name}, validate_formats=True).is_valid
    grammar = Grammar(GrammarKind.LARK, f"start: /{in_regex(TEXTS[name])}/")
    taken = {text for text in NEAR if allows(grammar, text)}
    assert taken >= {*EXAMPLES[name]}
    assert all(map(is_of, taken)), taken


@pytest.mark.parametrize(
    ("regex", "taken", "refused"),
    [
        (r"\d{2}", "12", "١٢"),
        (r"[\d.]{2}", "1.", "١."),
        (r"[\d-]{2}", "1-", "١-"),
        (r"[^\d]", "a", "1"),
        (r"[^\d]", "a", "١"),
        (r"\D", "a", "1"),
        (r"\\d", "\\d", "1"),
        (r"[\\d]", "d", "1"),
        (r"\w\d", "é1", "é١"),
    ],
)
def test_a_regex_means_the_ten_ascii_digits_by_its_digit(regex: str, taken: str, refused: str) -> None:
    asked = SimpleNamespace(grammar=None, regex=regex, response_format=None)
    grammar = tools.grammar_of(asked)  # pyright: ignore[reportArgumentType]
    assert grammar is not None
    assert allows(grammar, taken)
    assert not allows(grammar, refused)


def object_leaf(names: list[str], patterns: list[str]) -> Leaf:
    schema = {
        "type": "object",
        "properties": {key: {"type": "string"} for key in names},
        "patternProperties": {key: {"type": "integer"} for key in patterns},
    }
    return Leaf(schema, AT)


@pytest.mark.parametrize("pattern", ["^x-", "^[0-9]{2}$", "\\+b?", "^(x|y)-", "^[^a-z]+$", "^\\d+(x|y)$"])
def test_expressions_that_match_no_named_member_stand_next_to_them(pattern: str) -> None:
    assert [member.key for member in members(object_leaf(["a", "abc"], [pattern]))] == ["a", "abc"]


@pytest.mark.parametrize(
    "pattern",
    [
        "^(a+)+$",
        "^(a|a)*$",
        "^(?:a+)+$",
        "^(a|a?)+$",
        "(a|a)(a|a)(a|a)$",
        "a*a*a*a*b",
        "(a{1,9}){1,9}$",
        "((a+))+$",
        "(?=(a+)+$)",
        "^[ab]*[ab]*[ab]*$",
    ],
)
@pytest.mark.parametrize("name", ["a" * 60 + "!", "a" * 5000])
def test_expressions_that_a_matcher_takes_for_ever_over_are_not_tried(pattern: str, name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        members(object_leaf([name], [pattern]))
    assert refused.value.field == f"{AT}.patternProperties"


def test_many_expressions_are_not_tried_against_many_names() -> None:
    names, patterns = [f"a{number}" for number in range(64)], [f"^b{number}$" for number in range(17)]
    assert len(members(object_leaf(names, patterns[:16]))) == 64
    with pytest.raises(InvalidRequest):
        members(object_leaf(names, patterns))


ITSELF: dict[str, Any] = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [ITSELF, {"type": "string"}]},
        {"anyOf": [{"type": "string"}, *[ITSELF] * 20]},
        {"allOf": [ITSELF, {"minLength": 1}], "type": "string"},
        ITSELF,
    ],
)
def test_a_choice_of_itself_is_refused(family: str, schema: dict[str, Any]) -> None:
    tool = {"type": "object", "properties": {"o": ITSELF}, "required": ["o"], "$defs": {"a": schema}}
    with pytest.raises(InvalidRequest):
        calls_grammar(FORMATS[family], {"f": followed_schema(tool, AT)}, BranchChoice.REQUIRED, parallel=False, token_id=lambda _: None)


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize(
    ("pattern", "text", "other"), [(r"^\d\d$", "12", "1٢"), (r"^[\d.]+$", "1.", "١."), (r"^\w+$", "a_1", "é"), (r"\d$", "é1", "é١")]
)
def test_a_pattern_of_a_call_means_ascii_as_a_schema_does(family: str, pattern: str, text: str, other: str) -> None:
    grammar = form(family, {"type": "string", "pattern": pattern})
    before, after = CALLS[family]
    assert allows(grammar, before + text + after)
    assert not allows(grammar, before + other + after)
