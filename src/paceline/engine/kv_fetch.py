"""Blocks of KV that a source brings into the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.ids import BlockId, NodeId


@dataclass(frozen=True, slots=True)
class GivenBlocks:
    """What a peer gave of a fetch's blocks."""

    giver: NodeId
    alike: Callable[[Sequence[BlockId]], KvFetch]
    """Finds how many blocks, from the first on, hold what the first one holds: that many are `filled` then; 0: it can't be known."""
    first: int = 0
    """Those before it were kept here."""


class KvFetch(Protocol):
    """Blocks on their way."""

    @property
    def given(self) -> GivenBlocks | None:
        """Final once `is_over`; None: a peer gave none of them."""
        ...

    @property
    def filled(self) -> int:
        """Blocks that stand, from the first on. Final once `is_over`."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no block is written any more. A source bounds how long it takes."""
        ...

    def cancel(self) -> None:
        """Have it end soon: it is wanted no more. Idempotent."""
        ...
