"""One sequence's drafts: a proposer remembers what it was told, so that only new tokens need be said and run.

Law: a session that was told the same tokens drafts the same, however they were cut into asks. The caller that opens one closes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from paceline.engine.drafts import BlockProposal, Proposer

KEPT_TEXTS = 16
"""Texts that a proposer remembers of callers without sessions. Raising it: memory, for callers that take turns."""


class DraftSession(Protocol):
    """What a proposer knows of one sequence. For one thread at a time."""

    @property
    def told(self) -> Sequence[int]:
        """The sequence, as it was told."""
        ...

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
        """As `Proposer.propose_block`."""
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


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two texts share. Compares slices, which is a hundred times faster than token by token."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
