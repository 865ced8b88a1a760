"""Memory in which ranks of a tensor group leave what they share: partial sums of rows, and their part of the logits.

It may be the memory of one process, or of several that have mapped it. Where a rank is, `step.meet` says. Shapes: T rows of a batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.shares import LANES, MOST_SEGMENTS, Joins, Share, joins, segment_bounds, subtrees
from paceline.backends.cpu.sizes import CACHE_LINE
from paceline.core.model import ModelSpec
from paceline.core.weights import GROUP

Words = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Exchange:
    """As one rank sees it.

    Attributes:
        shares: of all ranks, the first one's first.
        memory: bytes that all ranks see, `exchange_bytes`, zeroed, from a cache line on.
        max_rows: of a batch.
        proves: the rank has a numerics id, which the first compares with its own: it is on another machine.
    """

    spec: ModelSpec
    shares: tuple[Share, ...]
    rank: int
    memory: npt.NDArray[np.uint8]
    max_rows: int
    proves: bool = False

    @property
    def arrived(self) -> int:
        """Address of the exchange that each rank has reached, a cache line a rank, and behind them of two words: to wait no longer, and that who waits
        sleeps.
        """
        return self.memory.ctypes.data

    @property
    def _plane(self) -> int:
        """Bytes of one partial sum of all rows."""
        return 4 * self.max_rows * self.spec.hidden

    def _sums(self, down: bool) -> tuple[Joins, int]:
        """All ranks' partial sums of a layer's half, and the address of the first one's rows."""
        out = joins([share.out for share in self.shares], _segments(self.spec)[0])
        first = self.arrived + CACHE_LINE * (1 + len(self.shares))
        if not down:
            return out, first
        return joins([share.down for share in self.shares], _segments(self.spec)[1]), first + self._plane * len(out.nodes)

    def parts(self, down: bool, bounds: Words) -> Words:
        """This rank's partial sums, as `step._multiply_parts` has them.

        Args:
            bounds: of this rank's segments, in groups of its own inputs; kept by the caller.
        """
        sums, first = self._sums(down)
        share = self.shares[self.rank]
        owned = _owned(share, down)
        rows = [
            (bounds.ctypes.data + 8 * (node.start - owned.start), len(node), first + self._plane * sums.nodes.index(node))
            for node in subtrees(owned, _segments(self.spec)[down])
        ]
        return np.array([len(rows), *(word for row in rows for word in row)], np.int64)

    def sums_of(self, rank: int, down: bool) -> npt.NDArray[np.float32]:
        """A rank's partial sums of a layer's half, [sums, rows, hidden]."""
        _, first = self._sums(down)
        before = sum(len(subtrees(_owned(share, down), _segments(self.spec)[down])) for share in self.shares[:rank])
        count = len(subtrees(_owned(self.shares[rank], down), _segments(self.spec)[down]))
        start = first - self.arrived + self._plane * before
        return self.memory[start : start + self._plane * count].view(np.float32).reshape(count, self.max_rows, self.spec.hidden)

    def joins(self, down: bool) -> Words:
        """How all partial sums are added, as `step._add_partials` has it."""
        sums, first = self._sums(down)
        places = [first + self._plane * i for i in range(len(sums.nodes))]
        return np.array([len(sums.nodes), len(sums.steps), *places, *(word for step in sums.steps for word in step)], np.int64)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """[rows, vocabulary in whole blocks]: of all ranks."""
        start = exchange_bytes(self.spec, self.shares, self.max_rows, 0)
        vocab = padded(self.spec.vocab)
        rows = (len(self.memory) - start) // (4 * vocab)
        return self.memory[start : start + 4 * vocab * rows].view(np.float32).reshape(rows, vocab)


def _owned(share: Share, down: bool) -> range:
    return share.down if down else share.out


def padded(vocab: int) -> int:
    """A vocabulary in whole blocks of outputs."""
    return -(-vocab // LANES) * LANES


def _segments(spec: ModelSpec) -> tuple[int, int]:
    """Of the sums of attention output and of feed-forward down."""
    return len(segment_bounds(spec.n_kv_heads)) - 1, min(MOST_SEGMENTS, spec.ffn // GROUP)


def exchange_bytes(spec: ModelSpec, shares: Sequence[Share], max_rows: int, logits_rows: int) -> int:
    """Memory that ranks of these shares leave things in.

    Args:
        max_rows: of a batch.
        logits_rows: of a batch whose logits are wanted, at most.
    """
    halves = zip(([share.out for share in shares], [share.down for share in shares]), _segments(spec), strict=True)
    planes = sum(len(joins(owned, segments).nodes) for owned, segments in halves)
    rows = CACHE_LINE * (1 + len(shares)) + planes * 4 * max_rows * spec.hidden
    return -(-rows // 4096) * 4096 + 4 * logits_rows * padded(spec.vocab)
