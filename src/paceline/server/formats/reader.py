"""Reads what a model wrote into parts: content, reasoning, calls of tools.

Law: the joined parts depend only on the text, not on how it was cut. Time is linear in the text's length.

Text that is not a call stays content, character by character: a name that no offered tool has, a body that breaks off before the arguments begin, a mark
that is merely written about. A call has begun once its name and the first character of its arguments were read. If it breaks off later, its arguments
break off too. The marks of calls and reasoning are not part of anything, nor are blanks next to them (behind a call they stay if content goes on).

A mark that is a special token is never written about: if it opens nothing it is dropped, and if it opens a call it does so within reasoning too.
A special token that no description names ends the name that it stands in, is spelled within a string, and is dropped elsewhere.

Without `parallel` the first call is read and later ones are left out; text between and behind them is content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, cast

from paceline.server.formats.cursor import BLANKS, SPECIAL, Cursor, Marks, decode_json_string, read_json_string, read_json_value
from paceline.server.formats.format import Body, Calls, Format, Part, Thinking
from paceline.server.formats.headed import read_messages
from paceline.server.formats.parameters import read_head, read_parameters
from paceline.server.formats.python_call import read_python_arguments
from paceline.server.formats.said import Said
from paceline.server.formats.tagged import read_lax_object

Reading = Generator[None, None, None]
Text = Callable[[str], None]
"""Says what a text is part of."""


class AnswerReader:
    """Reads one answer, as it is written."""

    def __init__(
        self,
        format: Format,  # noqa: A002  (callers name it so)
        tools: Mapping[str, Mapping[str, Any]],
        *,
        in_reasoning: bool = False,
        parallel: bool = True,
        special: Collection[str] = (),
        required: bool = False,
    ) -> None:
        """Read an answer of this format.

        Args:
            tools: the JSON schema of each tool's parameters, by its name. Without any no call is read.
            in_reasoning: the prompt ended inside a reasoning block.
            parallel: several calls are taken.
            special: the special tokens among the format's marks.
            required: the answer has the form of calls, so a text that breaks off is part of one.
        """
        self._tools = tools
        self._thinking = format.thinking
        self._special = frozenset(special)
        self._skipped = frozenset(format.skipped) | self._special
        self._cursor = Cursor()
        self._said = Said(self._cursor, self._special, parallel=parallel, required=required and bool(tools))
        calls = format.calls if tools else ()
        self._sections = {mark: [each for each in calls if mark in each.begin] for each in calls for mark in each.begin}
        self._bare = {mark: [each] for each in reversed(calls) if each.bare or not each.begin for mark in each.open}
        self._at_start = {mark: [each] for each in reversed(calls) for mark in each.at_start}
        self._call_marks = Marks((*self._sections, *self._bare))
        is_ended = format.thinking is not None and format.thinking.ended_by_calls
        thought_marks = (mark for mark in self._call_marks.literals if is_ended or self._said.is_special(mark))
        self._thought_marks = Marks((*thought_marks, *self._special))
        opening = Marks(format.thinking.open if format.thinking else ())
        anywhere = opening if format.thinking and format.thinking.anywhere else Marks()
        self._content_marks = self._call_marks | anywhere | Marks(self._skipped)
        stray = format.thinking.close if format.thinking else ()
        self._start_marks = self._content_marks | opening | Marks((*self._at_start, *stray))
        header = format.header
        if header is None:
            self._reading = self._answer(in_reasoning=in_reasoning)
        else:
            self._reading = read_messages(self._cursor, self._said, header, frozenset(tools), in_reasoning=in_reasoning)
        next(self._reading, None)

    @property
    def looked(self) -> int:
        """Characters looked at so far, again or not."""
        return self._cursor.looked

    def feed(self, text: str) -> list[Part]:
        """Add text. Returns the parts that are certain now."""
        if text:
            self._cursor.feed(text)
            next(self._reading, None)
        return self._said.take()

    def end(self, *, is_cut: bool = False, has_failed: bool = False) -> list[Part]:
        """End the answer. Returns the remaining parts.

        Args:
            is_cut: the model would have written more.
            has_failed: the answer ends with an error, which shows all of its text.
        """
        self._cursor.end(is_cut=is_cut)
        next(self._reading, None)
        self._said.end(is_cut=is_cut and not has_failed)
        return self._said.take()

    # ------------------------------------------------------------------------------------------------- content and reasoning

    def _answer(self, *, in_reasoning: bool) -> Reading:
        cursor, blanks = self._cursor, ""
        if in_reasoning and self._thinking:
            yield from self._think(self._thinking)
            yield from cursor.blanks()
        elif self._start_marks.literals:
            blanks = yield from cursor.blanks()
        mark = yield from cursor.mark(self._start_marks)
        while True:
            behind = ""
            if not mark:
                self._said.content(blanks)
                blanks, mark = yield from cursor.text(self._content_marks, self._said.content)
            if not mark:
                self._said.content(blanks)
                return
            if self._thinking and mark in self._thinking.open:
                cursor.take(len(mark))
                yield from self._think(self._thinking)
                yield from cursor.blanks()
            elif self._thinking and mark in self._thinking.close:  # it was opened by the prompt, or there was none
                cursor.take(len(mark))
                yield from cursor.blanks()
            elif mark not in self._call_marks.literals and mark not in self._at_start:
                self._said.content(blanks)
                cursor.take(len(mark))
            elif (left := (yield from self._calls(mark, blanks, self._said.content))) is not None:
                behind = left + (yield from cursor.blanks())
            nothing_yet = not self._said.has_called and not self._said.spoke
            mark = yield from cursor.mark(self._start_marks if nothing_yet else self._content_marks)
            blanks = behind if not mark and self._said.spoke and (yield from cursor.more()) else ""

    def _think(self, thinking: Thinking) -> Reading:
        """Go over reasoning, to behind its end."""
        cursor = self._cursor
        opening, marks = Marks(thinking.open), Marks(thinking.close)
        yield from cursor.blanks()
        if mark := (yield from cursor.mark(opening)):
            cursor.take(len(mark))
            yield from cursor.blanks()
        marks |= self._thought_marks
        while True:
            blanks, mark = yield from cursor.text(marks, self._said.reasoning)
            if not mark:
                self._said.reasoning(blanks)
                return
            if mark in thinking.close:
                cursor.take(len(mark))
                return
            if mark not in self._call_marks.literals:  # a special token that means nothing here
                self._said.reasoning(blanks)
                cursor.take(len(mark))
            elif (yield from self._calls(mark, blanks, self._said.reasoning)) is not None:
                return

    # ------------------------------------------------------------------------------------------------------------------ calls

    def _calls(self, mark: str, blanks: str, say: Text) -> Generator[None, None, str | None]:
        """Read the calls that a mark opens. Returns blanks behind them. None: there are no calls, and the text became content, blanks first."""
        cursor = self._cursor
        ways = self._sections.get(mark) or self._bare.get(mark) or self._at_start[mark]
        way = None if mark in self._sections else ways[0]
        ends = {end for each in ways for end in each.end}
        opens = {opening: each for each in reversed(ways) for opening in each.open}
        first = opens.pop("", None)
        marks, between = Marks((*ends, *opens, *self._sections)), BLANKS + "".join(each.between for each in ways)
        read = False
        cursor.hold()
        cursor.take(len(mark))
        while True:
            if way is None:
                while not (opening := (yield from cursor.mark(marks))) and (c := (yield from cursor.peek())) and c in between:
                    cursor.take()
                if read and opening in (ends | self._sections.keys()):
                    cursor.release()
                    cursor.take(len(opening) if opening in ends else 0)
                    return ""
                way = opens.get(opening) or (None if read and not (first and first.between) else first)
                if way is None:
                    break
                cursor.take(len(opening))
            if not (yield from self._call(way)):
                break
            read, way = True, None
            if cursor.held.strip(BLANKS):
                break
            cursor.hold()
        text = cursor.release()
        text = self._said.without_special(text)
        if not read:
            say(blanks + text)
            return None
        if not text.strip(BLANKS):
            return text
        self._said.content(text if self._said.spoke else text.lstrip(BLANKS))
        return ""

    def _call(self, way: Calls) -> Generator[None, None, bool]:
        """Go over one call, behind what opens it. False: it is none."""
        if way.body is Body.OBJECT:
            return (yield from self._object(way))
        cursor, closed = self._cursor, Marks(way.closed_head)
        stays = frozenset((*way.parameters.open, *way.close) if way.parameters else "{")
        written = yield from read_head(cursor, Marks((*way.head_end, *way.closed_head)), stays | closed.literals)
        name = _name(written or "", way)
        if name not in self._tools:
            return False
        if mark := (yield from cursor.mark(closed)):
            cursor.take(len(mark))
            return self._said.call_whole(name)
        if way.body in {Body.PARAMETERS, Body.PYTHON}:
            found = yield from self._listed(way, name)
            if found:
                self._said.end_call()
            return found is not None
        closes = Marks(way.close)
        yield from cursor.blanks()
        if (yield from cursor.peek()) == "{":
            self._said.begin(name)
            if not (yield from self._body(way)):
                return True
            self._said.end_call()
        elif (yield from cursor.mark(closes)):
            self._said.call_whole(name)
        else:
            return False
        cursor.hold()
        yield from cursor.blanks()
        if mark := (yield from cursor.mark(closes)):
            cursor.take(len(mark))
            cursor.release()
        return True

    def _body(self, way: Calls) -> Generator[None, None, bool]:
        """Read an object of arguments. False: it breaks off."""
        if way.body is Body.LAX:
            return (yield from read_lax_object(self._cursor, way.delimiter, self._said.arguments))
        return (yield from read_json_value(self._cursor, self._said.arguments))

    def _listed(self, way: Calls, name: str) -> Generator[None, None, bool | None]:
        """Read arguments that are written one by one. Returns whether they are whole. None: none stand here."""
        schema = self._tools[name]
        if way.body is Body.PARAMETERS:
            outer = Marks(mark for mark in (*way.end, *way.begin, *way.open) if mark)
            begin, say = (lambda: self._said.begin(name)), self._said.arguments
            return (yield from read_parameters(self._cursor, way, outer, schema, self._said.is_special, begin, say))
        properties = schema.get("properties")
        names = list(cast("Mapping[str, Any]", properties)) if isinstance(properties, Mapping) else list[str]()
        return (yield from read_python_arguments(self._cursor, names, lambda: self._said.begin(name), self._said.arguments))

    def _object(self, way: Calls) -> Generator[None, None, bool]:
        """Go over an object that has name and arguments, behind its brace."""
        cursor, name, buffered, begun = self._cursor, None, None, False
        while (c := (yield from cursor.peek())) != "}":
            if c and c in BLANKS + ",":
                cursor.take()
                continue
            key = yield from self._string()
            yield from cursor.blanks()
            if key is None or (yield from cursor.peek()) != ":":
                return begun
            cursor.take()
            yield from cursor.blanks()
            if key in way.name_keys and name is None:
                name = yield from self._string()
                if name is None or name not in self._tools:
                    return False
                if buffered is not None:
                    begun = self._said.call_whole(name, buffered)
                    cursor.hold()  # the rest of the object: content, if it is none
            elif key in way.arguments_keys and buffered is None and not begun:
                if name is not None and (yield from cursor.peek()) == "{":
                    self._said.begin(name)
                    begun = True
                    if not (yield from read_json_value(cursor, self._said.arguments)):
                        return True
                    self._said.end_call()
                    cursor.hold()
                    continue
                buffered = yield from self._whole_arguments()
                if buffered is None:
                    return False
                if name is not None:
                    begun = self._said.call_whole(name, buffered)
                    cursor.hold()
            elif not (begun or key in _PASSED_OVER) or not (yield from read_json_value(cursor, _ignore)):
                return begun
        if not begun and name is not None:
            begun = self._said.call_whole(name, buffered or "{}")
        if begun:
            cursor.take()
            cursor.release()
        return begun

    def _string(self) -> Generator[None, None, str | None]:
        """Take the JSON string here, and return its text. None: it is not one, or breaks off."""
        if (yield from self._cursor.peek()) != '"':
            return None
        pieces: list[str] = []
        if not (yield from read_json_string(self._cursor, pieces.append)):
            return None
        text, special, _ = "".join(pieces).partition(SPECIAL)
        return decode_json_string(text + '"' if special else text)

    def _whole_arguments(self) -> Generator[None, None, str | None]:
        """Take the arguments here: a JSON object, one as JSON in a string, or null for none. Returns the object's JSON. None: something else stands here."""
        pieces: list[str] = []
        if not (yield from read_json_value(self._cursor, pieces.append)):
            return None
        text = "".join(pieces)
        text = "{}" if text == "null" else (decode_json_string(text) or "" if text.startswith('"') else text)
        return text if text.lstrip(BLANKS).startswith("{") else None


def _name(text: str, way: Calls) -> str:
    """Return the tool's name from the text in its place."""
    for prefix in way.name_prefix:
        text = text.strip().removeprefix(prefix)
    for cut in way.name_cut:
        text = text.partition(cut)[0]
    return text.partition(SPECIAL)[0].strip()


_PASSED_OVER = ("id", "type", "index")
"""Keys of a call's object that may stand before its name."""


def _ignore(_: str) -> None:
    """Take no note of a text."""
