"""Memory through which the ranks of a tensor group exchange partial sums of rows, and their parts of the logits.

It is memory of one process, or memory that several processes have mapped. `step.meet` is the barrier. Shapes: T rows of a batch, D hidden.
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
    """The shared memory from the point of view of one rank.

    Attributes:
        shares: shares of all ranks, in the order of ranks.
        memory: memory that all ranks see, of `exchange_bytes` bytes, zeroed, aligned to a cache line.
        max_rows: most rows of a batch.
        proves: true for a rank on another machine: it has a numerics id, which the first rank compares with its own.
    """

    spec: ModelSpec
    shares: tuple[Share, ...]
    rank: int
    memory: npt.NDArray[np.uint8]
    max_rows: int
    proves: bool = False

    @property
    def arrived(self) -> int:
        """Address of each rank's progress (the number of the exchange it has reached), one cache line for each rank. Two words follow: a stop signal,
        and a word that tells waiting ranks to sleep.
        """
        return self.memory.ctypes.data

    @property
    def _plane(self) -> int:
        """Bytes of one partial sum of all rows."""
        return 4 * self.max_rows * self.spec.hidden

    def _sums(self, down: bool) -> tuple[Joins, int]:
        """Return the partial sums of all ranks for one half of a layer, and the address of the rows of the first sum."""
        out = joins([share.out for share in self.shares], _segments(self.spec)[0])
        first = self.arrived + CACHE_LINE * (1 + len(self.shares))
        if not down:
            return out, first
        return joins([share.down for share in self.shares], _segments(self.spec)[1]), first + self._plane * len(out.nodes)

    def parts(self, down: bool, bounds: Words) -> Words:
        """Return the words that describe this rank's partial sums to `step._multiply_parts`.

        Args:
            bounds: bounds of this rank's segments, in groups of its own inputs. The caller keeps the array alive, because its address is stored.
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
        """Return a rank's partial sums for one half of a layer, [sums, rows, hidden]."""
        _, first = self._sums(down)
        before = sum(len(subtrees(_owned(share, down), _segments(self.spec)[down])) for share in self.shares[:rank])
        count = len(subtrees(_owned(self.shares[rank], down), _segments(self.spec)[down]))
        start = first - self.arrived + self._plane * before
        return self.memory[start : start + self._plane * count].view(np.float32).reshape(count, self.max_rows, self.spec.hidden)

    def joins(self, down: bool) -> Words:
        """Return the words that tell `step._add_partials` how to add all partial sums."""
        sums, first = self._sums(down)
        places = [first + self._plane * i for i in range(len(sums.nodes))]
        return np.array([len(sums.nodes), len(sums.steps), *places, *(word for step in sums.steps for word in step)], np.int64)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Logits of all ranks, [rows, vocabulary in whole blocks]."""
        start = exchange_bytes(self.spec, self.shares, self.max_rows, 0)
        vocab = padded(self.spec.vocab)
        rows = (len(self.memory) - start) // (4 * vocab)
        return self.memory[start : start + 4 * vocab * rows].view(np.float32).reshape(rows, vocab)


def _owned(share: Share, down: bool) -> range:
    return share.down if down else share.out


def padded(vocab: int) -> int:
    """Return the size of a vocabulary rounded up to whole blocks of outputs."""
    return -(-vocab // LANES) * LANES


def _segments(spec: ModelSpec) -> tuple[int, int]:
    """Return the number of segments in the sums of the attention output, and of the feed-forward's down projection."""
    return len(segment_bounds(spec.n_kv_heads)) - 1, min(MOST_SEGMENTS, spec.ffn // GROUP)


def exchange_bytes(spec: ModelSpec, shares: Sequence[Share], max_rows: int, logits_rows: int) -> int:
    """Return the bytes of memory that ranks with these shares need to exchange their results.

    Args:
        max_rows: most rows of a batch.
        logits_rows: most rows of a batch with logits.
    """
    halves = zip(([share.out for share in shares], [share.down for share in shares]), _segments(spec), strict=True)
    planes = sum(len(joins(owned, segments).nodes) for owned, segments in halves)
    rows = CACHE_LINE * (1 + len(shares)) + planes * 4 * max_rows * spec.hidden
    return -(-rows // 4096) * 4096 + 4 * logits_rows * padded(spec.vocab)
