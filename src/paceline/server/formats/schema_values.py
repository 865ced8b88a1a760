"""What values a schema allows: all of them, where they are few; their types; and whether two schemas have none in common.

All answers are for schemas that `schema` has put in the words that are followed. "Not known" is always a right answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, Final, cast

from paceline.server.formats.schema_types import ALL_TYPES, type_of

Resolve = Callable[[object], Mapping[str, Any]]
"""What a schema says, behind its references."""
_FEW: Final = 64
"""Values that are listed one by one."""
_DEEP: Final = 8
NOTHING: Final = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
        *("$defs", "definitions", "components"),
    }
)
"""Keywords that say nothing of the value."""
_TOGETHER: Final = (
    frozenset({"properties", "patternProperties", "additionalProperties", "unevaluatedProperties"}),
    frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems"}),
    frozenset({"contains", "minContains", "maxContains"}),
    frozenset({"if", "then", "else"}),
)
"""Keywords whose meaning depends on those of the same schema."""


def distinct(values: Iterable[object]) -> list[object]:
    """The values, each once. 1 and 1.0 are the same, true and 1 are not."""
    return list({_key(value): value for value in values}.values())


def _key(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else json.dumps(value, sort_keys=True, default=str)


def values_of(schema: object, resolve: Resolve, deep: int = _DEEP) -> list[object] | None:
    """All values of a schema. None: they are many, or not known."""
    if schema is False:
        return []
    if deep == 0 or not isinstance(schema, Mapping):
        return None
    match fields := resolve(cast("object", schema)):
        case {"const": value} if _says_only(fields, "const", "enum", "type"):
            listed = cast("list[object]", fields.get("enum", [value]))
            return _of_type([value] if _key(value) in map(_key, listed) else [], fields)
        case {"enum": list(values)} if _says_only(fields, "enum", "type"):
            return _of_type(distinct(cast("list[object]", values)), fields)
        case {"type": "boolean"} if _says_only(fields, "type"):
            return [True, False]
        case {"type": "null"} if _says_only(fields, "type"):
            return [None]
        case {"type": "integer", "minimum": int(least), "maximum": int(most)} if most - least < _FEW and _says_only(
            fields, "type", "minimum", "maximum"
        ):
            return list(range(least, most + 1))
        case {"anyOf": list(branches)} if _says_only(fields, "anyOf"):
            found = [values_of(branch, resolve, deep - 1) for branch in cast("list[object]", branches)]
            return None if None in found else distinct(value for values in found for value in values or ())
        case _:
            return None


def _says_only(fields: Mapping[str, Any], *keys: str) -> bool:
    return not fields.keys() - set(keys) - NOTHING


def _of_type(values: list[object], fields: Mapping[str, Any]) -> list[object]:
    kinds = fields.get("type", sorted(ALL_TYPES))
    allowed = {kinds} if isinstance(kinds, str) else set(cast("list[str]", kinds))
    return [
        value
        for value in values
        if _type(value) in allowed or ("integer" in allowed and _type(value) == "number" and value == int(cast("float", value)))
    ]


def types_of(schema: object, resolve: Resolve, deep: int = _DEEP) -> frozenset[str]:
    """The types that a schema's values may have; integers are numbers too unless they are listed so."""
    if deep == 0 or not isinstance(schema, Mapping):
        return ALL_TYPES
    match resolve(cast("object", schema)):
        case {"nullable": True}:
            return ALL_TYPES
        case {"type": str(kind)}:
            return frozenset({kind})
        case {"type": list(kinds)}:
            return frozenset(cast("list[str]", kinds))
        case {"const": value}:
            return frozenset({_type(value)})
        case {"enum": list(values)}:
            return frozenset(map(_type, cast("list[object]", values)))
        case {"anyOf": list(branches)}:
            return frozenset[str]().union(*(types_of(branch, resolve, deep - 1) for branch in cast("list[object]", branches)))
        case _:
            return ALL_TYPES


def _type(value: object) -> str:
    return "number" if (kind := type_of(value)) == "integer" else kind


def tell_apart(branches: Sequence[object], resolve: Resolve) -> bool:
    """Whether no value is of two of the branches: by their types, their values, or those of a property that both require."""
    return all(_are_apart(one, other, resolve, _DEEP) for one, other in combinations(branches, 2))


def _are_apart(one: object, other: object, resolve: Resolve, deep: int) -> bool:
    if one is False or other is False:
        return True
    if deep == 0 or not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return False
    first, second = resolve(cast("object", one)), resolve(cast("object", other))
    kinds, kinds_there = ({"number" if kind == "integer" else kind for kind in types_of(each, resolve)} for each in (first, second))
    if not kinds & kinds_there:
        return True
    mine, theirs = values_of(first, resolve), values_of(second, resolve)
    if mine is not None and theirs is not None:
        return len(distinct([*mine, *theirs])) == len(mine) + len(theirs)
    for each, another in ((first, second), (second, first)):
        if isinstance(several := each.get("anyOf"), list):
            return all(_are_apart(branch, another, resolve, deep - 1) for branch in cast("list[object]", several))
    if kinds & kinds_there != {"object"}:
        return False
    both = set(cast("list[str]", first.get("required") or [])) & set(cast("list[str]", second.get("required") or []))
    properties, there = (cast("Mapping[str, Any]", each.get("properties") or {}) for each in (first, second))
    return any(_are_apart(properties[name], there[name], resolve, deep - 1) for name in both & properties.keys() & there.keys())


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return one schema for the values that two schemas allow. None: it is not known how to write it."""
    first, second = ({key: value for key, value in each.items() if key not in NOTHING} for each in (one, other))
    if not second:
        return dict(one)
    if not first:
        return dict(other)
    if {"$ref", "nullable", "discriminator"} & (first.keys() | second.keys()):
        return None
    for group in _TOGETHER:
        if first.keys() & group and second.keys() & group and any(first.get(key) != second.get(key) for key in group):
            return None
    found = {**first, **second}
    for key in first.keys() & second.keys():
        match key, first[key], second[key]:
            case _, mine, theirs if _key(mine) == _key(theirs):
                pass
            case "type", mine, theirs:
                found[key] = [kind for kind in _listed(mine) if kind in _listed(theirs)]
                found[key] += ["integer"] * (
                    {"integer", "number"} <= {*_listed(mine), *_listed(theirs)} and not {"integer", "number"} & {*found[key]}
                )
                if not found[key]:
                    return None
            case "enum", list(mine), list(theirs):
                found[key] = [value for value in cast("list[object]", mine) if _key(value) in map(_key, cast("list[object]", theirs))]
            case "required" | "allOf", list(mine), list(theirs):
                found[key] = [*cast("list[object]", mine), *cast("list[object]", theirs)]
            case "pattern", mine, theirs:
                found["allOf"] = [*found.get("allOf", ()), {"pattern": mine}]
            case str(), int() | float() as mine, int() | float() as theirs if key[:3] == "min" or key == "exclusiveMinimum":
                found[key] = max(mine, theirs)
            case str(), int() | float() as mine, int() | float() as theirs if key[:3] == "max" or key == "exclusiveMaximum":
                found[key] = min(mine, theirs)
            case _:
                return None
    return found


def _listed(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds
