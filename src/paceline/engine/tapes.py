"""What is guessed of one sequence: a tape of tokens a maker, held against whatever is drawn.

Law: every tape is compared with every token, verified or not, so it is known at any time how well each maker would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.engine.acceptance import Acceptance
from paceline.engine.drafts import NGRAM, DraftSource
from paceline.engine.prompt_lookup import NGramIndex


@dataclass(slots=True)
class Tape:
    """What one maker guesses."""

    ids: Sequence[int]
    start: int
    """Position of the first."""
    run: int
    """See `acceptance`."""
    came_true: int = 0
    resumes: bool = False
    """It was wrong, and goes on behind the wrong token: for want of a better one, which takes its place."""
    branches: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict[tuple[int, int], Sequence[int]])
    """By position and token: what follows, if it is this one."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(slots=True)
class Told:
    """What a source was told of a sequence."""

    source: DraftSource
    right: int = 0
    """Leading tokens that it knows and that are still right."""
    end: int = 0
    """Tokens it knows."""
    since: float | None = None
    """When it was asked what it has not answered; None: it has."""
    unused: int = 0
    """Times it was asked since anything of it was verified."""
    pause_until: int = 0
    """It is not asked before so many tokens are known."""


@dataclass(slots=True)
class SequenceDrafts:
    """All tapes of one sequence."""

    rates: Mapping[str, Acceptance]
    """Of those who may guess for it."""
    index: NGramIndex | None
    """Where it is looked up."""
    told: Mapping[str, Told]
    """To those who are asked."""
    tapes: dict[str, Tape] = field(default_factory=dict[str, Tape])
    maker: str = NGRAM
    """Of what is in flight."""

    def best(self) -> str | None:
        """The maker likeliest to know the next token."""
        tapes, rates = self.tapes, self.rates
        if len(tapes) < 2:
            return next(iter(tapes), None)
        return max(tapes, key=lambda maker: rates[maker].chance(tapes[maker].run))

    def chances(self, maker: str, known: int, most: int) -> Sequence[float]:
        """Of what a maker guesses behind the first `known` tokens: that each comes true, if those before it do."""
        tape = self.tapes[maker]
        return self.rates[maker].chances(tape.run, min(tape.end - known, most))

    def compare(self, tokens: Sequence[int], start: int) -> None:
        """Hold all tapes against the tokens from position `start` on."""
        for maker in tuple(self.tapes):
            self.compare_with(maker, tokens, start)

    def compare_with(self, maker: str, tokens: Sequence[int], start: int) -> None:
        """Hold one maker's tape against the tokens from position `start` on: learn from it, and drop it if it was wrong, or is used up."""
        tape, rates = self.tapes[maker], self.rates[maker]
        for position in range(max(start, tape.start), min(len(tokens), tape.end)):
            right = tape.ids[position - tape.start] == tokens[position]
            rates.learn(tape.run, right)
            if not right:
                self._was_wrong(maker, tape, tokens, position)
                return
            tape.run += 1
            tape.came_true += 1
        if tape.end <= len(tokens):
            del self.tapes[maker]
            rates.learn_fresh(tape.came_true)

    def _was_wrong(self, maker: str, tape: Tape, tokens: Sequence[int], position: int) -> None:
        del self.tapes[maker]
        if not tape.resumes:
            self.rates[maker].learn_fresh(tape.came_true)
        told = self.told.get(maker)
        if told is None:
            return
        if position < told.end:
            # What it was asked to go on behind is wrong.
            told.right, told.since = min(told.right, position), None
        # Until the source has said more, this is the best guess: what it said would follow this token, or else that one token is
        # replaced by another.
        if branch := tape.branches.get((position, tokens[position])):
            self.tapes[maker] = Tape(branch, position + 1, 1, resumes=True)
        elif tape.came_true and position + 1 < tape.end:
            self.tapes[maker] = Tape(tape.ids[position + 1 - tape.start :], position + 1, 0, resumes=True)
        else:
            return
        self.compare_with(maker, tokens, position + 1)
