"""Schemas as they are followed: what is dropped allows everything, what is rewritten allows no more, and the rest is refused by the path of its keyword."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampling import ALL, draws
from tests.unit.engine.test_whole_forms import DIGITS
from tests.unit.server.formats.random_schemas import random_answer, random_schema
from tests.unit.server.formats.test_families import FORMATS

from paceline.core.errors import InvalidRequest
from paceline.core.generation import Grammar, GrammarKind
from paceline.engine.grammar import Grammars
from paceline.server import tools
from paceline.server.formats import schema_shapes as shapes
from paceline.server.formats.grammar import BranchChoice, calls_grammar
from paceline.server.formats.patterns import without_look_around
from paceline.server.formats.schema import followed_schema
from paceline.server.requests import JsonObjectFormat

PRINTED = Path(__file__).parents[3] / "data" / "printed_schemas"
GRAMMARS = Grammars(DIGITS, tried=True)
LARGEST = 9_223_372_036_854_774_784


@pytest.mark.parametrize("library", ["pydantic", "zod"])
def test_what_generators_print_is_followed(library: str) -> None:
    schemas = json.loads((PRINTED / f"{library}.json").read_text())
    del schemas["version"]
    refused: dict[str, str] = {}
    for name, schema in schemas.items():
        try:
            found = random_answer(schema, GRAMMARS, random.Random(name))
        except InvalidRequest as error:
            refused[name] = error.field or ""
            continue
        if found is not None:
            jsonschema_rs.validator_for(schema, validate_formats=False).validate(json.loads(found))
    assert len(schemas) == 100
    assert len(refused) < 5, refused
    assert all(place.startswith("schema.") for place in refused.values()), "each has its path"


COUNT = 500


@pytest.mark.parametrize(
    "seeds",
    [range(COUNT) if ALL else draws("random schemas").sample(range(COUNT), 40)],
    ids=["seeds"],
)
def test_an_answer_to_any_schema_that_ends_parses_and_is_of_it(seeds: list[int]) -> None:
    ended, refused = 0, list[str]()
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        try:
            answers = [random_answer(schema, GRAMMARS, random.Random(f"{seed} {walk}")) for walk in range(3)]
        except InvalidRequest as error:
            refused.append(error.field or "")
            continue
        for answer in answers:
            if answer is not None:
                ended += 1
                value = json.loads(answer)
                assert jsonschema_rs.validator_for(schema).is_valid(value), f"seed {seed}: {answer} is not of {json.dumps(schema)}"
    assert ended > len(seeds) / 2
    assert all(place.startswith("schema") for place in refused), "each has its path"


A = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    "more",
    [
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"minContains": 0},
        {"maxContains": 3},
        {"dependentRequired": {}},
        {"dependentRequired": {"a": []}},
        {"dependentSchemas": {"a": True}},
        {"dependencies": {"zzz": ["a"]}},
        {"unevaluatedProperties": True},
        {"unevaluatedProperties": False},
        {"unevaluatedItems": {}},
        {"not": False},
        {"if": {"minProperties": 1}},
        {"then": {"minProperties": 1}, "if": True, "else": True} | {"then": {}},
        {"minProperties": 0},
        {"maxLength": 2**53},
        {"pattern": ""},
        {"$schema": "https://example.org/own"},
        {"contentSchema": {"type": "object"}},
        {"allOf": []},
    ],
)
def test_a_keyword_that_allows_everything_is_dropped(more: dict[str, Any]) -> None:
    assert followed_schema({**A, **more}) == A


LIST = {"type": "array", "items": {"enum": ["a"]}}
SETS: dict[str, Any] = {
    "type": "array",
    "uniqueItems": True,
    "$defs": {
        "E": {"enum": ["a", "b"]},
        "a b": {"type": "boolean"},
        "s/t~": {"const": "e"},
        "Größe": {"anyOf": [{"const": "c"}, {"const": "d"}]},
    },
}


@pytest.mark.parametrize(
    ("schema", "followed"),
    [
        ({"maxLength": 5.0, "minItems": 0}, {"maxLength": 5}),
        ({"type": "integer", "multipleOf": 1}, {"type": "integer"}),
        *(({"multipleOf": each}, {"multipleOf": each}) for each in (10_000, 9973, 0.01, 0.0001, 2.5)),
        ({"minimum": -(1 << 63), "maximum": (1 << 63) - 1}, {"minimum": -LARGEST, "maximum": LARGEST}),
        ({"exclusiveMinimum": -1.7e308}, {"minimum": -LARGEST}),
        ({"minimum": 0, "exclusiveMinimum": -1e300}, {"minimum": 0}),
        ({"minimum": 10**18}, {"minimum": 10**18, "maximum": LARGEST}),
        ({"maximum": -(10**18)}, {"maximum": -(10**18), "minimum": -LARGEST}),
        ({"maximum": 2**53 + 1}, {"maximum": 2**53}),
        ({"minimum": 2**53 + 1}, {"minimum": 2**53 + 2}),
        ({"contains": True, "minContains": 2}, {"minItems": 2}),
        ({"contains": {"type": "string"}, "minContains": 0}, {}),
        ({"type": "object", "unevaluatedProperties": False}, {"type": "object", "additionalProperties": False}),
        ({"properties": {"a": {"not": {}}}}, {"properties": {"a": False}}),
        ({"enum": [1, 2, 3], "not": {"const": 2}}, {"enum": [1, 3]}),
        ({"type": ["string", "null"], "not": {"type": "null"}}, {"type": ["string"]}),
        # next to a reference, and behind references that are written in several ways
        *(
            ({**SETS, "items": {"$ref": where, **more}}, {**SETS, "uniqueItems": None, "type": None, "enum": [[], *([one] for one in left)]})
            for where, more, left in (
                ("#/$defs/E", {"const": "a"}, "a"),
                ("#/$defs/E", {"enum": ["b", "c"]}, "b"),
                ("#/$defs/E", {"type": ["string", "null"], "enum": ["a", None]}, "a"),
                ("#/$defs/a%20b", {"const": True}, [True]),
                ("#/$defs/Gr%C3%B6%C3%9Fe/anyOf/1", {"title": "a"}, "d"),
                ("#/$defs/Größe/anyOf/1", {}, "d"),
                ("#/$defs/s~1t~0", {}, "e"),
            )
        ),
        *(
            ({"$ref": f"#/$defs/{where}", "$defs": {name: {**LIST, "uniqueItems": True}}}, {"$ref": f"#/$defs/{where}", "$defs": {name: {"enum": [[], ["a"]]}}})
            for where, name in (("Größe", "Größe"), ("Gr%C3%B6%C3%9Fe", "Größe"), ("鍵", "鍵"), ('a"b', 'a"b'), ("a~1b", "a/b"))
        ),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
            {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}},
            {"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False},
        ),
        ({"propertyNames": {"type": "integer"}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2}, {"enum": [[True, False], [False, True]]}),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 1, "uniqueItems": True}, {"type": "array", "items": {"type": "string"}, "maxItems": 1}),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"anyOf": [{}], "oneOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{}], "allOf": [{"anyOf": [{"const": 1}, {"const": 2}]}]}),
    ],
)  # fmt: skip
def test_a_schema_in_the_words_that_are_followed(schema: dict[str, Any], followed: dict[str, Any]) -> None:
    followed = {key: value for key, value in followed.items() if value is not None}
    assert followed_schema(schema) == followed
    assert followed_schema(followed) == followed


HUGE = 10**400


def tagged(*values: object, **more: object) -> dict[str, Any]:
    return {"oneOf": [{"type": "object", "properties": {"kind": {"const": value}, **more}, "required": ["kind"]} for value in values]}


def chain(last: dict[str, Any], **beside: Any) -> dict[str, Any]:
    """A schema of 1.5 KB that lists `last` 20**7 times."""
    links = {f"a{place}": {"anyOf": [{"$ref": f"#/$defs/a{place + 1}"}] * 20} for place in range(7)}
    return {"$defs": {**links, "a7": last}, **beside}


FIRST = {"$ref": "#/$defs/a0"}
ITSELF = {"type": "object", "properties": {f"p{place}": FIRST for place in range(20)}, "required": [f"p{place}" for place in range(20)]}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (chain({"const": 1}, oneOf=[FIRST, {"const": 2}]), "oneOf"),
        (chain({"type": "string"}, oneOf=[FIRST, {"type": "integer"}]), "oneOf"),
        (chain({"const": 1}, enum=[1, 2], **{"not": FIRST}), "not"),
        ({"$defs": {"a0": {"anyOf": [FIRST] * 20}}, "oneOf": [FIRST, {"const": 1}]}, "oneOf"),
        ({"$defs": {"a0": ITSELF}, "oneOf": [FIRST, FIRST]}, "oneOf"),
    ],
)
def test_a_schema_whose_references_multiply_is_refused_before_they_are_followed(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        followed_schema(schema)
    assert refused.value.field == f"schema.{path}"


def test_a_schema_of_too_many_values_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="values"):
        followed_schema({"enum": ["a"] * 200_001})


@pytest.mark.parametrize("count", [2, 400])
def test_branches_that_one_property_tells_apart_may_be_many(count: int) -> None:
    assert len(followed_schema(tagged(*range(count), more={"type": "string"}))["anyOf"]) == count
    with pytest.raises(InvalidRequest):
        followed_schema(tagged(*range(count), 0))


def test_values_that_are_ruled_out_are_compared_once() -> None:
    many = [str(number) for number in range(5000)]
    assert followed_schema({"enum": many, "not": {"enum": many[1:]}}) == {"enum": ["0"]}
    assert followed_schema({"enum": [1, True, 1.0, "1"], "not": {"enum": [1]}}) == {"enum": [True, "1"]}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (tagged("a", "a"), "oneOf"),
        ({"oneOf": [{"type": "object"}, {"type": "object", "required": ["a"]}]}, "oneOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}]}, "oneOf"),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "string", "nullable": True}}}, "oneOf"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 60}, "uniqueItems": True}, "uniqueItems"),
        ({"propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "propertyNames"),
        ({"not": {"minLength": 3}}, "not"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"contains": {"type": "string"}}, "contains"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired.a"),
        ({"minProperties": 2}, "minProperties"),
        ({"$ref": "https://example.org/a"}, "$ref"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"const": 2**53 + 1}, "const"),
        ({"enum": []}, "enum"),
        ({"type": "strnig"}, "type"),
        ({"required": True}, "required"),
        ({"minimum": "0"}, "minimum"),
        ({"maxLength": -1}, "maxLength"),
        ({"pattern": "^a(?=b)"}, "pattern"),
        ({"pattern": "(?<!a)b"}, "pattern"),
        ({"allOf": [{"$ref": "#"}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        # next to a reference
        *(
            ({**SETS, "items": {"$ref": "#/$defs/E", **more}}, "uniqueItems")
            for more in ({"pattern": "^a"}, {"maxLength": 0}, {"format": "date"}, {"allOf": [{"const": "a"}]})
        ),
        ({"propertyNames": {"$ref": "#/$defs/E", "pattern": "^a"}, "$defs": {"E": {"enum": ["a", "b"]}}}, "propertyNames"),
        # of another form than the keyword must have, where nothing but a reference leads, too
        ({"dependentRequired": {"a": [{}]}}, "dependentRequired.a"),
        ({"dependentRequired": {"a": "bc"}}, "dependentRequired.a"),
        ({"dependencies": {"a": [["x"]]}}, "dependencies.a"),
        ({"dependencies": {"a": {"required": 5}}}, "dependencies.a.required"),
        ({"minLength": HUGE}, "minLength"),
        ({"multipleOf": HUGE}, "multipleOf"),
        ({"minimum": HUGE}, "minimum"),
        ({"const": HUGE}, "const"),
        ({"enum": [{"a": [HUGE]}]}, "enum"),
        *(
            ({"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}], "$defs": {"A": {"type": "object", **bad}}}, f"$defs.A.{path}")
            for bad, path in (
                ({"required": 5}, "required"),
                ({"type": [{}]}, "type"),
                ({"properties": [1]}, "properties"),
                ({"properties": {"a": 1}}, "properties.a"),
                ({"anyOf": {"a": 1}}, "anyOf"),
                ({"items": {"enum": "abc"}}, "items.enum"),
                ({"const": HUGE}, "const"),
            )
        ),
        ({"$ref": "#/a/b", "a": {"b": 5}}, "a.b"),
        ({"$ref": "#/a/0", "a": [{"type": [5]}]}, "a.0.type"),
        ({"$ref": "#/a/1", "a": [{}]}, "$ref"),
        ({"components": {"schemas": 5}}, "components.schemas"),
        # found by the compiler
        ({"pattern": "("}, "pattern"),
        ({"pattern": "a\\b"}, "pattern"),
        ({"multipleOf": 1e-12, "type": "number"}, "multipleOf"),
        *(({"multipleOf": each, "type": "number"}, "multipleOf") for each in (10_001, 999_983, 1e300, 99_991.5, 0.99991)),
        ({"patternProperties": {"a": {}, "b": {}}}, "patternProperties"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "minProperties"),
        ({"minimum": 3, "maximum": 2, "type": "integer"}, "m"),
    ],
)
@pytest.mark.parametrize("outside", [False, True])
def test_what_cannot_be_followed_is_refused_with_the_path_of_its_keyword(schema: dict[str, Any], path: str, *, outside: bool) -> None:
    at = "tools[1].function.parameters"
    if outside and "#" not in json.dumps(schema):
        schema = {
            "type": "object",
            "properties": {"ok": {"type": "string"}, "x": {"type": "array", "items": schema, "minItems": 1}},
            "required": ["x"],
        }
        path = f"properties.x.items.{path}"
    with pytest.raises(InvalidRequest) as refused:
        GRAMMARS.prepare(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"$comment": at, **followed_schema(schema, at)})))
    assert (refused.value.field or "").startswith(f"{at}.{path}")
    assert refused.value.message.startswith(f"{at}.{path}")


@pytest.mark.parametrize("comment", ["made by a tool", 5, None, {"a": [1]}])
@pytest.mark.parametrize("inside", [False, True])
def test_comments_of_a_client_do_not_stand_for_the_path(comment: object, *, inside: bool) -> None:
    schema = {"$comment": comment, "type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}
    schema = {"$comment": comment, "type": "object", "properties": {"x": schema}} if inside else schema
    asked = SimpleNamespace(grammar=None, regex=None, response_format=JsonObjectFormat(type="json_object", schema=schema))
    form = tools.grammar_of(asked)  # pyright: ignore[reportArgumentType]
    assert form
    with pytest.raises(InvalidRequest) as refused:
        GRAMMARS.prepare(form)
    assert refused.value.field == "response_format.schema" + ".properties.x" * inside + ".minProperties"


@pytest.mark.parametrize("deep", [600, 20_000])
def test_a_schema_that_is_nested_too_deep_is_refused(deep: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(deep):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="nested too deep"):
        followed_schema(schema)


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-0.5", "+00.", ".5"], ["", "+", "-.", ".", "1a"]),
        (r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,}$", ["aB3d", "0000A"], ["abcd", "A1", "ABCD", "ab-1A"]),
        (r"^(?!\.)(?!.*\.\.)[a-z.]+$", ["a", "a.b.", "ab"], [".a", "a..b", ""]),
        (r"^(?!.*[_-]{2})[a-z_-]+$", ["a-b", "-a_"], ["a--b", "a-_b"]),
        (r"^(?!$)[a-z]*$", ["a"], [""]),
        (r"^(?!a)", ["b", ""], ["a", "ab"]),
        (r"^(?!.{4})[a-z]+$", ["abc"], ["abcd"]),
        (r"^(?![0-9]+$)[a-z0-9]+$", ["a1", "1a"], ["11"]),
        (r"^[a-z]+$", ["a"], ["A"]),
    ],
)
def test_look_ahead_at_the_beginning_is_followed(pattern: str, matches: list[str], others: list[str]) -> None:
    schema = json.dumps(followed_schema({"type": "string", "pattern": pattern}))
    for text in (*matches, *others):
        matcher = GRAMMARS.matcher(Grammar(GrammarKind.JSON_SCHEMA, schema))
        tokens = DIGITS.encode(json.dumps(text))
        is_taken = matcher.mask(tokens) is not None
        for token in tokens if is_taken else ():
            matcher.take(token)
        assert (is_taken and matcher.is_accepting) is (text in matches), text


@pytest.mark.parametrize("pattern", [r"a(?!b)", r"^(?!a|b)c|d$", r"^(?!(?=a))b", r"^(?!ab)c", r"(?=a)b", r"^(?<=a)b", r"^(?:(?!a)b)+$"])
def test_other_look_around_is_not(pattern: str) -> None:
    assert without_look_around(pattern) is None


KEYWORDS = st.sampled_from(
    sorted({*shapes._CHECKS, *shapes.BY_NAME, *shapes.LISTS, *shapes._SCHEMAS, "dependentSchemas", "$ref", "nullable", "components"})
)  # pyright: ignore[reportPrivateUsage]
LEAVES = st.none() | st.booleans() | st.sampled_from([0, 1, -1, 2.5, HUGE, -HUGE, 1e300, float("inf"), float("nan"), 10**4000]) | st.sampled_from(
    ["", "a", "object", "string", "^a(?=b)", "#/$defs/a", "#/a/0", "#", "\ud800", "$ref"]
)  # fmt: skip
ANY_SCHEMA = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.just("a"), inner, max_size=4), max_leaves=12
)


@settings(max_examples=1000 if ALL else 150, deadline=None)
@given(st.dictionaries(KEYWORDS, ANY_SCHEMA, min_size=1, max_size=4))
def test_whatever_stands_in_a_schema_it_is_followed_or_refused(schema: dict[str, Any]) -> None:
    with suppress(InvalidRequest):
        tools.grammar_of(SimpleNamespace(grammar=None, regex=None, response_format=JsonObjectFormat(type="json_object", schema=schema)))  # pyright: ignore[reportArgumentType]
    for family in ("gemma4", "qwen_xml", "pythonic", "hermes"):
        with suppress(InvalidRequest):
            calls_grammar(FORMATS[family], {"f": followed_schema(schema)}, BranchChoice.REQUIRED, parallel=True, token_id=lambda _: None)
