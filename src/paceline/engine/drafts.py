"""Drafts: tokens that may come next, and where such guesses come from.

Law: a draft is never believed. Whichever machine made it, from whatever: the model verifies each token, so a wrong one costs a row and changes no
byte. What is asked of a proposer is that it answers soon, not that it is right.

A proposer's contract (docs/internals/design.md): `propose_block(committed, length, steps)`. A session of it remembers what it was told, so that only new tokens
need be said and run; told the same tokens, it drafts the same, however they were cut into asks.

What is guessed of one sequence is a buffer of tokens a maker. Every buffer is compared with every token drawn, verified or not, so it is known at any
time how well each maker would do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from paceline.core.ids import SequenceId
from paceline.core.text import common_length
from paceline.engine.acceptance import Acceptance
from paceline.engine.prompt_lookup import NGramIndex

AUTO, OFF, NGRAM = "auto", "off", "ngram"
"""The best maker at the time; none; prompt lookup."""
FORCED = "grammar"
"""The maker of what an answer's form leaves no choice about. At work whatever is chosen but `OFF`."""
DRAFTS = (AUTO, OFF, NGRAM)
"""What a request's `draft` may always be; beyond it, the ids of draft models."""
MODELS_DRAFT = "draft"
"""The way of spreading work in which draft models take part. Prompt lookup is no way, but the engine's own."""


@dataclass(frozen=True, slots=True)
class BlockProposal:
    """A block of guessed tokens, and what it took."""

    token_ids: tuple[int, ...]
    diffusion_steps: int = 0
    """Refinements of the whole block; 0 where it was made token by token."""
    forward_passes: int = 0
    """Of the proposer's model."""
    peak_activation_bytes: int = 0


class Proposer(Protocol):
    """Something that drafts. May block: it is called in a thread."""

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """At most `block_size` tokens that may follow.

        Args:
            block_size: L, tokens wanted.
            num_steps: K, refinements, where the proposer makes them; 0: as many as it finds best, which is what serving asks for: an engine does not
                know what a refinement costs on the proposer's machine, and acceptance pays or does not pay for the block as a whole.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """What an engine wants drafted. A sequence has one ask under way; a later one takes its place, as what was guessed turned out wrong: the
    answer to the first may still come, and is of no use.
    """

    sequence: SequenceId
    first_position: int
    """Of `token_ids`. What the source was told of the sequence before this position still holds; what it was told from here on does not."""
    token_ids: Sequence[int]
    """Committed tokens, and behind them maybe guessed ones, whose continuation is wanted on the guess that they are right."""
    length: int
    """Tokens wanted at most."""


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """What a source drafted, or, empty, that it had nothing or failed."""

    sequence: SequenceId
    position: int
    """Of the first token: where the ask ended."""
    token_ids: Sequence[int]


class DraftSource(Protocol):
    """Drafts made elsewhere: by another thread, on another machine. For the engine's thread, which it never holds up.

    A source bounds its own waits and replaces what fails; an ask that can't be answered is answered with an empty draft.
    """

    @property
    def expected_s(self) -> float | None:
        """How long an answer takes, as measured; None: none are to be had at present, so there is no need to ask."""
        ...

    @property
    def block(self) -> int:
        """Tokens that take it hardly longer than one."""
        ...

    def ask(self, ask: DraftAsk) -> None: ...

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        """What has come since this was called last. Waits for a first answer, so long at most."""
        ...

    def forget(self, sequence: SequenceId) -> None:
        """The sequence is over; unknown ones too."""
        ...


class MoreSources(Protocol):
    """Sources beyond those that an engine is made with: whatever there is when a request names it. For the engine's thread."""

    @property
    def sources(self) -> Mapping[str, DraftSource]:
        """Those that the engine is made with, and others that were named lately."""
        ...

    def names(self) -> Collection[str]:
        """Of those there are now."""
        ...

    def find(self, name: str, sequence: SequenceId) -> DraftSource | None:
        """The one of that name, kept for a sequence until that is forgotten; None: there is none."""
        ...


@dataclass(slots=True)
class ProposerStats:
    """Sums over blocks, but for the peak."""

    blocks: int = 0
    """Asked for, empty ones included."""
    tokens: int = 0
    diffusion_steps: int = 0
    forward_passes: int = 0
    peak_activation_bytes: int = 0
    failures: int = 0
    """Blocks that were asked for and not had."""

    def count(self, block: BlockProposal) -> None:
        self.blocks += 1
        self.tokens += len(block.token_ids)
        self.diffusion_steps += block.diffusion_steps
        self.forward_passes += block.forward_passes
        self.peak_activation_bytes = max(self.peak_activation_bytes, block.peak_activation_bytes)


@dataclass(slots=True)
class DraftBuffer:
    """What one maker guesses."""

    ids: Sequence[int]
    start: int
    """Position of the first."""
    run: int
    """See `acceptance`."""
    came_true: int = 0
    resumes: bool = False
    """It was wrong, and goes on behind the wrong token: for want of a better one, which takes its place."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(slots=True)
class SyncState:
    """What a source knows of a sequence."""

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
    """All buffers of one sequence."""

    rates: Mapping[str, Acceptance]
    """Of those who may guess for it."""
    index: NGramIndex | None
    """Where it is looked up."""
    states: Mapping[str, SyncState]
    """To those who are asked."""
    buffers: dict[str, DraftBuffer] = field(default_factory=dict[str, DraftBuffer])
    maker: str = NGRAM
    """Of what is in flight."""

    def best(self) -> str | None:
        """The maker likeliest to know the next token."""
        buffers, rates = self.buffers, self.rates
        if len(buffers) < 2:
            return next(iter(buffers), None)
        return max(buffers, key=lambda maker: rates[maker].chance(buffers[maker].run))

    def chances(self, maker: str, known: int, most: int) -> Sequence[float]:
        """Of what a maker guesses behind the first `known` tokens: that each comes true, if those before it do."""
        buffer = self.buffers[maker]
        return self.rates[maker].chances(buffer.run, min(buffer.end - known, most))

    def compare(self, tokens: Sequence[int], start: int) -> None:
        """Hold all buffers against the tokens from position `start` on."""
        for maker in tuple(self.buffers):
            self.compare_with(maker, tokens, start)

    def compare_with(self, maker: str, tokens: Sequence[int], start: int) -> None:
        """Hold one maker's buffer against the tokens from position `start` on: learn from it, and drop it if it was wrong, or is used up."""
        buffer, rates = self.buffers[maker], self.rates[maker]
        for position in range(max(start, buffer.start), min(len(tokens), buffer.end)):
            right = buffer.ids[position - buffer.start] == tokens[position]
            rates.learn(buffer.run, right)
            if not right:
                self._was_wrong(maker, buffer, tokens, position)
                return
            buffer.run += 1
            buffer.came_true += 1
        if buffer.end <= len(tokens):
            del self.buffers[maker]
            rates.learn_fresh(buffer.came_true)

    def _was_wrong(self, maker: str, buffer: DraftBuffer, tokens: Sequence[int], position: int) -> None:
        del self.buffers[maker]
        if not buffer.resumes:
            self.rates[maker].learn_fresh(buffer.came_true)
        state = self.states.get(maker)
        if state is None:
            return
        if position < state.end:
            # What it was asked to go on behind is wrong.
            state.right, state.since = min(state.right, position), None
        # Until the source has said more, the best guess is that one token is replaced by another.
        if buffer.came_true and position + 1 < buffer.end:
            self.buffers[maker] = DraftBuffer(buffer.ids[position + 1 - buffer.start :], position + 1, 0, resumes=True)
            self.compare_with(maker, tokens, position + 1)


KEPT_TEXTS = 16
"""Texts that a proposer remembers of callers without sessions. Raising it: memory, for callers that take turns."""


class DraftSession(Protocol):
    """What a proposer knows of one sequence. For one thread at a time."""

    @property
    def told(self) -> Sequence[int]: ...

    def propose(self, first_position: int, token_ids: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """At most `block_size` tokens that may follow.

        Args:
            first_position: of `token_ids`; what was told from here on is forgotten. Never beyond the end of what was told.
            token_ids: the sequence from there on.
        """
        ...

    def close(self) -> None:
        """Forget it. Idempotent."""
        ...


@runtime_checkable
class OpensSessions(Protocol):
    """A proposer that remembers sequences."""

    def open(self) -> DraftSession: ...


def open_session(proposer: Proposer) -> DraftSession:
    """A session of any proposer: its own, or one that says everything each time."""
    return proposer.open() if isinstance(proposer, OpensSessions) else _Retold(proposer)


def check_no_gap(first_position: int, told: Sequence[int]) -> None:
    """Check that tokens from a position on follow what was told.

    Raises:
        ValueError: the position lies beyond the end.
    """
    if not 0 <= first_position <= len(told):
        raise ValueError(f"tokens from position {first_position}, and {len(told)} were told")


def retell(told: list[int], first_position: int, token_ids: Sequence[int]) -> None:
    """Replace what was told from a position on.

    Raises:
        ValueError: the position lies beyond the end.
    """
    check_no_gap(first_position, told)
    del told[first_position:]
    told += token_ids


class _Retold:
    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.told: list[int] = []

    def propose(self, first_position: int, token_ids: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        retell(self.told, first_position, token_ids)
        return self._proposer.propose_block(self.told, block_size, num_steps)

    def close(self) -> None:
        self.told.clear()


class SessionProposer(ABC):
    """A `Proposer` made of sessions: a text that goes on where an earlier one ended is run from there."""

    def __init__(self) -> None:
        self._kept: list[DraftSession] = []
        """Of callers without sessions, the one used last at the end."""

    @abstractmethod
    def open(self) -> DraftSession:
        """A session that was told nothing yet."""

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        shared, session = max(
            ((common_length(one.told, committed), one) for one in self._kept), key=lambda pair: pair[0], default=(0, None)
        )
        # One that shares less than half is another text's: that text may come back.
        if session is None or 2 * shared < len(session.told):
            if len(self._kept) == KEPT_TEXTS:
                self._kept.pop(0).close()
            shared, session = 0, self.open()
        else:
            self._kept.remove(session)
        self._kept.append(session)
        return session.propose(shared, committed[shared:], block_size, num_steps)
