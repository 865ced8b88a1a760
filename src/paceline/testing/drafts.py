"""A source of drafts that knows the answers and uses them badly: right, wrong, late, early, garbled or nothing, by chance but reproducibly."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from paceline.core.ids import SequenceId
from paceline.engine.drafts import DraftAnswer, DraftAsk


class UnsteadySource:
    """A `DraftSource` that holds the engine to its side: what it is told of a sequence has no gap.

    Args:
        truth: prompt and answer of a sequence.
        chance: decides everything.
        vocabulary: token ids below this are tokens.
    """

    def __init__(self, truth: Callable[[SequenceId], Sequence[int]], chance: random.Random, vocabulary: int) -> None:
        self.expected_s: float | None = 0.001
        self.told: dict[SequenceId, list[int]] = {}
        self.asks = 0
        self.block = 8
        self._truth, self._chance, self._vocabulary = truth, chance, vocabulary
        self._due: deque[tuple[DraftAsk, int]] = deque()

    def ask(self, ask: DraftAsk) -> None:
        self.asks += 1
        told = self.told.setdefault(ask.sequence, [])
        assert 0 <= ask.first_position <= len(told), "a source is told of tokens behind a gap"
        told[ask.first_position :] = ask.token_ids
        assert told, "a source is asked to go on behind nothing"
        self._due.append((ask, len(told)))

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        n = len(self._due) if wait_s else self._chance.randrange(len(self._due) + 1)
        due = [self._due.popleft() for _ in range(n)]
        return [DraftAnswer(ask.sequence, position, self._drafted(ask, position)) for ask, position in due]

    def forget(self, sequence: SequenceId) -> None:
        self.told.pop(sequence, None)

    def _drafted(self, ask: DraftAsk, position: int) -> Sequence[int]:
        kind = self._chance.random()
        if kind < 0.1:
            return ()
        if kind < 0.2:
            return [self._chance.choice((-1, self._vocabulary, 1 << 40)) for _ in range(ask.length)]
        if ask.sequence not in self.told:
            return (1,) * ask.length
        right = list(self._truth(ask.sequence)[position : position + ask.length])
        for place in range(len(right)):
            if self._chance.random() < 0.1:
                right[place] = self._chance.randrange(self._vocabulary)
        return right
