"""Reads the heads of messages, for models that write several messages in an answer: who a message is to, and in which channel it is."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from paceline.server.formats.cursor import BLANKS, PLAIN, SPECIAL, Cursor, Marks
from paceline.server.formats.format import Header

_MAX_WORDS = 6
"""Words of a head: role, recipient, channel, constraint, and what a model adds. Raising it: a text that names a mark is held back longer."""
_MAX_WORD = 160
"""Characters of one."""


@dataclass(slots=True)
class Head:
    """The head of one message."""

    role: str = ""
    channel: str = ""
    recipient: str = ""


def read_head_of_message(cursor: Cursor, header: Header, marks: Marks) -> Generator[None, None, Head | None]:
    """Read a head, and the mark behind it. None: what stands here is not a head, or breaks off.

    Args:
        marks: all marks of the header.
    """
    head, behind, n = Head(), "", 0
    while n <= _MAX_WORDS:
        c = yield from cursor.peek()
        if not c:
            return None
        if c in BLANKS:
            cursor.take()
        elif c == SPECIAL:
            while (yield from cursor.peek()) not in {"", PLAIN}:
                cursor.take()
            cursor.take()
        elif mark := (yield from cursor.mark(marks)):
            if mark == header.message:
                cursor.take(len(mark))
                return head
            if mark in header.ends or (mark == header.start and n) or (mark == header.channel and head.channel):
                return None
            behind = cursor.take(len(mark))
        elif c == "{" and head.recipient:  # the mark before the text is missing
            return head
        else:
            n += 1
            word = yield from _word(cursor, marks)
            if len(word) > _MAX_WORD:
                return None
            _note(word, behind, head, header)
    return None


def begins_head(cursor: Cursor, header: Header) -> Generator[None, None, bool]:
    """Return whether a head stands here whose first mark is missing: it begins with a recipient, a channel or the role."""
    words = Marks((header.recipient + header.tools, header.role, header.thoughts, header.calls, header.answers))
    if not (found := (yield from cursor.mark(words))):
        return False
    behind = yield from cursor.at(len(found))
    return found.endswith(header.tools) or behind in {"", " ", "<", SPECIAL, header.message[:1]}


def _word(cursor: Cursor, marks: Marks) -> Generator[None, None, str]:
    word = ""
    while (c := (yield from cursor.peek())) and c not in BLANKS + SPECIAL + "{" and len(word) <= _MAX_WORD:
        if word and (yield from cursor.mark(marks)):
            break
        word += cursor.take()
    return word or cursor.take()


def _note(word: str, behind: str, head: Head, header: Header) -> None:
    """Keep what a word says.

    Args:
        behind: the last mark before it.
    """
    channels = (header.thoughts, header.answers, header.calls)
    if word.startswith(header.recipient):
        head.recipient = head.recipient or word.removeprefix(header.recipient)
    elif behind == header.channel and not head.channel:
        head.channel = word
    elif not head.channel and word.removeprefix(header.role) in channels:
        head.channel = word.removeprefix(header.role)
    elif not head.role:
        head.role = word
