"""Where references within a JSON schema lead, and which types its values may have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import unquote

TYPES: Final = ("null", "boolean", "object", "array", "number", "integer", "string")
ALL_TYPES: Final = frozenset(TYPES) - {"integer"}
"""Every type; integers are numbers."""
_DEEP = 8
"""Schemas within schemas that are looked into."""
_MOST = 1024
"""Schemas that are looked at; of others any value is taken."""
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def steps_of(where: str) -> list[str]:
    """Return the names and indexes on the way of a reference such as `#/$defs/a%20b`."""
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in where.split("/")[1:]]


def resolve_reference(where: str, root: Mapping[str, Any]) -> object:
    """Return what a reference within a schema leads to. None: it leads nowhere, or is not a path."""
    if where != "#" and not where.startswith("#/"):
        return None
    found: Any = root
    for step in steps_of(where):
        if isinstance(found, list):
            items = cast("list[Any]", found)
            found = items[int(step)] if _INDEX.fullmatch(step) and int(step) < len(items) else None
        else:
            found = cast("Mapping[str, Any]", found).get(step) if isinstance(found, Mapping) else None
    return found


def alternatives(schema: object, root: Mapping[str, Any], deep: int = _DEEP, left: list[int] | None = None) -> list[Mapping[str, Any]]:
    """Return schemas of which a value follows one, references and choices resolved. What stands next to these is left out.

    Args:
        left: how many may yet be looked at, counted down.
    """
    left = [_MOST] if left is None else left
    left[0] -= 1
    if not isinstance(schema, Mapping) or deep <= 0 or left[0] < 0:
        return [{}]
    fields = cast("Mapping[str, Any]", schema)
    match fields:
        case {"$ref": str(where)}:
            found = alternatives(resolve_reference(where, root), root, deep - 1, left)
        case {"anyOf": list(options)} | {"oneOf": list(options)} | {"allOf": [_] as options}:
            found: list[Mapping[str, Any]] = []
            for option in cast("list[Any]", options):
                found += alternatives(option, root, deep // 2, left)
                if left[0] < 0:
                    break
        case _:
            found = [fields]
    return [*found, {"type": "null"}] if fields.get("nullable") is True else found


def leaf_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema without references and choices names; none where it does not say."""
    match schema:
        case {"type": str(name)}:
            return frozenset((name,))
        case {"type": list(names)}:
            return frozenset(name for name in cast("list[Any]", names) if isinstance(name, str))
        case {"const": value}:
            return frozenset((type_of(value),))
        case {"enum": list(values)}:
            return frozenset(map(type_of, cast("list[Any]", values)))
        case _:
            return frozenset()


def type_of(value: object) -> str:
    """Return the JSON type of a value; `integer` only for what has no point."""
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
