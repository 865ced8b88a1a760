"""Paged attention for mlx-lm's models: blocks of keys and values, and one batch of rows over them.

The rows of a batch run as T sequences of one row, [T, 1, D], each rotated by its own position. So products see all rows at once, and layers are
called as mlx-lm calls them, with a `LayerCache` in place of mlx-lm's cache. `attends` makes such a layer call its cache for attention, which gathers each
sequence's blocks. Keys are read in whole blocks of 128 from position 0, and masked ones weigh exactly zero, so a row's sums
never depend on the length of other contexts. Values beyond a sequence's end are zeroed, so that a stale NaN can't leak in.

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
"""Keys of an attention block, a multiple of every block size."""
TILE = 256
"""Rows of a sequence that attend together. Raising it: more memory for scores where attention is not fused."""
TOGETHER = 16
"""Most rows of a sequence that attends in one batch with other sequences of equally many rows. Longer ones attend alone."""

Ints = npt.NDArray[np.int64]


class MlxPool:
    """Keys and values of a range of layers, each bf16 [blocks * N * block_size, D].

    A block's keys of one head are contiguous, so that gathering a sequence's keys copies whole pieces. MLX writes an array in place only if nothing else
    refers to it, so callers must not keep these arrays.
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
        """Return keys (`which` 0) or values (1) of a group, [S, N, K, D]. `pieces`: [S, N, B]."""
        by_piece = self.layers[layer][which].reshape(-1, self.block_size * self.head_dim)
        return by_piece[pieces].reshape(pieces.shape[0], self.n_kv, -1, self.head_dim)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one block's keys, or of its values, in one layer."""
        return 2 * self.n_kv * self.block_size * self.head_dim

    def block(self, block: int) -> slice:
        """Return the rows of a block in the arrays of each layer."""
        rows = self.n_kv * self.block_size
        return slice(block * rows, (block + 1) * rows)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows [first, first + R) of each sequence of a group."""

    rows: mx.array
    """Row numbers in the batch, [S * R]."""
    behind: mx.array
    """Distance from each key to each row, in positions, int32 [S, 1, R, K]; negative for later keys."""


@dataclass(frozen=True, slots=True)
class _Group:
    pieces: mx.array
    held: mx.array
    """True for the keys that belong to a sequence, bool [S, 1, K, 1]."""
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class MlxStep:
    """The positions, slots and groups of one batch's rows."""

    pool: MlxPool
    positions: mx.array
    """Position of each row, int32 [T]."""
    slots: mx.array
    """Row in the pool's arrays of each batch row's key, for each head, [T * N]."""
    groups: tuple[_Group, ...]
    back: mx.array
    """For each row of the batch, its place among the rows of all groups."""
    seen: dict[tuple[int, int], mx.array] = field(default_factory=dict[tuple[int, int], mx.array])
    """Masks, by tile and window."""

    def attend(self, layer: int, queries_TH1D: mx.array, scale: float, window: int) -> mx.array:
        """Return causal attention of every row, [T, H, 1, D]."""
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
    """The cache of one layer, in place of mlx-lm's own."""

    step: MlxStep
    layer: int
    """Layer number, counted from the runner's first."""
    window: int
    """Number of keys that a row sees; 0: all up to its own."""

    @property
    def offset(self) -> mx.array:
        return self.step.positions

    def update_and_fetch(self, keys_TN1D: mx.array, values_TN1D: mx.array) -> tuple[mx.array, mx.array]:
        """Write the rows' keys and values into the pool, and return them unchanged. `attend` gathers the others."""
        self.step.pool.write(self.layer, self.step.slots, (keys_TN1D, values_TN1D))
        return keys_TN1D, values_TN1D


def attends(module: ModuleType) -> None:
    """Make an mlx-lm module use the cache's attention if the cache is a `LayerCache`. Idempotent."""
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
    """Return the step of a batch, from which its layers' caches are made."""
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
    """Yield the sequences that attend together: those with few and equally many rows. Each other sequence is alone."""
    for count in np.unique(plan.n_rows_S):
        members = np.flatnonzero(plan.n_rows_S == count)
        if count <= TOGETHER:
            yield members
        else:
            yield from members[:, None]


def _group(plan: RowPlan, members: npt.NDArray[np.intp], pool: MlxPool) -> tuple[_Group, Ints]:
    """Return a group, and the numbers of its rows in the batch, in the order of its tiles."""
    count = int(plan.n_rows_S[members[0]])
    firsts = plan.first_position_S[members].astype(np.int64)
    keys = -(-int(firsts.max() + count) // KEYS) * KEYS
    # Entries past a table's end have no weight, so block 0 fills them.
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
