"""Prompt lookup: the next tokens are those that followed the last occurrence of the last ones. No weights, no randomness.

On text that repeats (quotes, code, tool calls, edits) many of its proposals come true; elsewhere it proposes nothing, which costs nothing.
An index grows with the text, at a constant cost a token whatever the length, and takes some 30 bytes for each of the last `MOST` tokens
and 4 for each before them.

Source: prompt-lookup decoding: the longest suffix first, of four tokens down to one, its most recent earlier
occurrence.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_NGRAM = 4
"""Longest suffix looked for. Longer repetitions are found by their ends; raising it costs a table more."""
REMEMBERED = 256
"""Last tokens that can be taken back cheaply."""
MOST = 1 << 16
"""Tokens in an index; when there are more, the older half is dropped. Raising it: repetitions are found farther back, for more memory."""
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_GONE = -1
"""In a table: a place whose suffix was taken back."""

UInt64 = npt.NDArray[np.uint64]
Int32 = npt.NDArray[np.int32]


def _keys(text: npt.NDArray[np.int32], n: int, ends: npt.NDArray[np.int64]) -> UInt64:
    """Hashes of the suffixes of n tokens that end before `ends`."""
    keys = np.zeros(len(ends), np.uint64)
    for back in range(1, n + 1):
        keys = keys * np.uint64(_FACTOR) + text[ends - back].astype(np.uint64) + np.uint64(1)
    return keys


class _Table:
    """Where each suffix of `n` tokens ended last: open addressing, 4 bytes a place; suffixes are compared in the text itself."""

    __slots__ = ("_mask", "_n", "_places", "_shift", "_slots", "_used")

    def __init__(self, n: int) -> None:
        self._n = n
        self._resize(16)

    def _resize(self, size: int) -> None:
        self._slots: Int32 = np.zeros(size, np.int32)
        self._places = self._slots.data
        """The same memory: of single places, several times faster."""
        self._mask, self._shift, self._used = size - 1, 64 - (size.bit_length() - 1), 0

    def put(self, key: int, end: int, ids: array[int], *, may_be_known: bool) -> int:
        """Say that the suffix before `end` stands there; returns where it ended before, 0: nowhere."""
        n, places, mask = self._n, self._places, self._mask
        at = (key * _FACTOR & _MASK) >> self._shift
        if may_be_known:
            suffix = ids[end - n : end]
            while place := places[at]:
                if place > 0 and ids[place - n : place] == suffix:
                    places[at] = end
                    return place
                at = at + 1 & mask
        else:
            while places[at]:
                at = at + 1 & mask
        places[at] = end
        self._used += 1
        if 4 * self._used > 3 * mask:
            self._grow(ids, 0)
        return 0

    def put_back(self, key: int, end: int, before: int) -> None:
        """Undo what was put for `end`: the suffix ended at `before` (0: nowhere)."""
        places, mask = self._places, self._mask
        at = (key * _FACTOR & _MASK) >> self._shift
        while places[at] != end:
            at = at + 1 & mask
        if before or places[at + 1 & mask]:
            places[at] = before or _GONE
        else:
            places[at] = 0
            self._used -= 1

    def put_all(self, ids: array[int], start: int, stop: int) -> None:
        """The same for all ends from `start` to `stop`, which grow."""
        if stop < start:
            return
        self._grow(ids, stop + 1 - start)
        self._insert(np.frombuffer(ids, np.int32), np.arange(start, stop + 1))

    def _grow(self, ids: array[int], more: int) -> None:
        """Make room for `more` suffixes; those taken back go."""
        if 4 * (self._used + more) <= 3 * self._mask and more:
            return
        kept = self._slots[self._slots > 0].astype(np.int64)
        self._resize(1 << (2 * (len(kept) + more)).bit_length())
        self._insert(np.frombuffer(ids, np.int32), kept)

    def _insert(self, text: Int32, ends: npt.NDArray[np.int64]) -> None:
        keys = _keys(text, self._n, ends)
        # Of equal suffixes the last one.
        keys, last = np.unique(keys[::-1], return_index=True)
        ends = ends[::-1][last]
        slots = self._slots
        at = (keys * np.uint64(_FACTOR) >> np.uint64(self._shift)).astype(np.int64)
        while len(at):
            found = slots[at]
            free, same = found == 0, found > 0
            same[same] = _keys(text, self._n, found[same].astype(np.int64)) == keys[same]
            slots[at[same]] = ends[same]
            # Of several that want a free place one gets it.
            slots[at[free]] = ends[free]
            placed = free & (slots[at] == ends)
            self._used += int(placed.sum())
            left = ~(placed | same)
            keys, ends, at = keys[left], ends[left], at[left] + 1 & self._mask


class NGramIndex:
    """Where each suffix of up to `MAX_NGRAM` tokens occurred last."""

    __slots__ = ("_found", "_start", "_tables", "_undo", "ids")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = array("i")
        self._start = 0
        """Tokens before it are not in the index."""
        self._tables = tuple(_Table(n) for n in range(1, MAX_NGRAM + 1))
        """By length."""
        self._undo: deque[list[tuple[int, int]]] = deque(maxlen=REMEMBERED)
        """Of the last tokens: by length, the key of the suffix that each ended, and where it ended before."""
        self._found: list[int] = []
        """By length: what stands behind the last *earlier* occurrence of the text's own suffix, as far as there is one."""
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """The text grew by many tokens: some 0.5 us each, and the last ones, which can be taken back, as `append`."""
        many, last = ids[: max(0, len(ids) - REMEMBERED)], ids[-REMEMBERED:]
        if many:
            known = len(self.ids)
            self.ids.extend(many)
            self._undo.clear()
            if len(self.ids) - self._start > MOST:
                self._begin_at(len(self.ids) - MOST // 2)
            else:
                self._put_all(known)
        for token in last:
            self.append(token)

    def _put_all(self, start: int) -> None:
        for n, table in enumerate(self._tables, 1):
            table.put_all(self.ids, max(start + 1, self._start + n), len(self.ids))

    def _begin_at(self, start: int) -> None:
        """Index the text anew, from a token on."""
        self._start = start
        self._tables = tuple(_Table(n) for n in range(1, MAX_NGRAM + 1))
        self._undo.clear()
        self._put_all(start)

    def append(self, token: int) -> None:
        ids, found = self.ids, self._found
        if len(ids) - self._start >= MOST:
            self._begin_at(len(ids) - MOST // 2)
        ids.append(token)
        found.clear()
        end, key = len(ids), 0
        repeats = True
        undo: list[tuple[int, int]] = []
        for n, table in enumerate(self._tables[: end - self._start], 1):
            key = (key * _FACTOR + ids[end - n] + 1) & _MASK
            place = table.put(key, end, ids, may_be_known=repeats)
            if place:
                found.append(place)
            else:
                repeats = False  # nor does any longer one
            undo.append((key, place))
        self._undo.append(undo)

    def cut(self, length: int) -> None:
        """The text is shorter again: its last tokens were a guess. Cheap for as many as are remembered."""
        ids = self.ids
        if length >= len(ids):
            return
        if len(ids) - length >= len(self._undo):
            kept = ids[:length]
            del ids[:]
            self._found.clear()
            self._begin_at(0)
            self.extend(kept)
            return
        # One more, which is appended again, as that finds what its suffix follows.
        last = ids[length - 1]
        for end in range(len(ids), length - 1, -1):
            for table, (key, place) in zip(self._tables, self._undo.pop(), strict=False):
                table.put_back(key, end, place)
        del ids[length - 1 :]
        self.append(last)

    @property
    def matched(self) -> int:
        """Length of the longest suffix that occurred before; 0: none did."""
        return len(self._found)

    def propose(self, length: int) -> tuple[int, ...]:
        """Tokens that may come next; none where nothing repeats."""
        if not self._found:
            return ()
        ids, place = self.ids, self._found[-1]
        # A repetition that runs into the end goes on with itself: its period, again and again.
        period = len(ids) - place
        if length <= period:
            return tuple(ids[place : place + length])
        return tuple((ids[place:] * -(-length // period))[:length])
