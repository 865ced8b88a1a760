"""Grammars of values with bare keys and strings between delimiters, by a JSON schema.

Of a schema count: type, enum, const, properties, required, items, minItems, maxItems, anyOf, oneOf, allOf of one, $ref. Others leave any value of the type.
Schemas come as `schema.followed_schema` leaves them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from paceline.core.errors import InvalidRequest
from paceline.server.formats.schema_types import resolve_reference

ANY = "/(.|\\n)*/"
"""Any text. Special tokens are none."""
_BLANKS: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only blanks between the parts of JSON, as in answers of a given form."""
_NAMED = re.compile(r"(<(?!/?｜[A-Za-z]+｜)[^<>\n]{1,60}>|\[/?[A-Z_]{2,30}\]|｜[A-Za-z]{1,30}｜)")
"""What may be the name of a special token."""


class Lark:
    """Rules, and expressions of them."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._rules: dict[str, str] = {}
        """Each one's name, by what it says: nothing is written twice."""

    def text(self, start: str) -> str:
        """The whole grammar, whose texts are `start`."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._rules.items())])

    def rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        return self._rules.setdefault(body, f"T{len(self._rules)}")

    def lazy(self, body: str) -> str:
        """A rule that matches as little text as it can."""
        name = self._rules.setdefault(f"{body}  ", f"l{len(self._rules)}[lazy]")
        return name.removesuffix("[lazy]")

    def json(self, schema: Mapping[str, Any]) -> str:
        return self.rule("%json " + json.dumps({**schema, "x-guidance": _BLANKS}))

    def literal(self, text: str) -> str:
        """This text, with the special tokens that it names."""
        pieces = (piece for piece in _NAMED.split(text) if piece)
        joined: list[str | int] = []
        for piece in pieces:
            token = self._token_id(piece) if _NAMED.fullmatch(piece) else None
            match joined:
                case [*_, str(last)] if token is None:
                    joined[-1] = last + piece
                case _:
                    joined.append(piece if token is None else token)
        return " ".join(self.quoted(piece) if isinstance(piece, str) else f"<[{piece}]>" for piece in joined)

    def quoted(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def first_special(self, text: str) -> tuple[int, str] | None:
        """The first special token that a text names, and what stands behind it."""
        for match in _NAMED.finditer(text):
            if (token := self._token_id(match.group())) is not None:
                return token, text[match.end() :]
        return None

    def until(self, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        if self.first_special(mark):
            return f"{self.terminal(ANY)} {self.literal(mark)}"
        return self.lazy(f"{ANY} {self.quoted(mark)}")

    def specials(self, texts: Iterable[str]) -> list[int]:
        """The special tokens that any of the texts names."""
        named = {match.group() for text in texts for match in _NAMED.finditer(text)}
        return sorted({token for name in named if (token := self._token_id(name)) is not None})


def in_regex(text: str) -> str:
    """A regular expression as it stands between Lark's slashes."""
    return re.sub(r"(?<!\\)/", r"\\/", text).replace("\n", "\\n")


EMPTY = '""'
_DEEP = 12
"""Values within values that are described one by one; deeper ones may be anything."""
_MOST = 4000
"""Values that are described in all. Raising it: a schema whose parts refer to each other takes longer to write out, 10 us each."""


def lax_value(lark: Lark, schema: Mapping[str, Any], delimiter: str) -> str:
    """An expression for the values of a schema."""
    return _Lax(lark, schema, delimiter).value(schema, _DEEP)


class _Lax:
    def __init__(self, lark: Lark, root: Mapping[str, Any], delimiter: str) -> None:
        self._lark, self._root, self._delimiter = lark, root, delimiter
        self._left = _MOST

    def value(self, schema: object, deep: int) -> str:
        fields = cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest("tools: a schema has too many values within values to be followed", "Send a smaller one.", field="tools")
        if deep == 0:
            return self._any(0)
        match fields:
            case {"$ref": str(where)}:
                return self.value(resolve_reference(where, self._root), deep - 1)
            case {"const": constant}:
                return self._constant(constant)
            case {"enum": list(values)}:
                return self._lark.rule(" | ".join(self._constant(value) for value in cast("list[object]", values)))
            case {"anyOf": list(options)} | {"oneOf": list(options)} | {"allOf": [_] as options}:
                return self._lark.rule(" | ".join(self.value(option, deep - 1) for option in cast("list[object]", options)))
            case {"type": list(types)}:
                return self._lark.rule(" | ".join(self.value({**fields, "type": each}, deep) for each in cast("list[str]", types)))
            case _:
                return self._of_type(fields, deep)

    def _of_type(self, fields: Mapping[str, Any], deep: int) -> str:
        match fields.get("type"):
            case "object":
                return self._object(fields, deep)
            case "array":
                return self._array(fields, deep)
            case "string":
                return self._string(fields)
            case "boolean" | "null" | "integer" | "number":
                return self._lark.json(fields)
            case _:
                return self._any(2)

    def _any(self, deep: int) -> str:
        options = [self._string({}), self._lark.json({"type": ["number", "boolean", "null"]})]
        if deep:
            inner = self._any(deep - 1)
            options += [f'"[" ({inner} ("," {inner})*)? "]"', self._members(inner)]
        return self._lark.rule(" | ".join(options))

    def _members(self, value: str) -> str:
        member = self._lark.rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {value}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _object(self, fields: Mapping[str, Any], deep: int) -> str:
        properties = fields.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return '"{" "}"' if fields.get("additionalProperties") is False else self._lark.rule(self._members(self._any(2)))
        required = frozenset(cast("list[str]", fields.get("required") or []))
        members = [
            (f"{self._lark.quoted(key + ':')} {self.value(value, deep - 1)}", key in required)
            for key, value in cast("Mapping[str, Any]", properties).items()
        ]
        # One rule for what may follow each member, from the last one on: with a comma before it, and as the first one.
        later, first = "", ""
        for member, needed in reversed(members):
            first = self._lark.rule(f"{member} {later}" if needed else f"{member} {later} | {first or EMPTY}")
            later = self._lark.rule(f'"," {member} {later}' if needed else f'("," {member})? {later}')
        return self._lark.rule(f'"{{" {first} "}}"')

    def _array(self, fields: Mapping[str, Any], deep: int) -> str:
        item = self.value(fields["items"], deep - 1) if "items" in fields else self._any(2)
        least, most = fields.get("minItems") or 0, fields.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._lark.rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')

    def _string(self, fields: Mapping[str, Any]) -> str:
        least, most = fields.get("minLength") or 0, fields.get("maxLength")
        quote = self._lark.literal(self._delimiter)
        body = f"/(.|\\n){{{least},{'' if most is None else most}}}/" if least or most is not None else ANY
        if self._lark.first_special(self._delimiter):
            return f"{quote} {self._lark.terminal(body)} {quote}"
        body += f" & ~/(.|\\n)*{in_regex(re.escape(self._delimiter))}(.|\\n)*/"
        return f"{quote} {self._lark.terminal(body)} {quote}"

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return (
                f"{self._lark.literal(self._delimiter)} {self._lark.quoted(value) if value else ''} {self._lark.literal(self._delimiter)}"
            )
        return self._lark.quoted(json.dumps(value, separators=(",", ":")))
