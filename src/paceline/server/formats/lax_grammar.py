"""Grammars of values with bare keys and strings between delimiters, by a JSON schema.

A keyword of a schema that can't be followed is refused with its path. Rare values are left out: members that are not named next to named ones.
Schemas come as `schema.followed_schema` leaves them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from paceline.server.formats.leaves import Leaf, free_members, leaves, listed_values, members, place_of
from paceline.server.formats.schema_shapes import refusal_of
from paceline.server.formats.schema_values import NOTHING
from paceline.server.formats.text_grammar import ANY, in_regex, text_terminal

_BLANKS: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The only blanks between the parts of JSON, as in answers of a given form."""
_NAMED = re.compile(r"(<(?!/?｜[A-Za-z]+｜)[^<>\n]{1,60}>|\[/?[A-Z_]{2,30}\]|｜[A-Za-z]{1,30}｜)")
"""Expression for texts that may be the name of a special token."""


class Lark:
    """Rules, and expressions of them."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._token_id = token_id
        self._rules: dict[str, str] = {}
        """Each one's name, by what it says: nothing is written twice."""
        self._recursive: list[str] = []
        self._notes: list[str] = []

    def text(self, start: str) -> str:
        """Return the whole grammar for texts of the expression `start`."""
        recursive = (f"n{place}: {body}" for place, body in enumerate(self._recursive))
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._rules.items()), *recursive, *self._notes])

    def rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"r{len(self._rules)}")

    def terminal(self, body: str) -> str:
        return self._rules.setdefault(body, f"T{len(self._rules)}")

    def lazy(self, body: str) -> str:
        """Add a rule that matches as little text as it can. Returns its name."""
        name = self._rules.setdefault(f"{body}  ", f"l{len(self._rules)}[lazy]")
        return name.removesuffix("[lazy]")

    def named(self) -> str:
        """Return the name of a rule that is defined later, so that it may name itself."""
        self._recursive.append("")
        return f"n{len(self._recursive) - 1}"

    def define(self, name: str, body: str) -> None:
        self._recursive[int(name[1:])] = body

    def json(self, schema: Mapping[str, Any], at: str = "") -> str:
        """Return a rule for JSON of a schema. `at` is its path in the request, which a refusal names."""
        placed = {"$comment": at, **{key: value for key, value in schema.items() if key != "$comment"}} if at else schema
        return self.rule("%json " + json.dumps({**placed, "x-guidance": _BLANKS}))

    def note(self, schema: Mapping[str, Any], at: str) -> None:
        """Note a schema in a comment if a terminal describes its strings: a refusal finds the keyword to blame there."""
        if at and {"pattern", "allOf"} & schema.keys():
            self._notes.append("// %json " + json.dumps({"$comment": at, **schema}))

    def literal(self, text: str) -> str:
        """Return an expression for this text, with the special tokens that it names."""
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
        """Return the first special token that a text names, and the text behind it."""
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
        """Return the special tokens that any of the texts names."""
        named = {match.group() for text in texts for match in _NAMED.finditer(text)}
        return sorted({token for name in named if (token := self._token_id(name)) is not None})


EMPTY = '""'
_DEEP = 40
"""Values within values that are described one by one, without those behind references; schemas with deeper ones are refused."""
_MOST = 4000
"""Number of values described in all. Raising it: a schema with parts that refer to each other takes longer to write out, 10 us per value."""


def lax_value(lark: Lark, schema: Mapping[str, Any], delimiter: str) -> str:
    """Return an expression for the values of a schema.

    Raises:
        InvalidRequest: a keyword can't be followed; `field` is its path.
    """
    return _Lax(lark, schema, delimiter).value(schema, place_of(schema), _DEEP)


class _Lax:
    def __init__(self, lark: Lark, root: Mapping[str, Any], delimiter: str) -> None:
        self._lark, self._root, self._delimiter = lark, root, delimiter
        self._left = _MOST
        self._behind: dict[str, str] = {}
        """Rules for what references lead to."""

    def value(self, schema: object, at: str, deep: int) -> str:
        self._left -= 1
        if self._left < 0 or deep == 0:
            raise refusal_of(at, "it has too many values within values to be followed", "Send a smaller schema.")
        match (
            {key: value for key, value in cast("Mapping[str, Any]", schema).items() if key not in NOTHING}
            if isinstance(schema, dict)
            else {}
        ):
            case {"$ref": str(where), **rest} if not rest:
                if where not in self._behind:
                    self._behind[where] = name = self._lark.named()
                    self._lark.define(name, self._any_of(leaves(schema, self._root, at), deep - 1))
                return self._behind[where]
            case {"anyOf": list(options), **rest} if not rest:
                each = (
                    self.value(option, f"{at}.anyOf[{n}]", deep - 1)
                    for n, option in enumerate(cast("list[object]", options))
                    if option is not False
                )
                return self._lark.rule(" | ".join(each))
            case _:
                return self._any_of(leaves(schema, self._root, at), deep)

    def _any_of(self, some: list[Leaf], deep: int) -> str:
        return self._lark.rule(" | ".join(self._leaf(leaf, deep) for leaf in some))

    def _leaf(self, leaf: Leaf, deep: int) -> str:
        fields, at = leaf
        if (values := listed_values(leaf)) is not None:
            return self._lark.rule(" | ".join(map(self._constant, values)))
        match fields.get("type"):
            case list(kinds):
                return self._any_of([Leaf({**fields, "type": kind}, at) for kind in cast("list[str]", kinds)], deep)
            case "object":
                return self._object(leaf, deep)
            case "array":
                return self._array(leaf, deep)
            case "string":
                return self._string(leaf)
            case "boolean" | "null" | "integer" | "number":
                return self._lark.json(fields, at)
            case _:
                return self._any(2)

    def _any(self, deep: int) -> str:
        options = [self._string(Leaf({}, "")), self._lark.json({"type": ["number", "boolean", "null"]})]
        if deep:
            inner = self._any(deep - 1)
            options += [f'"[" ({inner} ("," {inner})*)? "]"', self._members(inner)]
        return self._lark.rule(" | ".join(options))

    def _members(self, value: str) -> str:
        member = self._lark.rule(f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ ":" {value}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _object(self, leaf: Leaf, deep: int) -> str:
        named = members(leaf)
        if not named:
            free = free_members(leaf)
            if free is False:
                return '"{" "}"'
            return self._lark.rule(
                self._members(self._any(2) if free in (True, {}) else self.value(free, f"{leaf.at}.additionalProperties", deep - 1))
            )
        # One rule for what may follow each member, from the last one on: with a comma before it, and as the first one.
        later, first = "", ""
        for key, schema, at, is_required in reversed(named):
            member = f"{self._lark.quoted(key + ':')} {self.value(schema, at, deep - 1)}"
            first = self._lark.rule(f"{member} {later}" if is_required else f"{member} {later} | {first or EMPTY}")
            later = self._lark.rule(f'"," {member} {later}' if is_required else f'("," {member})? {later}')
        return self._lark.rule(f'"{{" {first} "}}"')

    def _array(self, leaf: Leaf, deep: int) -> str:
        fields, at = leaf
        for keyword in ("prefixItems", "items"):
            if isinstance(fields.get(keyword), list):
                raise refusal_of(
                    f"{at}.{keyword}", "places of a list can't be followed in this model's format", "Describe all items by items."
                )
        items, least, most = fields.get("items", True), fields.get("minItems") or 0, fields.get("maxItems")
        if most == 0 or (items is False and not least):
            return '"[" "]"'
        item = self._any(2) if items in (True, {}) else self.value(items, f"{at}.items", deep - 1)
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return self._lark.rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')

    def _string(self, leaf: Leaf) -> str:
        quote, body = self._lark.literal(self._delimiter), text_terminal(leaf.fields)
        self._lark.note(leaf.fields, leaf.at)
        if self._lark.first_special(self._delimiter):
            return f"{quote} {self._lark.terminal(body)} {quote}"
        body += f" & ~/(.|\\n)*{in_regex(re.escape(self._delimiter))}(.|\\n)*/"
        return f"{quote} {self._lark.terminal(f'{self._lark.terminal(body)} {self._lark.quoted(self._delimiter)}')}"

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return (
                f"{self._lark.literal(self._delimiter)} {self._lark.quoted(value) if value else ''} {self._lark.literal(self._delimiter)}"
            )
        return self._lark.quoted(json.dumps(value, separators=(",", ":")))
