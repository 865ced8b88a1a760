"""Collects what a reader makes of an answer: its content, its reasoning, and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Collection

from paceline.server.formats.cursor import PLAIN, SPECIAL, Cursor
from paceline.server.formats.format import CallArguments, CallBegun, Content, Part, Reasoning

_Span = type[Content] | type[Reasoning] | CallBegun
"""Kind of a span of text: content, reasoning, or the arguments of a call."""


class Said:
    """Parts read so far, in the order of the answer."""

    def __init__(self, cursor: Cursor, special: Collection[str], *, parallel: bool, required: bool) -> None:
        """Collect from nothing.

        Args:
            cursor: what it holds is released where a call begins.
            special: the special tokens among the format's marks.
            parallel: calls behind the first one are taken.
            required: the answer has the form of calls, so a text that breaks off is part of one.
        """
        self._cursor, self._parallel = cursor, parallel
        self._required: list[str] | None = [] if required else None
        """Content of an answer that has to be calls: said at the end, unless the answer was cut."""
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._is_hidden = False
        """Within the name of a special token that is not shown."""
        self._spans: list[tuple[_Span, list[str]]] = []
        """Spans read since the last `take`. Each holds pieces: joining each piece to those before it would take quadratic time."""
        self._begun: CallBegun | None = None
        """The last call that has begun."""
        self._whole = set[int]()
        """Indices of calls with whole arguments."""
        self.spoke = False
        """There was content other than blanks."""

    @property
    def has_called(self) -> bool:
        """True once a call has begun."""
        return self._begun is not None

    def take(self) -> list[Part]:
        """Return the parts that were read since the last time."""
        spans, self._spans = self._spans, []
        return [part for what, texts in spans for part in self._parts(what, texts)]

    def end(self, *, is_cut: bool) -> None:
        """Take note that the answer has ended.

        Args:
            is_cut: the model would have written more.
        """
        if self._required and not is_cut:
            self._say(Content, "".join(self._required))

    def content(self, text: str) -> None:
        if text := self._shown(text):
            self.spoke = self.spoke or not text.isspace()
            if self._required is None:
                self._say(Content, text)
            else:
                self._required.append(text)

    def reasoning(self, text: str) -> None:
        if text := self._shown(text):
            self._say(Reasoning, text)

    def begin(self, name: str, arguments: str = "") -> None:
        """Begin a call: the text that was held is not content."""
        self._cursor.release()
        self._begun = CallBegun(0 if self._begun is None else self._begun.index + 1, name, is_open=True)
        if self._parallel or not self._begun.index:
            self._spans.append((self._begun, [""]))  # an empty piece: it begins here
        self.arguments(arguments)

    def arguments(self, text: str) -> None:
        if text and self._begun and (self._parallel or not self._begun.index):
            self._say(self._begun, text.replace(SPECIAL, "").replace(PLAIN, ""))

    def end_call(self) -> None:
        """Note that the arguments of the call that began last are whole. Call it before any other text is read."""
        if self._begun:
            self._whole.add(self._begun.index)

    def call_whole(self, name: str, arguments: str = "{}") -> bool:
        """Say a call that is whole already. Returns True: it is a call."""
        self.begin(name, arguments)
        self.end_call()
        return True

    def is_special(self, mark: str) -> bool:
        """Return whether a mark has a special token in it, which no text has by chance."""
        return self._special.search(mark) is not None

    def without_special(self, text: str) -> str:
        return self._special.sub("", text)

    def _parts(self, what: _Span, texts: list[str]) -> list[Part]:
        text = "".join(texts)
        if isinstance(what, CallBegun):
            begun: list[Part] = [] if texts[0] else [what]
            return [*begun, CallArguments(what.index, text, what.index not in self._whole)] if text else begun
        return [what(text)]

    def _say(self, what: _Span, text: str) -> None:
        if self._spans and self._spans[-1][0] is what:
            self._spans[-1][1].append(text)
        else:
            self._spans.append((what, [text]))

    def _shown(self, text: str) -> str:
        """Return a text without the names of special tokens that are not marks."""
        if not self._is_hidden and SPECIAL not in text:
            return text
        pieces: list[str] = []
        for piece in re.split(f"([{SPECIAL}{PLAIN}])", text):
            if piece in {SPECIAL, PLAIN}:
                self._is_hidden = piece == SPECIAL
            elif not self._is_hidden:
                pieces.append(piece)
        return "".join(pieces)
