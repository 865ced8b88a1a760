"""Return what a tool's schema says of one argument's type, and a value written without JSON's quotes as JSON of that type.

Arguments with bare keys, and strings between delimiters of their own, are said as JSON while they are read. Strings are said as they come, a value
of another type once it is whole. Where the text ends within a value, so does the JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

from paceline.server.formats.cursor import BLANKS, Cursor, Marks, json_escaped, read_json_string

STRING = frozenset({"string"})
_DEEP = 8
"""Schemas within schemas that are looked into."""
_MOST = 1024
"""Schemas that are looked at; of others any value is taken."""


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a property may have; none where the schema says nothing."""
    properties = schema.get("properties")
    one = cast("Mapping[str, Any]", properties).get(key) if isinstance(properties, Mapping) else None
    return _types(schema.get("additionalProperties") if one is None else one, schema, _DEEP)


def _types(schema: object, root: Mapping[str, Any], deep: int) -> frozenset[str]:
    leaves = alternatives(schema, root, deep)
    return frozenset[str]().union(*map(leaf_types, leaves))


def alternatives(schema: object, root: Mapping[str, Any], deep: int = _DEEP, left: list[int] | None = None) -> list[Mapping[str, Any]]:
    """The schemas of which a value must follow one, references and choices resolved.

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


def resolve_reference(where: str, root: Mapping[str, Any]) -> object:
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


_KEY = re.compile(r'[^,:{}\[\]"<\r\n\t]+')
_WORD = re.compile(r'[^,{}\[\]"<\r\n\t]+')
_CLOSING = {"{": "}", "[": "]"}


def read_lax_object(cursor: Cursor, delimiter: str, say: Callable[[str], None]) -> Generator[None, None, bool]:
    """Go over an object whose keys are bare and whose strings stand between delimiters. False: it breaks off."""
    marks, closing, in_key = Marks((delimiter,)), list[str](), False
    while c := (yield from cursor.peek()):
        if c in _CLOSING:
            closing.append(_CLOSING[c])
            in_key = c == "{"
            say(cursor.take())
        elif c == closing[-1]:
            closing.pop()
            say(cursor.take())
        elif c in BLANKS + ",:":
            in_key = (c == "," and closing[-1] == "}") or (in_key and c in BLANKS)
            say(cursor.take())
        elif c == '"':
            if not (yield from read_json_string(cursor, say)):
                return False
        elif (yield from cursor.mark(marks)):
            cursor.take(len(delimiter))
            say('"')
            blanks, mark = yield from cursor.text(marks, lambda text: say(json_escaped(text)))
            say(json_escaped(blanks) + ('"' if mark else ""))
            cursor.take(len(mark))
        elif word := (yield from _word(cursor, _KEY if in_key else _WORD)):
            say(json.dumps(word, ensure_ascii=False) if in_key else as_json(word, BARE) if (yield from cursor.more()) else word)
        else:
            return False
        if not closing:
            return True
    return False


BARE = frozenset({"number", "integer", "boolean", "null"})


def _word(cursor: Cursor, pattern: re.Pattern[str]) -> Generator[None, None, str]:
    pieces: list[str] = []
    while run := cursor.run(pattern):
        pieces.append(run)
        yield from cursor.more()
    return "".join(pieces).rstrip(BLANKS)
