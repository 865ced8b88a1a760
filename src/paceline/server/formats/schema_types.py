"""What a tool's schema says of one argument's type, and a value written without JSON's quotes as JSON of that type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

STRING = frozenset({"string"})
_DEEP = 8
"""Schemas within schemas that are looked into."""
_WIDE = 16
"""Alternatives that are looked at in each."""


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a property may have; none where the schema says nothing."""
    properties = schema.get("properties")
    one = cast("Mapping[str, Any]", properties).get(key) if isinstance(properties, Mapping) else None
    return _types(schema.get("additionalProperties") if one is None else one, schema, _DEEP)


def _types(schema: object, root: Mapping[str, Any], deep: int) -> frozenset[str]:
    leaves = alternatives(schema, root, deep)
    return frozenset[str]().union(*map(leaf_types, leaves))


def alternatives(schema: object, root: Mapping[str, Any], deep: int = _DEEP) -> list[Mapping[str, Any]]:
    """The schemas of which a value must follow one, references and choices resolved."""
    if not isinstance(schema, Mapping) or deep <= 0:
        return [{}]
    fields = cast("Mapping[str, Any]", schema)
    match fields:
        case {"$ref": str(where)}:
            found = alternatives(referred(where, root), root, deep - 1)
        case {"anyOf": list(options)} | {"oneOf": list(options)} | {"allOf": [_] as options}:
            chosen = cast("list[Any]", options)[:_WIDE]
            found = [leaf for option in chosen for leaf in alternatives(option, root, deep // 2)]
        case _:
            found = [fields]
    return [*found, {"type": "null"}] if fields.get("nullable") is True else found


def leaf_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types of one of those; none where it does not say."""
    match schema:
        case {"type": str(name)}:
            return frozenset((name,))
        case {"type": list(names)}:
            return frozenset(name for name in cast("list[Any]", names) if isinstance(name, str))
        case {"const": value}:
            return frozenset((_type(value),))
        case {"enum": list(values)}:
            return frozenset(map(_type, cast("list[Any]", values)))
        case _:
            return frozenset()


def referred(where: str, root: Mapping[str, Any]) -> object:
    """What a reference within the schema points to."""
    found: Any = root
    for step in where.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


_PYTHONS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
"""Several templates write these."""


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON of one of the types, or of any type where there is none. What is nothing of that is a string."""
    bare = _PYTHONS.get(text.strip(), text.strip())
    try:
        value = json.loads(bare, parse_constant=float)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = _type(value)
    if kind == "number" and value.is_integer() and types >= {"integer"} and "number" not in types:
        return str(int(value))
    fits = kind in types or not types or (kind == "integer" and "number" in types)
    if not fits or kind == "string" or bare.lstrip("-")[:1] in {"N", "I"}:  # NaN and Infinity are no JSON
        return json.dumps(text, ensure_ascii=False)
    return bare
