"""Prompt lookup as a proposer: no weights, no forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.drafts import BlockProposal
from paceline.engine.prompt_lookup import NGramIndex
from paceline.engine.proposers.branches import Occurrences, branches
from paceline.engine.proposers.session import DraftSession, SessionProposer, check_no_gap


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
