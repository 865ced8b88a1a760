"""Drafts: tokens that may come next, and the sources that propose them.

Law: a draft is never trusted, whichever machine made it. The model verifies each token, so a wrong one costs a row and changes no byte. A proposer must answer
soon; it need not be right.

A proposer's contract is `propose_block(committed, length, steps)` (docs/internals/design.md). A session of it remembers its tokens, so that only new ones need
to be sent and run. With the same tokens it drafts the same, however they were divided into requests.

Each maker has a buffer of draft tokens for a sequence. Every buffer is compared with every drawn token, verified or not, so each maker's quality is known at
any time.
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
"""Choices of a request's `draft`: the best maker at the time; no drafts; prompt lookup."""
FORCED = "grammar"
"""The maker of tokens that an answer's grammar forces. It works with every choice but `OFF`."""
DRAFTS = (AUTO, OFF, NGRAM)
"""Values that a request's `draft` may always have; others are the ids of draft models."""
MODELS_DRAFT = "draft"
"""The way of spreading work in which draft models take part. Prompt lookup runs in the engine and is not a way."""


@dataclass(frozen=True, slots=True)
class BlockProposal:
    """A block of draft tokens, and the work it took."""

    token_ids: tuple[int, ...]
    diffusion_steps: int = 0
    """Refinements of the whole block; 0 where it was made token by token."""
    forward_passes: int = 0
    """Forward passes of the proposer's model."""
    peak_activation_bytes: int = 0


class Proposer(Protocol):
    """A drafter. It may block: it is called in a thread."""

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """Return at most `block_size` tokens that may follow.

        Args:
            committed: all tokens of the sequence so far.
            block_size: L, tokens wanted.
            num_steps: K, refinements, for proposers that make them. 0: the proposer chooses, which is what serving uses: an engine does not know the cost of a
                refinement on the proposer's machine, and only sees whether the block as a whole pays.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A draft request for one sequence. A later request replaces the earlier one, because a guess was wrong: an answer to the earlier one may still arrive and
    is of no use.
    """

    sequence: SequenceId
    first_position: int
    """Position of `token_ids[0]`. The tokens sent for earlier positions still hold; those from here on are void."""
    token_ids: Sequence[int]
    """Committed tokens, maybe followed by draft tokens; the answer continues them as if they were right."""
    length: int
    """Maximum tokens wanted."""


@dataclass(frozen=True, slots=True)
class DraftAnswer:
    """The draft that a source made; empty if it has none or failed."""

    sequence: SequenceId
    position: int
    """Position of the first draft token: where the request ended."""
    token_ids: Sequence[int]


class DraftSource(Protocol):
    """Drafts made elsewhere, by another thread or machine. For the engine's thread, which it never blocks.

    A source bounds its own waits and replaces what fails. It answers a request that it can't serve with an empty draft.
    """

    @property
    def expected_s(self) -> float | None:
        """Measured seconds until an answer; None: the source has no drafts at present, so it need not be asked."""
        ...

    @property
    def block(self) -> int:
        """Number of tokens that take hardly longer than one."""
        ...

    def ask(self, ask: DraftAsk) -> None: ...

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        """Return the answers since the last call. Wait up to `wait_s` seconds for a first one."""
        ...

    def forget(self, sequence: SequenceId) -> None:
        """Forget a sequence that is over. Unknown sequences are ignored."""
        ...


class MoreSources(Protocol):
    """Draft sources that are found when a request names them, in addition to those of the engine's start. For the engine's thread."""

    @property
    def sources(self) -> Mapping[str, DraftSource]:
        """The sources of the engine's start, and others that requests named lately."""
        ...

    def names(self) -> Collection[str]:
        """Return the names of the sources available now."""
        ...

    def find(self, name: str, sequence: SequenceId) -> DraftSource | None:
        """Return the source of this name, kept for the sequence until `forget`; None: there is none."""
        ...


@dataclass(slots=True)
class ProposerStats:
    """Sums over blocks; of the memory, the peak."""

    blocks: int = 0
    """Blocks that were requested, empty ones included."""
    tokens: int = 0
    diffusion_steps: int = 0
    forward_passes: int = 0
    peak_activation_bytes: int = 0
    failures: int = 0
    """Blocks that were requested and failed."""

    def count(self, block: BlockProposal) -> None:
        self.blocks += 1
        self.tokens += len(block.token_ids)
        self.diffusion_steps += block.diffusion_steps
        self.forward_passes += block.forward_passes
        self.peak_activation_bytes = max(self.peak_activation_bytes, block.peak_activation_bytes)


@dataclass(slots=True)
class DraftBuffer:
    """The draft tokens of one maker."""

    ids: Sequence[int]
    start: int
    """Position of the first token."""
    run: int
    """The draft's run; see `acceptance`."""
    came_true: int = 0
    resumes: bool = False
    """The draft was wrong, and continues after its wrong token until a better one takes its place."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(slots=True)
class SyncState:
    """The tokens of a sequence that a source has, as the engine sent them."""

    source: DraftSource
    right: int = 0
    """Number of leading tokens that the source knows and that are still right."""
    end: int = 0
    """Number of tokens that the source knows."""
    since: float | None = None
    """Monotonic time of the request under way; None: there is none."""
    unused: int = 0
    """Requests since one of its tokens was last verified."""
    pause_until: int = 0
    """Number of known tokens below which the source is not asked."""


@dataclass(slots=True)
class SequenceDrafts:
    """All draft buffers of one sequence."""

    rates: Mapping[str, Acceptance]
    """Acceptance rates of the makers that may draft for the sequence."""
    index: NGramIndex | None
    """Index of prompt lookup; None: it is not used."""
    states: Mapping[str, SyncState]
    """State of each source that is asked."""
    buffers: dict[str, DraftBuffer] = field(default_factory=dict[str, DraftBuffer])
    maker: str = NGRAM
    """Maker of the draft in flight."""

    def best(self) -> str | None:
        """Return the maker most likely to know the next token."""
        buffers, rates = self.buffers, self.rates
        if len(buffers) < 2:
            return next(iter(buffers), None)
        return max(buffers, key=lambda maker: rates[maker].chance(buffers[maker].run))

    def chances(self, maker: str, known: int, most: int) -> Sequence[float]:
        """Return the chance of each draft token after the first `known` tokens, given that those before it are accepted."""
        buffer = self.buffers[maker]
        return self.rates[maker].chances(buffer.run, min(buffer.end - known, most))

    def compare(self, tokens: Sequence[int], start: int) -> None:
        """Compare all buffers with the tokens from position `start` on."""
        for maker in tuple(self.buffers):
            self.compare_with(maker, tokens, start)

    def compare_with(self, maker: str, tokens: Sequence[int], start: int) -> None:
        """Compare a maker's buffer with the tokens from position `start` on. Learn from it, and drop it if it was wrong or is used up."""
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
            # The continuation it was asked for follows a wrong token.
            state.right, state.since = min(state.right, position), None
        # Until the source answers again, the best guess is that only this token was replaced by another.
        if buffer.came_true and position + 1 < buffer.end:
            self.buffers[maker] = DraftBuffer(buffer.ids[position + 1 - buffer.start :], position + 1, 0, resumes=True)
            self.compare_with(maker, tokens, position + 1)


KEPT_TEXTS = 16
"""Texts that a proposer remembers for callers without sessions. Raising it: more memory; callers that take turns find their texts."""


class DraftSession(Protocol):
    """The state of a proposer for one sequence. For one thread at a time."""

    @property
    def told(self) -> Sequence[int]: ...

    def propose(self, first_position: int, token_ids: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        """Return at most `block_size` tokens that may follow.

        Args:
            first_position: position of `token_ids[0]`, at most the number of tokens told so far. Tokens told from there on are forgotten.
            token_ids: the sequence from `first_position` on.
            block_size: tokens wanted.
            num_steps: refinements; 0: the proposer chooses.
        """
        ...

    def close(self) -> None:
        """Forget the sequence. Idempotent."""
        ...


@runtime_checkable
class OpensSessions(Protocol):
    """A proposer that remembers sequences."""

    def open(self) -> DraftSession: ...


def open_session(proposer: Proposer) -> DraftSession:
    """Return a session of any proposer: its own, or one that sends all tokens each time."""
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
    """A `Proposer` made of sessions. A text that continues an earlier one is run only from where they differ."""

    def __init__(self) -> None:
        self._kept: list[DraftSession] = []
        """Sessions for callers without their own, least recently used first."""

    @abstractmethod
    def open(self) -> DraftSession:
        """Return a session without any tokens yet."""

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        shared, session = max(
            ((common_length(one.told, committed), one) for one in self._kept), key=lambda pair: pair[0], default=(0, None)
        )
        # A session that shares less than half is for another text, which may come back.
        if session is None or 2 * shared < len(session.told):
            if len(self._kept) == KEPT_TEXTS:
                self._kept.pop(0).close()
            shared, session = 0, self.open()
        else:
            self._kept.remove(session)
        self._kept.append(session)
        return session.propose(shared, committed[shared:], block_size, num_steps)
