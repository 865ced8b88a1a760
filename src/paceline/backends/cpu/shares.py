"""The shares of the ranks of a tensor group: whole segments of the sums that ranks share, and how partial sums give the same total as on one machine.

A sum over inputs that ranks share (attention output, feed-forward down) runs over S segments, added in one binary tree
(docs/internals/arithmetic.md). A rank owns neighbouring segments, and passes on a partial sum for each largest subtree that it owns completely. The
partial sums of all ranks are then added in the order of the tree. So the split of a model changes no byte.

Importing this imports no kernel. Shapes: S segments, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Protocol

from paceline.core.model import ModelSpec
from paceline.core.weights import GROUP

MOST_SEGMENTS = 16
LANES = 16
RANK_BYTES = 80 << 20
"""Memory of a rank's process in addition to its share: the interpreter, Numba, compiled kernels. Files that it maps are mapped by its parent too.
Source: `own_bytes` of ranks of a tiny model (77 MiB), and of the bundled one (128 MiB, of which 48 are its half)."""
_SUPERBLOCK = 256
"""Inputs of a superblock of K-quants."""


def segment_bounds(units: int) -> tuple[int, ...]:
    """Return the bounds of the segments of a sum over indivisible `units`: the beginning of each, and the end of the last, [S + 1]."""
    segments = max(1, min(MOST_SEGMENTS, units))  # a mixture of experts has a dense size of zero
    return tuple(i * units // segments for i in range(segments + 1))


@dataclass(frozen=True, slots=True)
class Share:
    """The share of one rank in every layer and in the head. An empty range: the rank has no part of it."""

    kv_heads: range
    out: range
    """Segments of the attention output's sum, which belong to the rank's heads."""
    down: range
    """Segments of the feed-forward down sum."""
    vocab: range
    """Blocks of 16 outputs of the head."""

    def inner(self, spec: Divided) -> range:
        """Return the range of the rank's inner activations of the feed-forward."""
        bounds = segment_bounds(spec.ffn // GROUP)
        return range(bounds[self.down.start] * GROUP, bounds[self.down.stop] * GROUP)

    def attended(self, spec: ModelSpec) -> range:
        """Return the range of the rank's inputs of the attention output's sum."""
        width = spec.n_heads // spec.n_kv_heads * spec.value_dim
        return range(self.kv_heads.start * width, self.kv_heads.stop * width)

    def of(self, spec: ModelSpec) -> ModelSpec:
        """Return the sizes of a model that consists of this share only."""
        heads = len(self.kv_heads)
        return replace(spec, n_heads=heads * spec.n_heads // spec.n_kv_heads, n_kv_heads=heads, ffn=len(self.inner(spec)))


def undivided(spec: ModelSpec) -> str | None:
    """Return why ranks can't share a model's layers; None if they can."""
    if spec.qk_norm_whole:  # a rank has only some of the heads
        return "its queries and keys are normed over all heads together"
    if spec.low is not None:
        return "its queries, keys and values are products of products, of which each rank would do the first ones anew"
    if spec.hidden % GROUP:
        return f"its hidden size of {spec.hidden} is no multiple of {GROUP}"
    return None if spec.moe is None else "mixtures of experts are not dealt yet"


def whole(spec: ModelSpec) -> Share:
    """Return the share of a machine that runs a model alone: all of it."""
    (share,) = deal(spec, (1.0,))
    return share


class Divided(Protocol):
    """The sizes that shares are computed from: a `ModelSpec`, or a card's description of a model."""

    @property
    def n_kv_heads(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocab(self) -> int: ...


def deal(spec: Divided, speeds: Sequence[float]) -> tuple[Share, ...]:
    """Return the shares of ranks with these relative speeds.

    Each sum and the head are divided independently, because all ranks wait for the slowest one at the end of each.

    Raises:
        ValueError: there are no ranks, or a speed is not positive.
    """
    if not speeds or min(speeds) <= 0:
        raise ValueError(f"ranks of speeds {list(speeds)}")
    heads, groups = segment_bounds(spec.n_kv_heads), segment_bounds(spec.ffn // GROUP)
    blocks = -(-spec.vocab // LANES)
    # The first rank has at least one block, because the rank with the first outputs also has the embedding.
    ends = [max(1, round(blocks * part / sum(speeds))) for part in accumulate(speeds)]
    return cut(
        spec,
        [
            (out.stop, down.stop, end)
            for out, down, end in zip(_deal(heads, tuple(speeds)), _deal(groups, tuple(speeds)), ends, strict=True)
        ],
    )


def cut(spec: Divided, stops: Sequence[tuple[int, int, int]]) -> tuple[Share, ...]:
    """Return consecutive shares from their ends.

    Args:
        stops: for each rank, its end in the segments of both sums and in the blocks of the head's outputs.

    Raises:
        ValueError: a share ends before it begins, the last one does not end with the model, or the first has no outputs.
    """
    heads = segment_bounds(spec.n_kv_heads)
    whole = (len(heads) - 1, len(segment_bounds(spec.ffn // GROUP)) - 1, -(-spec.vocab // LANES))
    if (
        any(b < a for one, other in pairwise(((0, 0, 0), *stops)) for a, b in zip(one, other, strict=True))
        or not stops
        or stops[-1] != whole
    ):
        raise ValueError(f"ranks that end at {list(stops)} don't share a model that ends at {whole}")
    if not stops[0][2]:
        raise ValueError("the first rank has no outputs")
    return tuple(
        Share(range(heads[out[0]], heads[out[1]]), range(*out), range(*down), range(*vocab))
        for out, down, vocab in (zip(*pair, strict=True) for pair in pairwise(((0, 0, 0), *stops)))
    )


def _deal(bounds: tuple[int, ...], speeds: tuple[float, ...]) -> tuple[range, ...]:
    """Return the segments of each rank in the split that lets the slowest rank end soonest.

    Among such splits it takes the most even one, and among those the one with the fewest partial sums.
    """
    n = len(bounds) - 1

    def cost(rank: int, start: int, stop: int) -> tuple[float, float, int]:
        duration = (bounds[stop] - bounds[start]) / speeds[rank]
        return duration, duration * duration, len(subtrees(range(start, stop), n))

    @cache
    def best(rank: int, start: int) -> tuple[tuple[float, float, int], tuple[int, ...]]:
        if rank == len(speeds) - 1:
            return cost(rank, start, n), (n,)
        found = list[tuple[tuple[float, float, int], tuple[int, ...]]]()
        for stop in range(start, n + 1):
            (longest, squares, sums), stops = best(rank + 1, stop)
            own = cost(rank, start, stop)
            found.append(((max(own[0], longest), own[1] + squares, own[2] + sums), (stop, *stops)))
        return min(found)

    return tuple(range(*pair) for pair in pairwise((0, *best(0, 0)[1])))


def subtrees(owned: range, segments: int) -> tuple[range, ...]:
    """Return the largest subtrees of the tree over `segments` that lie completely in the owned segments, from left to right."""
    found, start = list[range](), owned.start
    while start < owned.stop:
        size = 1
        # A subtree of 2 * size begins at a multiple of 2 * size, and ends early if the tree does (its size may not be a power of two).
        while start % (2 * size) == 0 and size < segments and min(start + 2 * size, segments) <= owned.stop:
            size *= 2
        found.append(range(start, min(start + size, segments)))
        start = found[-1].stop
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Joins:
    """The additions that turn partial sums into the total.

    Attributes:
        nodes: the ranks' partial sums, from left to right, with the numbers 0 to N - 1.
        steps: (left, right, place): add the sums with these two numbers into a place. Number N + i is place i. The last step gives the total.
    """

    nodes: tuple[range, ...]
    steps: tuple[tuple[int, int, int], ...]


def joins(owned: Sequence[range], segments: int) -> Joins:
    """Return the additions for ranks that own these segments, from left to right."""
    nodes = tuple(node for part in owned for node in subtrees(part, segments))
    steps, waiting = list[tuple[int, int, int]](), list[tuple[range, int]]()
    for number, node in enumerate(nodes):
        waiting.append((node, number))
        while len(waiting) > 1 and _are_siblings(waiting[-2][0], waiting[-1][0], segments):
            (left, one), (right, other) = waiting[-2:]
            place = len(waiting) - 2
            steps.append((one, other, place))
            waiting[-2:] = [(range(left.start, right.stop), len(nodes) + place)]
    return Joins(nodes, tuple(steps))


def _are_siblings(left: range, right: range, segments: int) -> bool:
    """Return whether two neighbouring subtrees are the two halves of one subtree."""
    size = len(left)
    return size & (size - 1) == 0 and left.start % (2 * size) == 0 and right.stop == min(left.start + 2 * size, segments)


def covered(inputs: range, k: int) -> range:
    """Return the range of whole superblocks that contain these inputs, of K; the inputs themselves if K is not a multiple of a superblock."""
    if k % _SUPERBLOCK or not inputs:
        return inputs
    return range(inputs.start // _SUPERBLOCK * _SUPERBLOCK, -(-inputs.stop // _SUPERBLOCK) * _SUPERBLOCK)
