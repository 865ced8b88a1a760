"""Reads keyword arguments as Python writes them, and says them as JSON.

Strings are said as they come, words once they are whole. Where the text ends within a call, the JSON stays open.

Templates write strings without escapes. So a quote ends a string only if what follows may follow a value: another argument, the end of the call, or
within lists and dictionaries a comma, a colon or a bracket.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence

from paceline.server.formats.cursor import BLANKS, Cursor, json_escaped
from paceline.server.formats.tagged import BARE, as_json

Say = Callable[[str], None]
_MAX_NAME = 128
"""Characters of an argument's name."""
_IN_STRING = re.compile(r"[^'\"\\\x00-\x1f]+")
_IN_WORD = re.compile(r"[^,:(){}\[\]'\"\s=]+")
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_AS_JSON = {"[": "[", "(": "[", "{": "{", "]": "]", ")": "]", "}": "}"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", "'": "'", '"': '\\"', "/": "/", "\n": ""}
"""What stands behind a backslash, and what it means as JSON."""
_CODES = {"x": 2, "u": 4}
"""Hexadecimal digits of an escape."""


def read_python_arguments(cursor: Cursor, names: Sequence[str], begin: Callable[[], None], say: Say) -> Generator[None, None, bool | None]:
    """Read the arguments of a call, behind its opening parenthesis, and the closing one.

    Args:
        names: the tool's arguments, in order, for values without a name.
        begin: called before anything is said.
        say: gets the JSON.

    Returns:
        Whether the arguments are whole. None: no argument stands here.
    """
    n = 0
    while True:
        yield from cursor.blanks()
        c = yield from cursor.peek()
        if c == ")":
            if not n:
                begin()
            cursor.take()
            say("}" if n else "{}")
            return True
        if c == "," and n:
            cursor.take()
            continue
        length = yield from _name_ahead(cursor, 0)
        is_named = length > 0
        if is_named:
            key = cursor.take(length).rstrip("=").rstrip(BLANKS)
        elif c and n < len(names) and (c in _CLOSING or c in "'\"-TFN" or c.isdigit()):
            key = names[n]
        else:
            return False if n else None
        if not n:
            begin()
        say(("{" if not n else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        yield from cursor.blanks()
        if not (yield from _value(cursor, say, is_named=is_named)):
            return False
        n += 1


def _name_ahead(cursor: Cursor, ahead: int) -> Generator[None, None, int]:
    """Return the length of `name=` if it stands ahead, else 0."""
    start = ahead
    while (c := (yield from cursor.at(ahead))) and ahead - start <= _MAX_NAME and (c in "_-$" or c.isalnum()):
        ahead += 1
    end = yield from cursor.behind_blanks(ahead)
    return end + 1 - start if ahead > start and (yield from cursor.at(end)) == "=" else 0


def _value(cursor: Cursor, say: Say, *, is_named: bool) -> Generator[None, None, bool]:
    """Read a value. False: it breaks off."""
    closing: list[str] = []
    in_key = needs_comma = False
    while c := (yield from cursor.peek()):
        if c in BLANKS:
            cursor.take()
            continue
        if closing and c == closing[-1]:
            closing.pop()
            say(_AS_JSON[cursor.take()])
        elif closing and c == ",":
            cursor.take()
            needs_comma, in_key = True, closing[-1] == "}"
            continue
        elif closing and c == ":":
            say(cursor.take() + " ")
            in_key = False
            continue
        else:
            if needs_comma:
                say(", ")
            needs_comma = False
            if c in _CLOSING:
                closing.append(_CLOSING[c])
                in_key = c == "{"
                say(_AS_JSON[cursor.take()])
                continue
            if c in "'\"":
                if not (yield from _string(cursor, say, is_named=is_named, is_inner=bool(closing))):
                    return False
            elif not (word := (yield from _word(cursor))):
                return False
            elif not (yield from cursor.more()):
                say(word)
                return False
            else:
                said = as_json(word, BARE)
                say(json.dumps(word, ensure_ascii=False) if in_key and not said.startswith('"') else said)
        needs_comma = False
        if not closing:
            return True
    return False


def _word(cursor: Cursor) -> Generator[None, None, str]:
    pieces: list[str] = []
    while run := cursor.run(_IN_WORD):
        pieces.append(run)
        yield from cursor.more()
    return "".join(pieces)


def _string(cursor: Cursor, say: Say, *, is_named: bool, is_inner: bool) -> Generator[None, None, bool]:
    """Read a string. False: it breaks off."""
    quote = cursor.take()
    is_long = False
    if (yield from cursor.at(0)) == quote and (yield from cursor.at(1)) == quote:
        is_long = True
        cursor.take(2)
    say('"')
    while c := (yield from cursor.peek()):
        if run := cursor.run(_IN_STRING):
            say(run)
        elif c == quote and (yield from _ends_string(cursor, quote, is_long=is_long, is_named=is_named, is_inner=is_inner)):
            cursor.take(3 if is_long else 1)
            say('"')
            return True
        elif c == "\\":
            if not (yield from _escape(cursor, say)):
                return False
        else:
            say(json_escaped(cursor.take()))
    return False


def _ends_string(cursor: Cursor, quote: str, *, is_long: bool, is_named: bool, is_inner: bool) -> Generator[None, None, bool]:
    """Return whether the quote that stands here ends its string."""
    if is_long:
        return (yield from cursor.at(1)) == quote and (yield from cursor.at(2)) == quote and (yield from cursor.at(3)) != quote
    ahead = yield from cursor.behind_blanks(1)
    c = yield from cursor.at(ahead)
    if is_inner or not c:
        return not c or c in ",:]})"
    if c == "," and is_named:
        ahead = yield from cursor.behind_blanks(ahead + 1)
        c = yield from cursor.at(ahead)
        return c in {"", ")"} or (yield from _name_ahead(cursor, ahead)) > 0 or not (yield from cursor.at(ahead + _MAX_NAME))
    return c in ",)"


def _escape(cursor: Cursor, say: Say) -> Generator[None, None, bool]:
    """Read an escape of a string. False: it breaks off."""
    if not (c := (yield from cursor.at(1))):
        cursor.take()
        return False
    n = _CODES.get(c, 0)
    digits = ""
    while len(digits) < n and (digit := (yield from cursor.at(2 + len(digits)))) and digit in "0123456789abcdefABCDEF":
        digits += digit
    if n and len(digits) == n:
        cursor.take(2 + n)
        say("\\u" + digits.zfill(4))
    elif c in _ESCAPES:
        cursor.take(2)
        say(_ESCAPES[c])
    else:
        cursor.take()
        say("\\\\")
    return True
