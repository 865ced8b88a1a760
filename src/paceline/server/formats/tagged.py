"""Arguments that are not written as JSON, said as JSON while they are read: between tags, or with bare keys and delimiters of their own.

Strings are said as they come. A value of another type is said once it is whole. Where the text ends within a value, so does the JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from paceline.server.formats.cursor import BLANKS, Cursor, Marks
from paceline.server.formats.format import Parameters
from paceline.server.formats.json_text import escaped, json_string
from paceline.server.formats.schema_types import STRING, as_json

MAX_HEAD = 256
"""Characters of a name or a key."""


def head(cursor: Cursor, ends: Marks, stays: frozenset[str]) -> Generator[None, None, str | None]:
    """Go over a name or a key, and over the mark behind it if that is none that stays. None: none stands here."""
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


def parameters(
    cursor: Cursor,
    tags: Parameters,
    ends: tuple[str, ...],
    begin: Callable[[], None],
    say: Callable[[str], None],
    types: Callable[[str], frozenset[str]],
) -> Generator[None, None, bool]:
    """Go over arguments between tags, up to what ends the call. False: there is neither an argument nor an end.

    Args:
        cursor: at the first tag, or at the end of a call without arguments.
        tags: how an argument is written.
        ends: end the call. One is gone over.
        begin: said before anything else.
        say: gets the JSON.
        types: the types of an argument, by its key.
    """
    opens, key_ends, closes, all_ends = Marks(tags.open), Marks(tags.key_end), Marks(tags.close), Marks(ends)
    marks, n = opens | all_ends, 0
    while True:
        cursor.hold()
        yield from cursor.blanks()
        mark = yield from cursor.mark(marks)
        key = None
        if mark in opens.literals:
            cursor.take(len(mark))
            key = yield from head(cursor, key_ends, frozenset())
        elif mark:
            cursor.take(len(mark))
            if not n:
                begin()
            cursor.release()
            say("}" if n else "{}")
            return True
        if key is None:
            say("}" if n else "")
            return n > 0
        if not n:
            begin()
        cursor.release()
        one = STRING if tags.string and tags.string in key else frozenset[str]() if tags.json and tags.json in key else None
        key = key.replace(tags.string, "").replace(tags.json, "").strip() if one is not None else key.strip()
        say(("{" if not n else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if not (yield from _value(cursor, closes, tags.pad, types(key) if one is None else one, say)):
            return True
        n += 1


def _value(cursor: Cursor, closes: Marks, pad: str, types: frozenset[str], say: Callable[[str], None]) -> Generator[None, None, bool]:
    """Go over a value and its closing tag. False: the text ends in it."""
    if pad and (yield from cursor.peek()) == pad:
        cursor.take()
    if types == STRING:
        say('"')
        blanks, mark = yield from cursor.text(closes, lambda text: say(escaped(text)))
        say(escaped(blanks.removesuffix(pad) if mark else blanks) + ('"' if mark else ""))
    else:
        pieces: list[str] = []
        blanks, mark = yield from cursor.text(closes, pieces.append)
        text = "".join(pieces) + blanks
        say(as_json(text.removesuffix(pad), types) if mark else text)
    cursor.take(len(mark))
    return bool(mark)


_KEY = re.compile(r'[^,:{}\[\]"<\s]+')
_WORD = re.compile(r'[^,{}\[\]"<\r\n\t]+')
_CLOSING = {"{": "}", "[": "]"}


def lax_object(cursor: Cursor, delimiter: str, say: Callable[[str], None]) -> Generator[None, None, bool]:
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
            if not (yield from json_string(cursor, say)):
                return False
        elif (yield from cursor.mark(marks)):
            cursor.take(len(delimiter))
            say('"')
            blanks, mark = yield from cursor.text(marks, lambda text: say(escaped(text)))
            say(escaped(blanks) + ('"' if mark else ""))
            cursor.take(len(mark))
        elif word := (yield from _word(cursor, _KEY if in_key else _WORD)):
            say(json.dumps(word, ensure_ascii=False) if in_key else as_json(word, _BARE) if (yield from cursor.more()) else word)
        else:
            return False
        if not closing:
            return True
    return False


_BARE = frozenset({"number", "integer", "boolean", "null"})


def _word(cursor: Cursor, pattern: re.Pattern[str]) -> Generator[None, None, str]:
    pieces: list[str] = []
    while run := cursor.run(pattern):
        pieces.append(run)
        yield from cursor.more()
    return "".join(pieces).rstrip(BLANKS)
