"""Prompt lookup: the next tokens are those that followed the last occurrence of the last ones. No weights, no randomness.

On text that repeats (quotes, code, tool calls, edits) many of its proposals come true; elsewhere it proposes nothing, which costs nothing.
An index grows with the text, at a constant cost a token whatever the length.

Source: prompt-lookup decoding, with seed 000's constants: the longest suffix first, of four tokens down to one, its most recent earlier
occurrence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

MAX_NGRAM = 4
"""Longest suffix looked for. Longer repetitions are found by their ends; raising it costs a table more."""
REMEMBERED = 256
"""Last tokens that can be taken back cheaply."""
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
"""Suffixes are told apart by 64-bit hashes: two that are taken for one another make a wrong draft, and no more than that."""


class NGramIndex:
    """Where each suffix of up to `MAX_NGRAM` tokens occurred last."""

    __slots__ = ("_follows", "_found", "_undo", "ids")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids: list[int] = []
        self._follows: tuple[dict[int, int], ...] = tuple({} for _ in range(MAX_NGRAM))
        """By length: what stands behind the last occurrence of a suffix."""
        self._undo: deque[list[tuple[int, int | None]]] = deque(maxlen=REMEMBERED)
        """Of the last tokens: by length, the suffix that each ended, and what stood for it before."""
        self._found: list[int] = []
        """By length: what stands behind the last *earlier* occurrence of the text's own suffix, as far as there is one."""
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """The text grew by many tokens: some 0.3 us each, and the last ones, which can be taken back, as `append`."""
        ids, last = ids[: max(0, len(ids) - REMEMBERED)], ids[-REMEMBERED:]
        if ids:
            known = self.ids[-(MAX_NGRAM - 1) :]
            start = len(self.ids) - len(known)
            text = np.array([*known, *ids], np.uint64)
            keys = np.zeros(len(text) + 1, np.uint64)
            for n, follows in enumerate(self._follows, 1):
                # Each key gains the token before it, so the first of them falls away.
                keys = keys[1:] * np.uint64(_FACTOR) + text[: len(text) + 1 - n] + np.uint64(1)
                if not len(keys):
                    break
                follows.update(zip(keys.tolist(), range(start + n, start + len(text) + 1), strict=True))
            self.ids += ids
            self._undo.clear()
        for token in last:
            self.append(token)

    def append(self, token: int) -> None:
        """The text grew."""
        ids, found = self.ids, self._found
        ids.append(token)
        found.clear()
        end, key = len(ids), 0
        repeats = True
        undo: list[tuple[int, int | None]] = []
        for n, follows in enumerate(self._follows[:end], 1):
            key = (key * _FACTOR + ids[end - n] + 1) & _MASK
            place = follows.get(key)
            if place is None:
                repeats = False  # nor does any longer one
            elif repeats:
                found.append(place)
            follows[key] = end
            undo.append((key, place))
        self._undo.append(undo)

    def cuts_cheaply(self, length: int) -> bool:
        """Whether so many of its first tokens can be kept without a look at all of them."""
        return length >= len(self.ids) or len(self.ids) - length < len(self._undo)

    def cut(self, length: int) -> None:
        """The text is shorter again: its last tokens were a guess. Cheap for as many as are remembered."""
        removed = len(self.ids) - length
        if removed <= 0:
            return
        kept = self.ids[:length]
        if not self.cuts_cheaply(length):
            self.ids.clear()
            self._follows = tuple({} for _ in range(MAX_NGRAM))
            self._undo.clear()
            self._found.clear()
            self.extend(kept)
            return
        # One more, which is appended again, as that finds what its suffix follows.
        for _ in range(removed + 1):
            for follows, (key, place) in zip(self._follows, self._undo.pop(), strict=False):
                if place is None:
                    del follows[key]
                else:
                    follows[key] = place
        self.ids = kept[:-1]
        self.append(kept[-1])

    @property
    def matched(self) -> int:
        """Length of the longest suffix that occurred before; 0: none did."""
        return len(self._found)

    def propose(self, length: int) -> tuple[int, ...]:
        """Tokens that may come next; none where nothing repeats.

        Args:
            length: tokens wanted at most.
        """
        if not self._found:
            return ()
        ids, place = self.ids, self._found[-1]
        # A repetition that runs into the end goes on with itself: its period, again and again.
        period = len(ids) - place
        if length <= period:
            return tuple(ids[place : place + length])
        return tuple((ids[place:] * -(-length // period))[:length])
