"""Ids of chats that were encoded lately: a turn's text begins with the turn's before it, and only what is new is encoded.

Law: the ids are those of the whole text. An encoder cuts a text at its special tokens before it does anything else, and encodes what lies between them piece by piece. So
where a special token begins, the ids before it and those from it on are the ids of two texts; unless the token takes in blanks before it, or
stands in a word: texts are not cut at those.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import AddedToken

KEPT: Final = 8
"""Chats. Raising it: more of them go on quickly side by side, for their text and five times that for their ids."""
LEAST_LETTERS: Final = 2000
"""Of a text that is kept: shorter ones take no time."""


@dataclass(frozen=True, slots=True)
class _Known:
    ids: Sequence[int]
    cuts: Sequence[tuple[int, int]]
    """Where special tokens stand: letters before them, and ids before them."""


class ChatPrefixes:
    """Remembers some texts and their ids. For one thread at a time."""

    def __init__(self, added: dict[int, AddedToken], encode: Callable[[str], list[int]]) -> None:
        """Remember nothing yet.

        Args:
            added: the encoder's own tokens beside its vocabulary, by id.
            encode: gives the ids of any text.
        """
        self._encode = encode
        self._added: Final = frozenset(added)
        names = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._spelled: Final = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._cuts: Final = frozenset(
            i for i, token in added.items() if token.special and not (token.lstrip or token.single_word or token.normalized)
        )
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    def ids(self, text: str, salt: str = "") -> list[int]:
        """Ids of a text; raises as `encode` does.

        Args:
            salt: only what was encoded with the same one is used: how long it takes tells no other client what was asked.
        """
        if len(text) < LEAST_LETTERS:
            return self._encode(text)
        letters, head = self._longest(text, salt)
        ids = [*head, *self._encode(text[letters:])]
        places = [place for place, token in enumerate(ids) if token in self._added]
        starts = [match.start() for match in self._spelled.finditer(text)]
        if len(starts) == len(places):  # else tokens were found otherwise than they are spelled
            cuts = [(start, place) for start, place in zip(starts, places, strict=True) if ids[place] in self._cuts]
            self._known[salt, text] = _Known(ids, cuts)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return ids

    def _longest(self, text: str, salt: str) -> tuple[int, Sequence[int]]:
        """The most letters that a known text has in common with this one, up to a cut, and their ids."""
        best, ids, found = 0, list[int](), ""
        for (salted, other), known in self._known.items():
            same = _same_letters(text, other) if salted == salt else 0
            # A token that is not in both to its end is no cut: `<|im` may go on otherwise.
            cut = next(((start, place) for start, place in reversed(known.cuts) if self._spelled_end(other, start) <= same), (0, 0))
            if cut[0] > best:
                best, ids, found = cut[0], list(known.ids[: cut[1]]), other
        if found:
            self._known.move_to_end((salt, found))
        return best, ids

    def _spelled_end(self, text: str, start: int) -> int:
        match = self._spelled.match(text, start)
        return len(text) + 1 if match is None else match.end()


def _same_letters(one: str, other: str) -> int:
    """Of two texts' beginnings."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
