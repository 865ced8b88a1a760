"""Sizes that all ranks of a tensor group agree on."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.backends.cpu.shares import Share
from paceline.core.model import ModelSpec


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """What decides how the memory lies: alike in all ranks."""

    spec: ModelSpec
    shares: tuple[Share, ...]
    max_rows: int
    """Of a batch."""
    max_blocks: int
    """Of a sequence's table."""
    logits_rows: int
    """Of a batch whose logits are wanted, at most."""
