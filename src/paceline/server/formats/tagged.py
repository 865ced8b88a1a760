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
from paceline.server.formats.schema_types import alternatives, leaf_types, type_of

STRING = frozenset({"string"})


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that a property may have; none if the schema does not say."""
    properties = schema.get("properties")
    one = cast("Mapping[str, Any]", properties).get(key) if isinstance(properties, Mapping) else None
    leaves = alternatives(schema.get("additionalProperties") if one is None else one, schema)
    return frozenset[str]().union(*map(leaf_types, leaves))


_PYTHONS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
"""Several templates write these."""


def as_json(text: str, types: frozenset[str]) -> str:
    """Write a value as JSON of one of the types, or of any type if `types` is empty. A value of no such type becomes a string."""
    bare = _PYTHONS.get(text.strip(), text.strip())
    try:
        value = json.loads(bare, parse_constant=float)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = type_of(value)
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
    """Read an object with bare keys, and with strings between delimiters. False: it breaks off."""
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
