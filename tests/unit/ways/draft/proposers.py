"""Proposers that do what no proposer should."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from paceline.engine.drafts import BlockProposal
from paceline.engine.prompt_lookup import NGramIndex


class Scripted:
    """Drafts whatever a test says, and remembers what it was told."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids
        self.texts: list[tuple[int, ...]] = []

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        del num_steps
        self.texts.append(tuple(committed))
        return BlockProposal(self.token_ids[:block_size], 1, 2, 3)


class TooLong(Scripted):
    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        return BlockProposal((1,) * (block_size + 1))


class Floods(Scripted):
    """More than is read."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__(*[1] * n_tokens)

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        return BlockProposal(self.token_ids)


class Lookup:
    """Drafts what followed the last tokens before."""

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        index = NGramIndex()
        index.extend(committed)
        return BlockProposal(tuple(index.propose(block_size)))


class Breaks(Scripted):
    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        raise MemoryError("no room")


class Hangs(Scripted):
    """Until a test lets it go."""

    def __init__(self, *token_ids: int) -> None:
        super().__init__(*token_ids)
        self.begun, self.go = threading.Event(), threading.Event()

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        self.begun.set()
        assert self.go.wait(30)
        return super().propose_block(committed, block_size, num_steps)
