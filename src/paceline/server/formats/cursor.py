"""A place in a text that is still being written.

Law: a reader at a cursor waits (`yield`) until the text it needs is there, or the text has ended, and then moves on for good. No result depends on how
the text was cut, and nothing is read twice. Looking ahead is bounded by the longest mark.

JSON as models write it is read as it comes, and passed on at once.

The JSON passed on is what the model wrote, except for two common mistakes in strings: control characters (such as a line break) are escaped, and a
backslash that escapes nothing is doubled. A value that breaks off is passed on as far as it goes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable

BLANKS = " \t\r\n"
SPECIAL = "\ud800"
"""Stands before the name of a special token that is not a mark of the format. No text that was decoded has it."""
PLAIN = "\udfff"
"""Stands behind that name."""


class Marks:
    """Literals that are looked for together."""

    def __init__(self, literals: Iterable[str] = ()) -> None:
        self.literals = frozenset(literals)
        self._prefixes = frozenset(text[:i] for text in self.literals for i in range(1, len(text) + 1))
        first = "".join(sorted({text[0] for text in self.literals}))
        other = f"[^{re.escape(first + BLANKS)}]"
        self.others = re.compile(f"(?:{other}++|[{BLANKS}]++(?={other}))++" if first else r"[\s\S]+")
        """Text in which no literal begins, up to blanks that a literal may follow; any text if there are no literals."""

    def __or__(self, other: Marks) -> Marks:
        return Marks(self.literals | other.literals)

    def begun(self, text: str) -> bool:
        return text in self._prefixes


class Cursor:
    """Where the reading of a text stands."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = self.is_cut = False
        self._held: list[str] | None = None
        """Text taken since `hold`."""
        self.looked = 0
        """Characters looked at, again or not: how much work was done."""

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, *, is_cut: bool = False) -> None:
        """End the text.

        Args:
            is_cut: more would have come.
        """
        self._ended, self.is_cut = True, is_cut

    def more(self, ahead: int = 0) -> Generator[None, None, bool]:
        """Wait for the character here, or some characters ahead. False: the text ends before it."""
        while self._at + ahead >= len(self._text):
            if self._ended:
                return False
            yield
        return True

    def peek(self) -> Generator[None, None, str]:
        """Return the character here, without taking it; empty at the end."""
        self.looked += 1
        return self._text[self._at] if (yield from self.more()) else ""

    def take(self, length: int = 1) -> str:
        """Go over characters that are there."""
        taken = self._text[self._at : self._at + length]
        self._at += length
        if self._held is not None:
            self._held.append(taken)
        return taken

    def run(self, pattern: re.Pattern[str]) -> str:
        """Go over what matches here, of the text that is there: it may go on behind that."""
        match = pattern.match(self._text, self._at)
        taken = self.take(match.end() - self._at) if match else ""
        self.looked += len(taken)
        return taken

    def at(self, ahead: int) -> Generator[None, None, str]:
        """Return the character some characters ahead; empty if the text ends before it."""
        self.looked += 1
        return self._text[self._at + ahead] if (yield from self.more(ahead)) else ""

    def mark(self, marks: Marks, ahead: int = 0) -> Generator[None, None, str]:
        """Return the longest literal here, or some characters ahead, without taking it; empty if there is none."""
        found, length = "", 0
        while (yield from self.more(ahead + length)):
            length += 1
            self.looked += 1
            text = self._text[self._at + ahead : self._at + ahead + length]
            if not marks.begun(text):
                break
            if text in marks.literals:
                found = text
        return found

    def breaks_off(self, marks: Marks, ahead: int) -> bool:
        """Return whether the text ends here, or within one of the literals. Call it behind `mark` with the same place."""
        rest = self._text[self._at + ahead :]
        return self._ended and (not rest or marks.begun(rest))

    def behind_blanks(self, ahead: int = 0) -> Generator[None, None, int]:
        """Return how far ahead the next character is that is not a blank, or the end."""
        while (c := (yield from self.at(ahead))) and c in BLANKS:
            ahead += 1
        return ahead

    def text(self, marks: Marks, say: Callable[[str], None]) -> Generator[None, None, tuple[str, str]]:
        """Go over text up to one of the marks, or to the end. Returns the blanks before it, which were not said, and the mark."""
        blanks = ""
        while c := (yield from self.peek()):
            if run := self.run(marks.others):
                say(blanks + run)
                blanks = ""
            elif c in BLANKS:
                blanks = yield from self.blanks()
            elif mark := (yield from self.mark(marks)):
                return blanks, mark
            else:
                say(blanks + self.take())
                blanks = ""
        return blanks, ""

    def blanks(self) -> Generator[None, None, str]:
        taken: list[str] = []
        while (c := (yield from self.peek())) and c in BLANKS:
            taken.append(self.take())
        return "".join(taken)

    def hold(self) -> None:
        """Keep the text taken from here on, if it is not kept already, until its kind is clear."""
        if self._held is None:
            self._held = []

    @property
    def held(self) -> str:
        return "".join(self._held or ())

    def release(self) -> str:
        """Return the text taken since `hold`, and stop holding."""
        text, self._held = self.held, None
        return text


_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile(r"[A-Za-z0-9+\-.]+")
_BETWEEN = re.compile(r"[A-Za-z0-9+\-., :\t\r\n]+")
_ESCAPES = '"\\/bfnrtu'
_CLOSING = {"{": "}", "[": "]"}


def json_escaped(text: str) -> str:
    """Return a text as it stands in a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decode_json_string(text: str) -> str | None:
    """Return the text of a JSON string. None: it is not a JSON string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    # Half a surrogate pair is not a character, and UTF-8 can't hold it.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else None


def read_json_string(cursor: Cursor, say: Callable[[str], None]) -> Generator[None, None, bool]:
    """Go over the string that begins here. False: it breaks off."""
    say(cursor.take())
    while c := (yield from cursor.peek()):
        if run := cursor.run(_IN_STRING):
            say(run)
        elif c == '"':
            say(cursor.take())
            return True
        elif c != "\\":
            say(json_escaped(cursor.take()))
        elif not (yield from cursor.more(1)):
            say(cursor.take())
        else:
            pair = cursor.take(2)
            say(pair if pair[1] in _ESCAPES else json_escaped(pair))
    return False


def read_json_value(cursor: Cursor, say: Callable[[str], None]) -> Generator[None, None, bool]:
    """Go over the value that begins here. False: it breaks off, at the end of the text or before a character that no JSON can have there."""
    closing: list[str] = []
    while c := (yield from cursor.peek()):
        if c == '"':
            if not (yield from read_json_string(cursor, say)):
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
