"""Reads keyword arguments as Python writes them, and says them as JSON.

Strings are said as they come, words once they are whole. Where the text ends within a call, the JSON stays open.

Templates write strings without escapes. So a quote ends a string only if what follows may follow a value: another argument, the end of the call, or
within lists and dictionaries a comma, a colon or a bracket.
"""

from __future__ import annotations

import json
import re
import sys
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
"""Characters after a backslash, and their meaning in JSON."""
_CODES = {"x": 2, "u": 4, "U": 8}
"""Hexadecimal digits of an escape."""
_CONTROLS = {"a": "\\u0007", "v": "\\u000b"}
_PREFIXES = frozenset({"r", "b", "f", "u", "br", "rb", "fr", "rf"})
"""Words directly before a quote that belong to the string. Those with an r keep backslashes."""
_WHOLE = re.compile(r"[+-]?0(?:[xX][0-9a-fA-F_]+|[oO][0-7_]+|[bB][01_]+)")


def read_python_arguments(cursor: Cursor, names: Sequence[str], begin: Callable[[], None], say: Say) -> Generator[None, None, bool | None]:
    """Read the arguments of a call, behind its opening parenthesis, and the closing one.

    Args:
        names: the tool's arguments, in order, for values without a name.
        begin: called before the first call of `say`.
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
        yield from cursor.blanks()
        if (yield from cursor.peek()) not in {",", ")", ""}:
            return False  # two values without a comma: which one is meant is not known


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
            elif (yield from cursor.peek()) in {"'", '"'}:
                if word.lower() not in _PREFIXES:
                    return False
                is_raw = "r" in word.lower()
                if not (yield from _string(cursor, say, is_named=is_named, is_inner=bool(closing), is_raw=is_raw)):
                    return False
            elif not (yield from cursor.more()):
                say(word)
                return False
            else:
                said = _number(word) or as_json(word, BARE)
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


def _number(word: str) -> str:
    """Return a number that Python writes otherwise than JSON, as JSON; empty if the word is not one. No digit is lost."""
    if _WHOLE.fullmatch(word):
        try:
            return str(int(word, 0))
        except ValueError:  # underscores in wrong places, or more digits than Python takes
            return ""
    sign, point, exponent = word[:1] if word[:1] in "+-" else "", word.find("."), re.search(r"[eE][+-]?\d+$", word)
    end = exponent.start() if exponent else len(word)
    whole, fraction = (word[len(sign) : point], word[point + 1 : end]) if 0 <= point < end else (word[len(sign) : end], None)
    digits = [part.replace("_", "") for part in (whole, fraction or "")]
    if not any(digits) or not all(part.isascii() and (part.isdigit() or not part) for part in digits):
        return ""
    first = digits[0].lstrip("0") or "0"
    if first != digits[0] and fraction is None and digits[0].strip("0"):
        return ""  # 007 is an identifier, not a number of Python
    return sign.replace("+", "") + first + ("" if fraction is None else "." + (digits[1] or "0")) + word[end:]


def _string(cursor: Cursor, say: Say, *, is_named: bool, is_inner: bool, is_raw: bool = False) -> Generator[None, None, bool]:
    """Read a string. False: it breaks off.

    Args:
        is_raw: a backslash stands for itself, also before a quote, which does not end the string then.
    """
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
        elif c == "\\" and is_raw:
            say("\\\\")
            cursor.take()
            if (c := (yield from cursor.peek())) and c in "'\"\\":
                say(json_escaped(cursor.take()))
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
    if n and len(digits) == n and int(digits, 16) <= sys.maxunicode:
        cursor.take(2 + n)
        say(json.dumps(chr(int(digits, 16)))[1:-1])
    elif octal := (yield from _octal(cursor)):
        cursor.take(1 + len(octal))
        say(json.dumps(chr(int(octal, 8)))[1:-1])
    elif c in _CONTROLS:
        cursor.take(2)
        say(_CONTROLS[c])
    elif c in _ESCAPES:
        cursor.take(2)
        say(_ESCAPES[c])
    else:
        cursor.take()
        say("\\\\")
    return True


def _octal(cursor: Cursor) -> Generator[None, None, str]:
    """Return the octal digits, at most three, behind the backslash that stands here."""
    digits = ""
    while len(digits) < 3 and (digit := (yield from cursor.at(1 + len(digits)))) and digit in "01234567":
        digits += digit
    return digits
