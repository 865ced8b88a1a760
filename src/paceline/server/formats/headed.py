"""Reads answers of several messages: each has a head that names its recipient and its channel, and a text."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from paceline.server.formats.cursor import BLANKS, PLAIN, SPECIAL, Cursor, Marks, read_json_value
from paceline.server.formats.format import Header
from paceline.server.formats.said import Said

_MAX_WORDS = 6
"""Words of a head: role, recipient, channel, constraint, and what a model adds. Raising it: a text that names a mark is held back longer."""
_MAX_WORD = 160
"""Characters of one."""


def read_messages(cursor: Cursor, said: Said, header: Header, tools: frozenset[str], *, in_reasoning: bool) -> Generator[None, None, None]:
    """Read an answer that consists of messages with heads.

    Args:
        said: takes what was read.
        tools: their names. A message to any other is a text.
        in_reasoning: the prompt ended inside a message of reasoning.
    """
    marks = Marks(header.marks)
    if in_reasoning:
        yield from _read_text(cursor, header, marks, said.reasoning)
    may_begin = not in_reasoning
    """A head may stand here without its first mark."""
    while True:
        blanks = yield from cursor.blanks()
        if not (yield from cursor.more()):
            said.content(blanks)
            return
        mark = yield from cursor.mark(marks)
        if mark in header.ends:
            cursor.take(len(mark))
            may_begin = True
            continue
        head: Head | None = None
        if mark or (may_begin and (yield from _begins_head(cursor, header))):
            cursor.hold()
            head = yield from _read_head(cursor, header, marks)
            text = cursor.release()
            if head is None and (mark or not (yield from cursor.more())):
                is_left_out = said.is_special(text) and not (yield from cursor.more())  # the answer ends within a head
                text = "" if is_left_out else said.without_special(text).removeprefix(mark) if said.is_special(mark) else text
            said.content("" if head else blanks + text)
        else:
            said.content(blanks)
        may_begin = False
        if head is not None:
            yield from cursor.blanks()
            name = head.recipient.removeprefix(header.tools)
            if name in tools and (yield from _read_call(cursor, said, name, Marks(header.ends))):
                continue
        is_thought = head is not None and head.channel == header.thoughts
        yield from _read_text(cursor, header, marks, said.reasoning if is_thought else said.content)


def _read_text(cursor: Cursor, header: Header, marks: Marks, say: Callable[[str], None]) -> Generator[None, None, None]:
    """Read the text of a message, up to the mark behind it or to the head of the next message."""
    while True:
        blanks, mark = yield from cursor.text(marks, say)
        if mark not in {header.message, header.constraint}:
            if not mark:
                say(blanks)
            return
        say(blanks)
        cursor.take(len(mark))


def _read_call(cursor: Cursor, said: Said, name: str, ends: Marks) -> Generator[None, None, bool]:
    """Read the arguments of a call that is a message. False: the message is a text."""
    if (yield from cursor.peek()) == "{":
        said.begin(name)
        if (yield from read_json_value(cursor, said.arguments)):
            said.end_call()
        return True
    if not (yield from cursor.mark(ends)):
        return not (yield from cursor.more())
    return said.call_whole(name)


@dataclass(slots=True)
class Head:
    """The head of one message."""

    role: str = ""
    channel: str = ""
    recipient: str = ""


def _read_head(cursor: Cursor, header: Header, marks: Marks) -> Generator[None, None, Head | None]:
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


def _begins_head(cursor: Cursor, header: Header) -> Generator[None, None, bool]:
    """Return whether a head stands here without its first mark: it begins with a recipient, a channel or the role."""
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
