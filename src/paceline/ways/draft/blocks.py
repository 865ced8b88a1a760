"""What is true of blocks however they travel: who is told of them, which sessions they belong to, whether they are drafts at all."""

from __future__ import annotations

import os
from collections.abc import Callable

from paceline.core.errors import RemoteProposerError
from paceline.engine.drafts import BlockProposal, Branch

MOST_BRANCHES, LONGEST_BRANCH = 64, 64
"""Raising them: a proposer can have more of this machine's time and memory."""

OnBlock = Callable[[int, BlockProposal | None], None]
"""Told of a session's block; None: the session is lost, and all of it must be said again."""


def new_session() -> int:
    """An id that no other session of this node has."""
    return int.from_bytes(os.urandom(8), "little") | 1


def check_block(block: BlockProposal, asked: int, vocabulary_size: int, peer: str) -> None:
    """Whether it is a draft at all; whether it is a good one, the model says.

    Raises:
        RemoteProposerError: it is longer than was asked for, or has tokens that don't exist, or branches that are none of its own.
    """
    if len(block.token_ids) > asked:
        raise RemoteProposerError(f"{peer} drafted {len(block.token_ids)} tokens, and {asked} were asked for", status="DATA_LOSS")
    unknown = next((token for token in block.token_ids if not 0 <= token < vocabulary_size), None)
    if unknown is not None:
        raise RemoteProposerError(f"{peer} drafted token {unknown} of a vocabulary of {vocabulary_size}", status="DATA_LOSS")
    if len(block.branches) > MOST_BRANCHES or not all(_is_branch(branch, block, vocabulary_size) for branch in block.branches):
        raise RemoteProposerError(f"{peer} drafted branches that its block has no place for", status="DATA_LOSS")


def _is_branch(branch: Branch, block: BlockProposal, vocabulary_size: int) -> bool:
    ids = branch.token_ids
    return branch.offset < len(block.token_ids) and 2 <= len(ids) <= LONGEST_BRANCH and min(ids) >= 0 and max(ids) < vocabulary_size
