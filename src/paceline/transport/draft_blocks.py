"""What is true of blocks however they travel: who is told of them, which sessions they belong to, whether they are drafts at all."""

from __future__ import annotations

import os
from collections.abc import Callable

from paceline.core.errors import RemoteProposerError
from paceline.engine.drafts import BlockProposal

OnBlock = Callable[[int, BlockProposal | None], None]
"""Told of a session's block; None: the session is lost, and all of it must be said again."""


def new_session() -> int:
    """An id that no other session of this node has."""
    return int.from_bytes(os.urandom(8), "little") | 1


def check_block(block: BlockProposal, asked: int, vocabulary_size: int, peer: str) -> None:
    """Whether it is a draft at all; whether it is a good one, the model says.

    Raises:
        RemoteProposerError: it is longer than was asked for, or has tokens that don't exist.
    """
    if len(block.token_ids) > asked:
        raise RemoteProposerError(f"{peer} drafted {len(block.token_ids)} tokens, and {asked} were asked for", status="DATA_LOSS")
    unknown = next((token for token in block.token_ids if not 0 <= token < vocabulary_size), None)
    if unknown is not None:
        raise RemoteProposerError(f"{peer} drafted token {unknown} of a vocabulary of {vocabulary_size}", status="DATA_LOSS")
