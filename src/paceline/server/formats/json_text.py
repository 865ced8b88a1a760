"""JSON as models write it: gone over as it comes, and said on at once.

What is said is what was written, but for two things that models get wrong in strings: control characters (a line's end, say) are escaped, and a
backslash that escapes nothing is doubled. A value that breaks off is said as far as it goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from paceline.server.formats.cursor import BLANKS, Cursor

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[A-Za-z0-9+\-.]+")
_BETWEEN = re.compile(r"[A-Za-z0-9+\-., :\t\r\n]+")
_ESCAPES = '"\\/bfnrtu'
_CLOSING = {"{": "}", "[": "]"}


def escaped(text: str) -> str:
    """A text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded(text: str) -> str | None:
    """The text of a JSON string. None: it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    # Half a surrogate pair is no character, and nothing that is written from here on could hold it.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else None


def json_string(cursor: Cursor, say: Callable[[str], None]) -> Generator[None, None, bool]:
    """Go over the string that begins here. False: it breaks off."""
    say(cursor.take())
    while c := (yield from cursor.peek()):
        if run := cursor.run(_IN_STRING):
            say(run)
        elif c == '"':
            say(cursor.take())
            return True
        elif c != "\\":
            say(escaped(cursor.take()))
        elif not (yield from cursor.more(1)):
            say(cursor.take())
        else:
            pair = cursor.take(2)
            say(pair if pair[1] in _ESCAPES else escaped(pair))
    return False


def json_value(cursor: Cursor, say: Callable[[str], None]) -> Generator[None, None, bool]:
    """Go over the value that begins here. False: it breaks off, at the end of the text or before a character that no JSON can have there."""
    closing: list[str] = []
    while c := (yield from cursor.peek()):
        if c == '"':
            if not (yield from json_string(cursor, say)):
                return False
        elif c in _CLOSING:
            closing.append(_CLOSING[c])
            say(cursor.take())
        elif closing and c == closing[-1]:
            closing.pop()
            say(cursor.take())
        elif closing and (run := cursor.run(_BETWEEN)):
            say(run)
        elif not closing and c not in BLANKS and (run := cursor.run(_WORD)):
            say(run)
            while run and (yield from cursor.more()):
                run = cursor.run(_WORD)
                say(run)
        else:
            return False
        if not closing:
            return True
    return False
