"""Text that comes in pieces, broken between words at a terminal's edge."""

from __future__ import annotations

import re

from prompt_toolkit.utils import get_cwidth

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Holds back the last word until it is known to be whole, and the space before it until it is known to be needed."""

    def __init__(self, columns: int) -> None:
        self._columns = max(columns, 2)
        self._at = 0
        self._space = self._word = ""

    def feed(self, text: str) -> str:
        """What can be shown after a further piece."""
        shown: list[str] = []
        for part in _PARTS.findall(text):
            if not part.isspace():
                self._word += part
                if get_cwidth(self._word) >= self._columns:
                    shown.append(self._placed())
                continue
            shown.append(self._placed())
            if part == "\n":
                self._space, self._at = "", 0
                shown.append("\n")
            else:
                self._space += part
        return "".join(shown)

    def end(self) -> str:
        """What was held back."""
        return self._placed()

    def _placed(self) -> str:
        if not self._word:
            return ""
        before, word = self._space, self._word
        self._space = self._word = ""
        width = get_cwidth(word)
        if self._at and self._at + get_cwidth(before) + width > self._columns:
            before = "\n"
            self._at = width
        else:
            self._at += get_cwidth(before) + width
        # A word wider than the terminal is broken by it.
        self._at = self._at % self._columns or (self._columns if self._at else 0)
        return before + word
