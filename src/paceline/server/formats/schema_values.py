"""Values that a schema allows: a list if they are few, their types, and whether two schemas have no value in common.

All answers are for schemas that `schema` has rewritten to the keywords it supports. "Not known" is always a right answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, cast

from paceline.server.formats.schema_types import ALL_TYPES, type_of

Resolve = Callable[[object], Mapping[str, Any]]
"""Function that returns a schema without its outer references."""
_FEW: Final = 64
"""Values that are listed one by one."""
_DEEP: Final = 8
_OBJECT: Final = frozenset({"object"})
_MOST_COMPARED: Final = 50_000
"""Pairs of branches and of their properties. Raising it: a request with many branches takes a thread for longer than the second that these take."""
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
"""Groups of keywords that only have a meaning together, in one schema."""


def distinct(values: Iterable[object]) -> list[object]:
    """Return the values, each once. 1 and 1.0 are the same, true and 1 are not."""
    return list({_key(value): value for value in values}.values())


def excluding(values: Iterable[object], others: Iterable[object]) -> list[object]:
    """Return the values that are not among the others."""
    keys = set(map(_key, others))
    return [value for value in values if _key(value) not in keys]


def _key(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else json.dumps(value, sort_keys=True, default=str)


def values_of(schema: object, resolve: Resolve, deep: int = _DEEP) -> list[object] | None:
    """Return all values of a schema. None: they are many, or not known."""
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
            found: list[object] = []
            for branch in cast("list[object]", branches):
                if (values := values_of(branch, resolve, deep - 1)) is None:
                    return None
                found += values
            return distinct(found)
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
    """Return the types that a schema's values may have; integers are numbers too unless they are listed so."""
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
            kinds = frozenset[str]()
            for branch in cast("list[object]", branches):
                if (kinds := kinds | types_of(branch, resolve, deep - 1)) >= ALL_TYPES:
                    break
            return kinds
        case _:
            return ALL_TYPES


def _type(value: object) -> str:
    return "number" if (kind := type_of(value)) == "integer" else kind


def tell_apart(branches: Sequence[object], resolve: Resolve) -> bool | None:
    """Return whether no value is of two of the branches: by their types, their values, or those of a property that both require.

    None: they are too many to compare.
    """
    comparing = _Comparing(resolve)
    found = comparing.is_told_by_one_property(branches) or all(
        comparing.are_apart(one, other, _DEEP) for one, other in combinations(branches, 2)
    )
    return found if comparing.left > 0 else None


@dataclass(frozen=True, slots=True)
class _Looked:
    """Facts about a schema."""

    schema: object
    """Kept so that no other has its id."""
    fields: Mapping[str, Any]
    kinds: frozenset[str]
    keys: frozenset[str] | None
    """Keys of all its values. None: they are many, or not known."""
    required: frozenset[str]


class _Comparing:
    """Compares schemas in pairs, and looks at each of them once."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve, self._looked = resolve, dict[int, _Looked]()
        self.left = _MOST_COMPARED
        """Pairs that may yet be compared."""

    def is_told_by_one_property(self, branches: Sequence[object]) -> bool:
        """Return whether all branches require a property that has other values in each of them. Takes no comparison in pairs."""
        if not all(isinstance(branch, Mapping) for branch in branches):
            return False
        looked = [self._look(cast("Mapping[str, Any]", branch)) for branch in branches]
        if any(each.kinds != _OBJECT for each in looked):
            return False
        parts = [cast("Mapping[str, Any]", each.fields.get("properties") or {}) for each in looked]
        names = set[str].intersection(*({*each.required} & part.keys() for each, part in zip(looked, parts, strict=True)))
        return any(self._have_other_values([part[name] for part in parts]) for name in names)

    def _have_other_values(self, schemas: Sequence[object]) -> bool:
        taken = set[str]()
        for schema in schemas:
            keys = self._look(cast("Mapping[str, Any]", schema)).keys if isinstance(schema, Mapping) else None
            if keys is None or keys & taken:
                return False
            taken |= keys
        return True

    def are_apart(self, one: object, other: object, deep: int) -> bool:
        """Return whether no value is of both. False where it is not known."""
        self.left -= 1
        if one is False or other is False:
            return True
        if self.left <= 0 or deep == 0 or not (isinstance(one, Mapping) and isinstance(other, Mapping)):
            return False
        first, second = self._look(cast("Mapping[str, Any]", one)), self._look(cast("Mapping[str, Any]", other))
        if not first.kinds & second.kinds:
            return True
        if first.keys is not None and second.keys is not None:
            return not first.keys & second.keys
        for each, another in ((first, second), (second, first)):
            if isinstance(several := each.fields.get("anyOf"), list):
                return all(self.are_apart(branch, another.fields, deep - 1) for branch in cast("list[object]", several))
        if first.kinds & second.kinds != _OBJECT:
            return False
        properties, there = (cast("Mapping[str, Any]", each.fields.get("properties") or {}) for each in (first, second))
        both = first.required & second.required & properties.keys() & there.keys()
        return any(self.are_apart(properties[name], there[name], deep - 1) for name in both)

    def _look(self, schema: Mapping[str, Any]) -> _Looked:
        known = self._looked.get(id(schema))
        if known is None:
            fields = self._resolve(schema)
            kinds = frozenset("number" if kind == "integer" else kind for kind in types_of(fields, self._resolve))
            values = values_of(fields, self._resolve)
            keys = None if values is None else frozenset(map(_key, values))
            required = frozenset(cast("list[str]", fields.get("required") or []))
            known = self._looked[id(schema)] = _Looked(schema, fields, kinds, keys, required)
        return known


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
                allowed = set(map(_key, cast("list[object]", theirs)))
                found[key] = [value for value in cast("list[object]", mine) if _key(value) in allowed]
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
