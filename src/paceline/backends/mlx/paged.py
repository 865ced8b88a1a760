"""Paged attention for mlx-lm's models: blocks of keys and values, and one batch of rows over them.

A batch's rows run as so many sequences of one row, [T, 1, D], each turned by its own position: products see all rows at once, and a model's layers are
called as mlx-lm calls them, with a `LayerCache` in the place of its own. Where such a layer comes to attend, `attends` has its cache do it: it gathers each
sequence's blocks. Keys count in whole blocks of 128 from position 0, and masked ones weigh exactly zero, so that a row's sums
never depend on how long the others' contexts are. Values beyond a sequence's end are zeroed: a stale NaN can't leak in.

Shapes: T rows, S sequences of one group, R rows each, H query heads, N KV heads, D head dimension, K keys, B blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import numpy as np
import numpy.typing as npt

from paceline.engine.local import RowPlan

KEYS = 128
"""Keys an attention block holds: a multiple of every block size."""
TILE = 256
"""Rows of a sequence that attend together. Raising it takes memory for scores where attention is not fused."""
TOGETHER = 16
"""Sequences with at most this many rows are batched with others of as many rows."""

Ints = npt.NDArray[np.int64]


class MlxPool:
    """Keys and values of a range of layers: of each, bf16 [blocks * N * block_size, D].

    A block's keys of one head lie together, so that gathering a sequence's keys copies whole pieces. Arrays are written in place as long as nothing else
    holds them, so no one keeps them.
    """

    def __init__(self, n_layers: int, n_blocks: int, block_size: int, n_kv: int, head_dim: int) -> None:
        self.n_blocks, self.block_size, self.n_kv, self.head_dim = n_blocks, block_size, n_kv, head_dim
        shape = (n_blocks * n_kv * block_size, head_dim)
        self.layers = [[mx.zeros(shape, mx.bfloat16), mx.zeros(shape, mx.bfloat16)] for _ in range(n_layers)]
        """(keys, values) of each layer."""
        mx.eval(self.layers)

    def write(self, layer: int, slots: mx.array, rows: tuple[mx.array, mx.array]) -> None:
        for which, x_TND in enumerate(rows):
            self.layers[layer][which][slots] = x_TND.reshape(-1, self.head_dim)

    def gather(self, layer: int, which: int, pieces: mx.array) -> mx.array:
        """Keys (0) or values (1) of a group, [S, N, K, D]; `pieces` [S, N, B]."""
        by_piece = self.layers[layer][which].reshape(-1, self.block_size * self.head_dim)
        return by_piece[pieces].reshape(pieces.shape[0], self.n_kv, -1, self.head_dim)

    @property
    def piece_bytes(self) -> int:
        """Of one block's keys, or values, in one layer."""
        return 2 * self.n_kv * self.block_size * self.head_dim

    def block(self, block: int) -> slice:
        """Where a block lies in each layer."""
        rows = self.n_kv * self.block_size
        return slice(block * rows, (block + 1) * rows)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows [first, first + R) of each sequence of a group."""

    rows: mx.array
    """Of the batch, [S * R]."""
    behind: mx.array
    """How far each key is behind a row, int32 [S, 1, R, K]."""


@dataclass(frozen=True, slots=True)
class _Group:
    pieces: mx.array
    held: mx.array
    """Keys that are a sequence's own, bool [S, 1, K, 1]."""
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class MlxStep:
    """Where one batch's rows stand."""

    pool: MlxPool
    positions: mx.array
    """int32 [T]."""
    slots: mx.array
    """Where each row's key of each head lies, [T * N]."""
    groups: tuple[_Group, ...]
    back: mx.array
    """The place, among all groups' rows, of each of the batch's."""
    seen: dict[tuple[int, int], mx.array] = field(default_factory=dict[tuple[int, int], mx.array])
    """Masks, by tile and window."""

    def attend(self, layer: int, queries_TH1D: mx.array, scale: float, window: int) -> mx.array:
        """Causal attention of every row, [T, H, 1, D]."""
        heads, head_dim = queries_TH1D.shape[1], queries_TH1D.shape[3]
        parts: list[mx.array] = []
        for group in self.groups:
            keys = self.pool.gather(layer, 0, group.pieces)
            values = mx.where(group.held, self.pool.gather(layer, 1, group.pieces), mx.array(0, mx.bfloat16))
            for tile in group.tiles:
                s, _, r, k = tile.behind.shape
                q_SHRD = queries_TH1D[tile.rows].reshape(s, r, heads, head_dim).swapaxes(1, 2)
                mask = self._mask(tile, window)
                out = mx.fast.scaled_dot_product_attention(q_SHRD, keys[:, :, :k], values[:, :, :k], scale=scale, mask=mask)
                parts.append(out.swapaxes(1, 2).reshape(-1, heads, 1, head_dim))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)[self.back]

    def _mask(self, tile: _Tile, window: int) -> mx.array:
        key = (id(tile), window)
        if key not in self.seen:
            earlier = tile.behind >= 0
            self.seen[key] = earlier & (tile.behind < window) if window else earlier
        return self.seen[key]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer of mlx-lm's takes as its cache."""

    step: MlxStep
    layer: int
    """From the runner's first."""
    window: int
    """Keys that a row sees; 0: all before it."""

    @property
    def offset(self) -> mx.array:
        return self.step.positions

    def update_and_fetch(self, keys_TN1D: mx.array, values_TN1D: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows' own, and give them back: `attend` gathers all."""
        self.step.pool.write(self.layer, self.step.slots, (keys_TN1D, values_TN1D))
        return keys_TN1D, values_TN1D


def attends(module: ModuleType) -> None:
    """Have a module of mlx-lm's attend as its cache does, where that is a `LayerCache`. Idempotent."""
    theirs: Callable[..., Any] = module.scaled_dot_product_attention
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def attend(queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, **more: Any) -> Any:
        if isinstance(cache, LayerCache):
            return cache.step.attend(cache.layer, queries, scale, cache.window)
        return theirs(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)

    module.scaled_dot_product_attention = attend  # pyright: ignore[reportAttributeAccessIssue]


def step_of(plan: RowPlan, pool: MlxPool) -> MlxStep:
    """A batch, as its layers take it."""
    n_rows = plan.n_rows_S.astype(np.int64)
    within = np.arange(n_rows.sum()) - np.repeat(np.cumsum(n_rows) - n_rows, n_rows)
    positions = within + np.repeat(plan.first_position_S.astype(np.int64), n_rows)
    blocks = plan.tables_SB[np.repeat(np.arange(len(n_rows)), n_rows), positions // pool.block_size].astype(np.int64)
    pieces = blocks[:, None] * pool.n_kv + np.arange(pool.n_kv)
    slots = pieces * pool.block_size + positions[:, None] % pool.block_size
    parts = [_group(plan, members, pool) for members in _alike(plan)]
    order = np.concatenate([rows for _, rows in parts])
    return MlxStep(pool, _ints(positions), _ints(slots.ravel()), tuple(group for group, _ in parts), _ints(np.argsort(order)))


def _ints(numbers: npt.NDArray[np.integer[Any]]) -> mx.array:
    return mx.array(numbers.astype(np.int32))


def _alike(plan: RowPlan) -> Iterator[npt.NDArray[np.intp]]:
    """Sequences that attend together: few rows each, and equally many; others alone."""
    for count in np.unique(plan.n_rows_S):
        members = np.flatnonzero(plan.n_rows_S == count)
        if count <= TOGETHER:
            yield members
        else:
            yield from members[:, None]


def _group(plan: RowPlan, members: npt.NDArray[np.intp], pool: MlxPool) -> tuple[_Group, Ints]:
    """A group, and its rows of the batch in the order that tiles have them."""
    count = int(plan.n_rows_S[members[0]])
    firsts = plan.first_position_S[members].astype(np.int64)
    keys = -(-int(firsts.max() + count) // KEYS) * KEYS
    # Entries past a table's end are never weighed; block 0 stands in.
    tables = np.zeros((len(members), keys // pool.block_size), np.int64)
    width = min(tables.shape[1], plan.tables_SB.shape[1])
    tables[:, :width] = np.maximum(plan.tables_SB[members, :width], 0)
    pieces = tables[:, None] * pool.n_kv + np.arange(pool.n_kv)[:, None]
    tiles, order = list[_Tile](), list[Ints]()
    for first in range(0, count, TILE):
        within = np.arange(first, min(first + TILE, count))
        seen = -(-int(firsts.max() + within[-1] + 1) // KEYS) * KEYS
        behind = (firsts[:, None] + within)[:, None, :, None] - np.arange(seen)
        order.append((plan.row_start_S[members].astype(np.int64)[:, None] + within).ravel())
        tiles.append(_Tile(_ints(order[-1]), _ints(behind)))
    held: Any = np.arange(keys)[None] < (firsts + count)[:, None]
    return _Group(_ints(pieces), mx.array(held[:, None, :, None]), tuple(tiles)), np.concatenate(order)
