"""Random schemas of the keywords that generators write, and random answers that their masks allow."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from tests.unit.engine.test_whole_forms import DIGITS

from paceline.core.generation import Grammar, GrammarKind
from paceline.engine.grammar import Grammars
from paceline.server.formats.schema import followed_schema

Schema = dict[str, Any]


def random_schema(draw: random.Random, deep: int = 3) -> Schema:
    """One schema; now and then with keywords that ask for nothing, or that can't be followed."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "format", "any"]
    kind = draw.choice(kinds + ["object", "array", "record", "anyOf", "oneOf", "set", "allOf", "nullable", "not", "tuple"] * (deep > 0))
    few = lambda most=3: draw.randint(0, most)  # noqa: E731
    inner = lambda: random_schema(draw, deep - 1)  # noqa: E731
    values: list[Any] = ["red", "green", "", 1, 2.5, None, True, "ü\n", [1], {"a": "b"}]
    match kind:
        case "string":
            found: Schema = {"type": "string"}
            if few() == 0:
                found |= {"minLength": few(), "maxLength": 3 + few()}
            if few() == 0:
                patterns = [
                    "^[a-z]{1,3}$",
                    "\\d",
                    "^(?!a)",
                    "^(?=.*[0-9])(?=.*[a-z]).{2,6}$",
                    "^(?!.*--)[a-z-]{1,5}$",
                    "^(?![.]*$)[.0-9]{1,4}$",
                ]
                found["pattern"] = draw.choice(patterns)
            return found
        case "integer" | "number":
            found = {"type": kind}
            for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
                if few(4) == 0:
                    least = keyword.endswith("inimum")
                    bounds = [-5, 0, 0.5, -(2**63), -1.7e308, -(10**18)] if least else [7, 100, 1.5, 2**63 - 1, 1.7e308, 2**53 + 1]
                    found[keyword] = draw.choice(bounds)
            return found | ({"multipleOf": draw.choice([1, 2, 0.5])} if few(5) == 0 else {})
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": draw.sample(values, 1 + few())}
        case "const":
            return {"const": draw.choice(values)}
        case "format":
            return {"type": "string", "format": draw.choice(["date", "time", "ipv4", "uuid", "duration", "int64"])}
        case "any":
            return draw.choice([{}, {"title": "any"}])
        case "object":
            names = draw.sample("abcdef", 1 + few())
            found = {"type": "object", "properties": {name: inner() for name in names}, "required": [n for n in names if few(2)]}
            odd: list[Schema] = [
                {"unevaluatedProperties": False}, {"propertyNames": {"type": "string"}}, {"dependentRequired": {}}, {"minProperties": 0},
                {"propertyNames": {"enum": names}}, {"dependentRequired": {names[0]: names[1:]}}, {"additionalProperties": inner()},
                {"patternProperties": {"^x": inner()}, "additionalProperties": False},
            ]  # fmt: skip
            return found | draw.choice([{"additionalProperties": False}, {"additionalProperties": False}, {}, draw.choice(odd)])
        case "array":
            found = {"type": "array", "items": inner(), "maxItems": 1 + few()}
            odd = [
                {"uniqueItems": False},
                {"minItems": 1},
                {"contains": {}},
                {"minContains": 0},
                {"uniqueItems": True},
                {"unevaluatedItems": False},
            ]
            return found | (draw.choice(odd) if few(1) else {})
        case "record":
            names = draw.choice([{}, {"type": "string"}, {"pattern": "^[a-c]"}, {"enum": ["x", "y"]}, {"minLength": 1}, {"const": "k"}])
            return {
                "type": "object",
                "propertyNames": names,
                "additionalProperties": inner(),
                **draw.choice([{}, {"maxProperties": 2}, {"minProperties": 1}]),
            }
        case "set":
            items = draw.choice(
                [{"enum": ["a", "b", 1]}, {"type": "boolean"}, {"const": 1}, {"type": "integer", "minimum": 1, "maximum": 4}]
            )
            return {"type": "array", "items": items, "uniqueItems": True, **draw.choice([{}, {"minItems": 1}, {"maxItems": 2}])}
        case "tuple":
            return {
                "type": "array",
                "prefixItems": [inner(), inner()],
                "minItems": 2,
                **draw.choice([{"maxItems": 2}, {"items": False}, {"items": inner(), "maxItems": 3}]),
            }
        case "allOf":
            return {"allOf": [{"type": "object", "properties": {name: inner()}, "required": [name]} for name in "ab"]}
        case "not":
            return draw.choice(
                [
                    {"type": ["string", "null"], "not": {"type": "null"}},
                    {"enum": [1, 2, "a"], "not": {"const": 2}},
                    {"not": {"type": "object"}},
                ]
            )
        case "nullable":
            return {"anyOf": [inner(), {"type": "null"}], "default": None}
        case _:
            return {kind: [inner() for _ in range(1 + few(2))]}


def random_answer(schema: Schema, grammars: Grammars, draw: random.Random, most: int = 220) -> str | None:
    """An answer that ended with `stop`, as the engine would take it. None: it did not end.

    Raises:
        InvalidRequest: the schema is refused.
    """
    matcher = grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"$comment": "schema", **followed_schema(schema)})))
    written = b""
    for _ in range(most):
        mask = matcher.mask()
        assert mask is not None, "nothing was guessed"
        tokens = np.flatnonzero(np.unpackbits(mask, count=DIGITS.size, bitorder="little")).tolist()
        if not tokens:
            return None
        closing = [token for token in tokens if token in DIGITS.eos_ids or DIGITS.token_bytes(token)[:1] in b'"]}']
        token = draw.choice(closing if closing and draw.random() < 0.4 else tokens)
        if token in DIGITS.eos_ids:
            return written.decode() if matcher.is_accepting else None
        matcher.take(token)
        written += DIGITS.token_bytes(token)
    return None
