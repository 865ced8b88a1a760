"""Prompt lookup as a proposer: no weights, no forward pass.

Where a text that repeats may turn off: behind the same token, other tokens followed elsewhere.

Law: as prompt lookup's, every guess here is a piece of the text itself; those with the longest context in common come first, then the last ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from paceline.engine.drafts import BlockProposal, Branch
from paceline.engine.prompt_lookup import MAX_NGRAM, NGramIndex
from paceline.engine.proposers.session import DraftSession, SessionProposer, check_no_gap

OFFSETS = 16
"""Tokens of a block that may turn out to be others. Raising it: larger answers, for what is asked anew before it comes to that."""
EACH = 4
"""Branches at one token."""
LENGTH = 16
"""Tokens of a branch: what is used until the next answer comes, and some more."""
PLACES = 64
"""Occurrences of a token that are looked at."""
_NONE = -1
"""No token."""


class Occurrences:
    """Where each token of a text stands. Some 0.1 us a token."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._before = array("i")
        """By position: where the same token stands before; -1: nowhere."""
        self._last: dict[int, int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text grew."""
        before, last = self._before, self._last
        for position, token in enumerate(token_ids, len(before)):
            before.append(last.get(token, -1))
            last[token] = position

    def cut(self, text: Sequence[int], length: int) -> None:
        """The text, as it was, is shorter now."""
        before, last = self._before, self._last
        for token in reversed(text[length:]):
            position = before.pop()
            if position < 0:
                del last[token]
            else:
                last[token] = position

    def of(self, token: int) -> Iterator[int]:
        """Its positions, the last one first."""
        position = self._last.get(token, -1)
        while position >= 0:
            yield position
            position = self._before[position]


def branches(text: Sequence[int], occurrences: Occurrences, block: Sequence[int]) -> tuple[Branch, ...]:
    """What may follow instead of the tokens of a block behind a text that is not empty."""
    context = [*[_NONE] * MAX_NGRAM, *text[-MAX_NGRAM:]]
    found: list[Branch] = []
    for offset, token in enumerate(block[:OFFSETS]):
        found += [Branch(offset, tuple(text[at : at + 1 + LENGTH])) for at in _others(text, occurrences, context, token)]
        context.append(token)
    return tuple(found)


def _others(text: Sequence[int], occurrences: Occurrences, context: Sequence[int], expected: int) -> Sequence[int]:
    """Where other tokens stand behind a context than the one that is expected."""
    *_, third, second, first, last = context
    best: dict[int, tuple[int, int]] = {}
    """By the other token: how much of the context stands before it, and where it stands."""
    beyond = len(text) - 1  # a branch has two tokens
    for place, _ in zip(occurrences.of(last), range(PLACES), strict=False):
        at = place + 1
        if at >= beyond or (other := text[at]) == expected:
            continue
        # In a row of comparisons, as this is most of the time that an answer takes.
        if not place or text[place - 1] != first:
            shared = 1
        elif place < 2 or text[place - 2] != second:
            shared = 2
        else:
            shared = 3 if place < 3 or text[place - 3] != third else 4
        if other not in best or shared > best[other][0]:
            best[other] = shared, at
    return [at for _, at in sorted(best.values(), reverse=True)[:EACH]]


class NGramProposer(SessionProposer):
    """Drafts what followed the longest earlier repetition of the last tokens."""

    def open(self) -> DraftSession:
        return NGramSession()


class NGramSession:
    """One text's index."""

    def __init__(self) -> None:
        self._index, self._occurrences = NGramIndex(), Occurrences()

    @property
    def told(self) -> Sequence[int]:
        return self._index.ids

    def goes_on_cheaply(self, first_position: int) -> bool:
        """Whether what was told from a position on is forgotten in no time."""
        return self._index.cuts_cheaply(first_position)

    def propose(self, first_position: int, token_ids: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        del num_steps  # there is nothing to refine
        index = self._index
        check_no_gap(first_position, index.ids)
        self._occurrences.cut(index.ids, first_position)
        index.cut(first_position)
        self._occurrences.extend(token_ids)
        index.extend(token_ids)
        block = index.propose(block_size)
        return BlockProposal(block, branches=branches(index.ids, self._occurrences, block))

    def close(self) -> None:
        self._index, self._occurrences = NGramIndex(), Occurrences()
