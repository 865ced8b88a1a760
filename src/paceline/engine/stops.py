"""Tokens to text, one at a time, and where the text must end.

Law: however the tokens are cut, what is emitted in all is the decoded text up to the first stop string (the one that is complete
first; of two complete at once, the longer). Nothing that may yet turn out to belong to a stop string is emitted, nor half a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from paceline.core.text import Vocabulary


class TextStream:
    """The text of one sequence."""

    __slots__ = ("_decode", "_held", "_stop", "_token_bytes", "stopped", "stopped_by")

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = ()) -> None:
        """Start empty. Empty stop strings end nothing and are ignored."""
        self._token_bytes = vocabulary.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stop = tuple(s for s in stop if s)
        self._held = ""
        self.stopped = False
        """A stop string was found; the text is over."""
        self.stopped_by: str | None = None
        """That string."""

    def push(self, token_id: int) -> str:
        """Text that is certain, now that this token follows."""
        text = self._decode(self._token_bytes(token_id))
        return self._pass_on(text) if self._stop else text

    def flush(self) -> str:
        """The rest, at the end of the sequence. Half a character becomes U+FFFD."""
        text = self._decode(b"", final=True)
        if not self._stop:
            return text
        text = self._pass_on(text)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _pass_on(self, text: str) -> str:
        if self.stopped or not text:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.stopped_by = min(ends)
            self.stopped = True
            self._held = ""
            return text[:at]
        kept = len(text) - max(_overlap(text, stop) for stop in self._stop)
        self._held = text[kept:]
        return text[:kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
