"""KV of a model whose layers may lie on several machines, as it crosses between nodes: in parts, each from who holds its layers to who is to.

Law: a part is what some layers have of a block, and lies in the whole block in the order of layers: any cut of a part is one. It has the block's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Protocol

from paceline.core.errors import ExecutorLost
from paceline.core.ids import BlockId, NodeId
from paceline.core.model import LayerRange, LayerSpan
from paceline.engine.kv_fetch import GivenBlocks, KvFetch
from paceline.engine.kv_source import KvLoans, KvSource
from paceline.engine.local import LayerRunner

NO_LAYERS: Final = LayerRange(0, 0)


@dataclass(frozen=True, slots=True)
class KvPart:
    """Some layers' part of blocks."""

    digest: str
    """Of the model."""
    numerics_id: str
    layout: bytes
    """Names whole blocks of the model that may be copied from node to node."""
    layers: LayerRange
    layer_bytes: int
    """Of one layer of a block."""

    @property
    def block_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes

    def cut(self, stops: Sequence[int]) -> list[KvPart]:
        """The parts that each lie in one span of a node whose spans end at these layers."""
        start, stop = self.layers.start, self.layers.stop
        edges = [start, *(edge for edge in stops if start < edge < stop), stop]
        return [replace(self, layers=LayerRange(first, last)) for first, last in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class KvMove:
    """From whom a stage is to have blocks, or to whom it is to give them."""

    node_id: NodeId
    layout: bytes
    """As of `KvPart`: who is asked has the same, or does nothing."""
    stops: Sequence[int] = ()
    """Of the node that is asked for blocks."""
    n_likely: int = 0
    """Blocks that it is likely to have."""
    layers: LayerRange = NO_LAYERS
    """That are to be given."""
    tensor_port: int = 0
    ticket: bytes = b""
    """Of the stream that they are given through; to fetch: of the prompt that is being computed there, empty: blocks are there."""


class KvBlocks(Protocol):
    """Blocks that can be copied out and in, or parts of them: an `engine.local.LayerRunner`'s, or those of one session of a stage."""

    @property
    def layers(self) -> LayerRange: ...
    @property
    def numerics_id(self) -> str: ...
    @property
    def kv_layout(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None: ...
    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None: ...


def n_alike(held: KvBlocks, blocks: Sequence[BlockId]) -> int:
    """How many blocks, from the first on, hold what the first one holds; 0: all KV is void."""
    first, other = bytearray(held.block_bytes), bytearray(held.block_bytes)
    try:
        held.export_block(blocks[0], memoryview(first))
        for place, block in enumerate(blocks):
            held.export_block(block, memoryview(other))
            if first != other:
                return place
    except ExecutorLost:
        return 0
    return len(blocks)


class MovedBlocks(KvFetch, Protocol):
    """Blocks that come from another node."""

    @property
    def is_wrong(self) -> bool:
        """The next one was another block than the one asked for, or damaged."""
        ...


class KvMover(Protocol):
    """A node's, for the blocks of its stages. On the event loop."""

    def fetch(
        self,
        part: KvPart,
        held: KvBlocks,
        move: KvMove,
        keys: Sequence[bytes],
        blocks: Sequence[BlockId],
        within_s: float,
        wake: Callable[[], None],
    ) -> MovedBlocks:
        """Begin to fill blocks with what another node has. Nothing is written once it was cancelled.

        Args:
            wake: called, in any thread, when something came of it.
        """
        ...

    async def give(
        self, part: KvPart, move: KvMove, keys: Sequence[bytes], read: Callable[[int, memoryview], bool], within_s: float
    ) -> int:
        """Send a part of blocks to a node that asked. Returns how many were sent; nothing is read any more.

        Args:
            read: copies that part of the block at a place, in another thread. False: it can't be had.
        """
        ...


class ClosableKv(KvSource, Protocol):
    """Closed before the runner whose blocks it reads and writes."""

    def close(self) -> None: ...


class KvSpread(ClosableKv, Protocol):
    """The KV of an engine whose model lies on several machines, and the parts of its blocks that others than this one hold."""

    @property
    def spans(self) -> Sequence[LayerSpan]:
        """Those machines' layers; none where they move no blocks now. For any thread."""
        ...

    @property
    def takes_prompts(self) -> bool:
        """Whether those machines fetch blocks of prompts that are still being computed."""
        ...

    def fetch_parts(self, move: KvMove, keys: Sequence[bytes], blocks: Sequence[BlockId], within_s: float) -> MovedBlocks:
        """Have each fill its part of blocks. For the engine's thread."""
        ...

    def compare_parts(self, blocks: Sequence[BlockId]) -> MovedBlocks:
        """Have each compare its part of blocks, as `GivenBlocks.alike`. For the engine's thread."""
        ...

    def give_part(self, move: KvMove, keys: Sequence[bytes], blocks: Sequence[BlockId], within_s: float) -> Future[int]:
        """Have the one that holds the layers of `move` send them. How many it sent: then, it reads them no more. For any thread."""
        ...


SpreadKvBeside = Callable[[LayerRunner[Any], str, KvSpread, KvLoans, Callable[[], None], KvPart], ClosableKv]
"""Puts KV of other nodes beside that of a model's machines: from this one's runner, the model's digest, the machines, what the pool lends, what to call
when a fetch is over, and what a whole block is."""


class PartsFetch:
    """Implements `MovedBlocks`: blocks whose parts come apart. One stands once all its parts do."""

    def __init__(self, parts: Sequence[MovedBlocks], given: GivenBlocks | None = None) -> None:
        self._parts, self.given = parts, given

    @property
    def filled(self) -> int:
        return min(part.filled for part in self._parts)

    @property
    def is_wrong(self) -> bool:
        return any(part.is_wrong for part in self._parts)

    @property
    def is_over(self) -> bool:
        ended = [part for part in self._parts if part.is_over]
        if ended and len(ended) < len(self._parts):
            most = min(part.filled for part in ended)
            for part in self._parts:
                if part.filled >= most:
                    part.cancel()  # of what follows, another part lacks
        return len(ended) == len(self._parts)

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()
