"""Prompt lookup as a proposer: no weights, no forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine import prompt_lookup
from paceline.engine.drafts import BlockProposal
from paceline.engine.proposers.session import DraftSession, SessionProposer, retell
from paceline.engine.proposers.stats import ProposerStats

NGRAM = "ngram"
"""Its model id: every node has it."""


class NGramProposer(SessionProposer):
    """Drafts what followed the longest earlier repetition of the last tokens."""

    def open(self) -> DraftSession:
        return _NGramSession(self.stats)


class _NGramSession:
    def __init__(self, stats: ProposerStats) -> None:
        self._stats = stats
        self.told: list[int] = []

    def propose(self, first_position: int, token_ids: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        del num_steps  # there is nothing to refine
        retell(self.told, first_position, token_ids)
        block = BlockProposal(prompt_lookup.propose(self.told, block_size))
        self._stats.count(block)
        return block

    def close(self) -> None:
        self.told.clear()
