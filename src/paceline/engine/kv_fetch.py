"""KV blocks that a source brings into the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.ids import BlockId, NodeId


@dataclass(frozen=True, slots=True)
class GivenBlocks:
    """The part of a fetch's blocks that came from a peer."""

    giver: NodeId
    alike: Callable[[Sequence[BlockId]], KvFetch]
    """Starts a comparison of blocks: its `filled` is the number of blocks, from the first on, with the first one's content; 0: it can't be known."""
    first: int = 0
    """Index of the first block from the peer; the blocks before it were kept on this node."""


class KvFetch(Protocol):
    """A fetch of blocks under way."""

    @property
    def given(self) -> GivenBlocks | None:
        """The peer's part of the blocks; None: no block came from a peer. Final once `is_over`."""
        ...

    @property
    def filled(self) -> int:
        """Number of complete blocks, from the first on. Final once `is_over`."""
        ...

    @property
    def is_over(self) -> bool:
        """True once no block is written any more. The source bounds how long that takes."""
        ...

    def cancel(self) -> None:
        """Ask the fetch to end soon, because its blocks are not wanted any more. Idempotent."""
        ...
