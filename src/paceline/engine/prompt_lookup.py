"""Prompt lookup: propose the tokens that followed the previous occurrence of the text's last tokens. No weights, no randomness.

On text that repeats (quotes, code, tool calls, edits) many of its proposals are accepted; elsewhere it proposes nothing, which costs nothing. An index grows
with the text, at a constant cost per token whatever the length. It takes some 30 bytes for each of the last `MOST` tokens and 4 for each token before them.

Source: prompt-lookup decoding, which tries the longest suffix first, from four tokens down to one, at its most recent earlier occurrence.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_NGRAM = 4
"""Longest suffix that is searched for, in tokens. Longer repetitions are found by their ends; raising it costs another table."""
REMEMBERED = 256
"""Number of last tokens that can be taken back cheaply. Raising it: more memory; lowering it: shorter cuts rebuild the index."""
MOST = 1 << 16
"""Tokens in an index; when there are more, the older half is dropped. Raising it: repetitions are found farther back, for more memory."""
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_GONE = -1
"""Marks a slot of a table with a suffix that was taken back."""

UInt64 = npt.NDArray[np.uint64]
Int32 = npt.NDArray[np.int32]


def _keys(text: npt.NDArray[np.int32], n: int, ends: npt.NDArray[np.int64]) -> UInt64:
    """Return hashes of the suffixes of n tokens that end before `ends`."""
    keys = np.zeros(len(ends), np.uint64)
    for back in range(1, n + 1):
        keys = keys * np.uint64(_FACTOR) + text[ends - back].astype(np.uint64) + np.uint64(1)
    return keys


class _Table:
    """The last end of each suffix of `n` tokens. Open addressing, 4 bytes a slot; suffixes are compared in the text itself."""

    __slots__ = ("_mask", "_n", "_places", "_shift", "_slots", "_used")

    def __init__(self, n: int) -> None:
        self._n = n
        self._resize(16)

    def _resize(self, size: int) -> None:
        self._slots: Int32 = np.zeros(size, np.int32)
        self._places = self._slots.data
        """The same memory as `_slots`; reading single slots is several times faster."""
        self._mask, self._shift, self._used = size - 1, 64 - (size.bit_length() - 1), 0

    def put(self, key: int, end: int, ids: array[int], *, may_be_known: bool) -> int:
        """Record that a suffix ends before position `end`. Returns its previous end; 0: there is none.

        Without `may_be_known` the suffix must be new: the table is not searched for it.
        """
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
        """Undo a `put` for `end`: restore the suffix's previous end `before` (0: none)."""
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
        """Record the suffixes of all ends from `start` to `stop` inclusive."""
        if stop < start:
            return
        self._grow(ids, stop + 1 - start)
        self._insert(np.frombuffer(ids, np.int32), np.arange(start, stop + 1))

    def _grow(self, ids: array[int], more: int) -> None:
        """Make room for `more` suffixes, and drop those that were taken back."""
        if 4 * (self._used + more) <= 3 * self._mask and more:
            return
        kept = self._slots[self._slots > 0].astype(np.int64)
        self._resize(1 << (2 * (len(kept) + more)).bit_length())
        self._insert(np.frombuffer(ids, np.int32), kept)

    def _insert(self, text: Int32, ends: npt.NDArray[np.int64]) -> None:
        keys = _keys(text, self._n, ends)
        # Of equal suffixes, keep the last.
        keys, last = np.unique(keys[::-1], return_index=True)
        ends = ends[::-1][last]
        slots = self._slots
        at = (keys * np.uint64(_FACTOR) >> np.uint64(self._shift)).astype(np.int64)
        while len(at):
            found = slots[at]
            free, same = found == 0, found > 0
            same[same] = _keys(text, self._n, found[same].astype(np.int64)) == keys[same]
            slots[at[same]] = ends[same]
            # Several may want the same free slot: one gets it, the others try again.
            slots[at[free]] = ends[free]
            placed = free & (slots[at] == ends)
            self._used += int(placed.sum())
            left = ~(placed | same)
            keys, ends, at = keys[left], ends[left], at[left] + 1 & self._mask


class NGramIndex:
    """The last occurrence of each suffix of up to `MAX_NGRAM` tokens."""

    __slots__ = ("_found", "_start", "_tables", "_undo", "ids")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = array("i")
        self._start = 0
        """Position of the first token in the index."""
        self._tables = tuple(_Table(n) for n in range(1, MAX_NGRAM + 1))
        """One table for each suffix length, from 1 token on."""
        self._undo: deque[list[tuple[int, int]]] = deque(maxlen=REMEMBERED)
        """For each of the last tokens, and for each suffix length: the suffix's key, and its previous end."""
        self._found: list[int] = []
        """Previous end of the text's own suffix, for each suffix length from 1 on as far as it occurred before."""
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append many tokens, at some 0.5 us each. The last ones are appended one by one, so that they can be taken back."""
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
        """Rebuild the index from token `start` on."""
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
                repeats = False  # then no longer suffix occurred either
            undo.append((key, place))
        self._undo.append(undo)

    def cut(self, length: int) -> None:
        """Shorten the text to `length` tokens, because its last ones were a draft. Cheap for as many as are remembered."""
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
        # Remove one token more and append it again, which looks up its suffix.
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
        """Return up to `length` tokens that may come next; empty where nothing repeats."""
        if not self._found:
            return ()
        ids, place = self.ids, self._found[-1]
        # A repetition that reaches the end of the text repeats its period.
        period = len(ids) - place
        if length <= period:
            return tuple(ids[place : place + length])
        return tuple((ids[place:] * -(-length // period))[:length])
