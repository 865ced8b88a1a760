"""Reads arguments between tags, and writes them as JSON.

A value may hold any text, the tags of its own format too. `_Arguments.ends_value` decides where a value ends, by how it began and by what follows:

- A value that begins with the line break of its format is bound to lines: it ends with a line break and the closing tag. Others end with the tag.
- The closing tag counts if the call goes on behind it as calls do: with another argument, the end of the call, or the end of the text. If several
  closing tags follow one another, the last ones are the real ones.
- Without the closing tag a value ends at the opening of an argument that the tool has and the call had not, and at the end of the call.

A string is written as it comes, any other value once it is whole. If the text ends within a call, the JSON stays open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from paceline.server.formats.cursor import SPECIAL, Cursor, Marks, json_escaped
from paceline.server.formats.format import Calls, Parameters
from paceline.server.formats.tagged import STRING, as_json, types_of

MAX_HEAD = 256
"""Characters of a name or a key."""
_MAX_RUN = 8
"""Closing tags that may follow one another behind a value. Raising it: a value may end with more tags, and each is looked at more often."""


def read_head(cursor: Cursor, ends: Marks, stays: AbstractSet[str]) -> Generator[None, None, str | None]:
    """Read a name, and the mark behind it unless that stays. None: none stands here."""
    text: list[str] = []
    yield from cursor.blanks()
    while len(text) <= MAX_HEAD:
        if end := (yield from cursor.mark(ends)):
            if end not in stays:
                cursor.take(len(end))
            return "".join(text)
        if (yield from cursor.peek()) in {"", "\n"}:
            return None
        text.append(cursor.take())
    return None


class _Key(NamedTuple):
    """The head of an argument, as it stands ahead."""

    name: str
    types: frozenset[str] | None
    """None: the tag does not say."""
    length: int
    """Characters up to the value."""
    is_known: bool
    """The tool has such an argument, and the call had none so far."""
    is_broken: bool = False
    """The tag behind the key is missing, and the value follows at once."""


def read_parameters(
    cursor: Cursor,
    way: Calls,
    outer: Marks,
    schema: Mapping[str, Any],
    is_special: Callable[[str], bool],
    begin: Callable[[], None],
    say: Callable[[str], None],
) -> Generator[None, None, bool | None]:
    """Read the arguments of a call, up to the end of the call.

    Args:
        cursor: behind the head of the call.
        way: how calls are written.
        outer: what may follow a call: the ends of a section, and what begins calls.
        schema: of the tool's parameters.
        is_special: whether a mark is a special token, which is never part of a text.
        begin: called before the first call of `say`.
        say: gets the JSON.

    Returns:
        Whether the arguments are whole. None: there is neither an argument nor an end.
    """
    assert way.parameters
    return (yield from _Arguments(cursor, way, way.parameters, outer, schema, is_special, say).read(begin))


class _Arguments:
    def __init__(
        self,
        cursor: Cursor,
        way: Calls,
        tags: Parameters,
        outer: Marks,
        schema: Mapping[str, Any],
        is_special: Callable[[str], bool],
        say: Callable[[str], None],
    ) -> None:
        self._cursor, self._tags, self._schema, self._say, self._is_special = cursor, tags, schema, say, is_special
        self._opens, self._key_ends, self._closes, self._ends = map(Marks, (tags.open, tags.key_end, tags.close, way.close))
        self._in_sections = bool(way.begin)
        self._outer = outer
        self._behind = self._ends | outer
        self._in_value = self._opens | self._closes | self._ends
        self._all = self._in_value | outer
        properties = schema.get("properties")
        self._left = set(cast("Mapping[str, Any]", properties)) if isinstance(properties, Mapping) else set[str]()
        """Arguments that the tool has and that were not read."""

    def read(self, begin: Callable[[], None]) -> Generator[None, None, bool | None]:
        cursor, n = self._cursor, 0
        while True:
            cursor.hold()
            yield from cursor.blanks()
            key = yield from self._key(0)
            mark = (yield from cursor.mark(self._behind)) if key is None else ""
            if key is None and not (mark in self._ends.literals or (mark and n)):
                if not n:
                    return None
                if cursor.breaks_off(self._all, 0):
                    return False
                self._say("}")  # a text that is not an argument
                return True
            if not n:
                begin()
            cursor.release()
            if key is None:
                cursor.take(len(mark) if mark in self._ends.literals else 0)
                self._say("}" if n else "{}")
                return True
            cursor.take(key.length)
            self._left.discard(key.name)
            self._say(("{" if not n else ", ") + json.dumps(key.name, ensure_ascii=False) + ": ")
            if not (yield from self._value(types_of(self._schema, key.name) if key.types is None else key.types)):
                return False
            n += 1

    def _key(self, ahead: int) -> Generator[None, None, _Key | None]:
        """Return the head of the argument that stands ahead. Its opening tag, or the tag behind the key, may be missing if the tool has the key."""
        cursor = self._cursor
        opening = yield from cursor.mark(self._opens, ahead)
        if not opening and not self._left:
            return None
        start = at = ahead + len(opening)
        said, line_ends = "", False
        while not (end := (yield from cursor.mark(self._key_ends, at))):
            c = yield from cursor.at(at)
            line_ends = c == "\n"
            if not c or line_ends or at - start > MAX_HEAD or not (opening or self._may_be_key(said)):
                break
            said += c
            at += 1
        name, types = self._named(said)
        is_known = name in self._left
        if is_known and (end or (opening and line_ends)):
            return _Key(name, types, at + len(end) - ahead, is_known)
        if not opening:
            return None
        begun = max((one for one in self._left if said.startswith(one) and one != name), key=len, default="")
        if begun and (not end or any(mark in said for mark in self._in_value.literals)):
            return _Key(begun, None, len(opening) + len(begun), is_known=True, is_broken=True)
        return _Key(name, types, at + len(end) - ahead, is_known) if end and name else None

    def _may_be_key(self, said: str) -> bool:
        """Return whether a text without an opening tag may be, or become, the key of an argument that the tool has."""
        return any(name.startswith(said) or said.startswith(name) for name in self._left)

    def _named(self, said: str) -> tuple[str, frozenset[str] | None]:
        """Return the key, and the types that its tag says, of the text between two tags."""
        tags = self._tags
        types = STRING if tags.string and tags.string in said else frozenset[str]() if tags.json and tags.json in said else None
        if types is not None:
            said = said.replace(tags.string, "").replace(tags.json, "")
        return said.partition(SPECIAL)[0].strip(), types

    def _value(self, types: frozenset[str]) -> Generator[None, None, bool]:
        """Read a value and its closing tag. False: the text ends in it."""
        cursor, pad = self._cursor, self._tags.pad
        is_bound = bool(pad) and (yield from cursor.peek()) == pad
        cursor.take(len(pad) if is_bound else 0)
        is_text, has_text = types == STRING, False
        pieces: list[str] = []

        def say(text: str) -> None:
            nonlocal has_text
            has_text = has_text or bool(text)
            if is_text:
                self._say(json_escaped(text))
            else:
                pieces.append(text)

        if is_text:
            self._say('"')
        while True:
            blanks, mark = yield from cursor.text(self._in_value, say)
            if not mark:
                say(blanks)
                if not is_text:
                    self._say("".join(pieces))
                return False
            at_line = not is_bound or blanks.endswith(pad) or not (has_text or blanks)
            if (yield from self.ends_value(mark, at_line=at_line)):
                break
            say(blanks + cursor.take())
        is_closed = mark in self._closes.literals
        say(blanks.removesuffix(pad) if is_bound and is_closed else blanks if is_closed else blanks.removesuffix("\n").removesuffix(pad))
        self._say('"' if is_text else as_json("".join(pieces), types))
        cursor.take(len(mark) if is_closed else 0)
        return True

    def ends_value(self, mark: str, *, at_line: bool) -> Generator[None, None, bool]:
        """Return whether a value ends at the mark that stands here.

        Args:
            at_line: the mark stands where a mark must stand to end this value.
        """
        cursor = self._cursor
        if mark in self._opens.literals:
            key = (yield from self._key(0)) if at_line else None
            return key is not None and key.is_known and not key.is_broken
        if mark in self._ends.literals:
            return at_line and (yield from self._is_end_of_call(len(mark)))
        ahead = yield from cursor.behind_blanks(len(mark))
        if key := (yield from self._key(ahead)):
            return at_line or key.is_known
        found = yield from cursor.mark(self._behind, ahead)
        if not found:
            return at_line and cursor.breaks_off(self._all, ahead)
        return (yield from self._is_outside(ahead + len(found))) and (at_line or (yield from self._is_end_of_call(ahead + len(found))))

    def _is_end_of_call(self, ahead: int) -> Generator[None, None, bool]:
        """Return whether the end of a call, which stands before this place, ends a value that has no closing tag."""
        behind = yield from self._cursor.behind_blanks(ahead)
        found = yield from self._cursor.mark(self._outer, behind)
        is_sure = bool(found) or (not self._in_sections and not (yield from self._cursor.at(behind)))
        if not is_sure and not all(map(self._is_special, self._ends.literals)):
            return False
        is_outside = yield from self._is_outside(ahead)
        return is_outside and not self._cursor.is_cut  # a text that was cut here may be a value that names these tags

    def _is_outside(self, ahead: int) -> Generator[None, None, bool]:
        """Return whether the closing tags that follow close no value again."""
        for _ in range(_MAX_RUN):
            ahead = yield from self._cursor.behind_blanks(ahead)
            if (yield from self._cursor.mark(self._closes, ahead)):
                return False
            if not (found := (yield from self._cursor.mark(self._behind, ahead))):
                break
            ahead += len(found)
        return True
