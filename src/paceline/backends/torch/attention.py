"""The interface of a layer to one batch (rotary embedding, attention over paged keys), and its implementation on a CPU with plain torch operations.
Results do not depend on the rows, chunks, batch or threads that run together.

Keys are read in absolute blocks of 128 from position 0. Every product has 128 keys or one head's width as its inner length, so a row's
sums never depend on the length of other contexts. Blocks are added one after the other in float32. Masked keys weigh exactly
zero, so trailing blocks add nothing. On a processor without products of bf16, products are in float32, always of `ROWS` rows. Values
beyond a sequence's end are zeroed, so that a stale NaN of another sequence can't leak in.

Shapes: T rows, S sequences of one group, R rows each, H query heads (in `Step` and `Rope`, of keys too), N KV heads, G = H / N, D head dimension, B keys in
whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.backends.torch.linear import multiplies_bf16
from paceline.core.model import ModelSpec, RopeSpec
from paceline.core.weights import rope_tables
from paceline.engine.local import RowPlan


class Step(Protocol):
    """One batch of rows."""

    def rotate(self, x_THD: Tensor) -> Tensor:
        """Apply the rotary embedding to bf16 heads, in float32. Returns bf16."""
        ...

    def attend(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, window: int = 0) -> Tensor:
        """Write keys and values into their blocks, then return causal attention of every row, bf16 [T, H * D].

        `layer` counts from the first layer of the runner's range. `window`: number of keys that a row sees, including its own; 0: all up to its own.
        """
        ...


class Rope:
    """Rotary tables on a device: cos [C, D] and signed sin [C, D] of every position, float32."""

    def __init__(self, rope: RopeSpec, head_dim: int, positions: int, device: torch.device) -> None:
        cos, sin = rope_tables(rope, head_dim, positions)
        self.cos_CD = torch.from_numpy(np.concatenate([cos, cos], 1)).to(device)
        self.sin_CD = torch.from_numpy(np.concatenate([-sin, sin], 1)).to(device)
        self._half = head_dim // 2

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of both tables at positions, [T, 1, D] each."""
        return self.cos_CD[positions_T][:, None], self.sin_CD[positions_T][:, None]

    def rotate(self, x_THD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate heads with two products and a sum, each rounded separately: a fused multiply-add would depend on how a loop was vectorised."""
        wide = x_THD.float()
        return (wide * turn[0]).add_(wide.roll(self._half, -1).mul_(turn[1])).bfloat16()


def row_positions(plan: RowPlan) -> npt.NDArray[np.int64]:
    """Return the position of every row, int64 [T]."""
    n_rows = plan.n_rows_S.astype(np.int64)
    within = np.arange(n_rows.sum()) - np.repeat(np.cumsum(n_rows) - n_rows, n_rows)
    return within + np.repeat(plan.first_position_S.astype(np.int64), n_rows)


def row_blocks(plan: RowPlan, positions_T: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """Return the number of the block that holds each row, int64 [T]."""
    sequences_T = np.repeat(np.arange(len(plan.n_rows_S)), plan.n_rows_S)
    return plan.tables_SB[sequences_T, positions_T // block_size].astype(np.int64)


KEYS = 128
"""Keys of an attention block, a multiple of every block size."""
TILE = 128
"""Rows of a sequence that attend together. Raising it: more masked products; lowering it: more small products."""
ROWS = 16
"""Rows of one float32 product. With 16, every known library gives a row the same bits in each place. Raising it: with 64, not under AVX2; lowering it:
slower."""
TOGETHER = 16
"""Most rows of a sequence that attends in one batch with other sequences of equally many rows. Longer ones attend alone."""


class KvPool:
    """Keys and values of a range of layers, bf16 [layers, 2, blocks, N, block_size, D].

    A block's keys of one head are contiguous, so that gathering a sequence's keys copies whole pieces.
    """

    def __init__(self, n_layers: int, n_blocks: int, block_size: int, n_kv: int, head_dim: int) -> None:
        self.n_blocks, self.block_size, self.n_kv, self.head_dim = n_blocks, block_size, n_kv, head_dim
        pool = torch.zeros(n_layers, 2, n_blocks * n_kv, block_size * head_dim, dtype=torch.bfloat16)
        self.pieces = [(layer[0], layer[1]) for layer in pool]
        """(keys, values) of each layer, [blocks * N, block_size * D]."""

    def write(self, layer: int, slots: Tensor, k_TND: Tensor, v_TND: Tensor) -> None:
        for pool, rows in zip(self.pieces[layer], (k_TND, v_TND), strict=True):
            pool.view(-1, self.head_dim).index_copy_(0, slots, rows.reshape(-1, self.head_dim))

    def block(self, block: int, layers: slice = slice(None)) -> list[Tensor]:
        """Return a block's keys and values in each layer, or in some layers, [N, block_size * D] each."""
        own = slice(block * self.n_kv, (block + 1) * self.n_kv)
        return [piece[own] for layer in self.pieces[layers] for piece in layer]

    def gather(self, layer: int, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keys, values) of a group, [S * N, B, D] each. `pieces`: [S, N, blocks]."""
        shape = (pieces.shape[0] * self.n_kv, -1, self.head_dim)
        k, v = self.pieces[layer]
        flat = pieces.flatten()
        return k.index_select(0, flat).view(shape), v.index_select(0, flat).view(shape)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows [first, first + R) of each sequence of a group."""

    rows: Tensor | slice
    """The S * R rows in the batch."""
    n_rows: int
    keys: int
    behind: Tensor
    """Distance from each key to each row, in positions, int64 [S, 1, R, 1, B]; negative for later keys."""

    def hidden_of(self, window: int) -> Tensor:
        """Return the mask of keys that a row does not see: later ones, and those before the window (0: no window)."""
        later = self.behind < 0
        return later.logical_or_(self.behind >= window) if window else later


@dataclass(frozen=True, slots=True)
class _Group:
    pieces: Tensor
    ending: int
    """Number of keys of the shortest sequence: all keys before this one belong to their sequence."""
    beyond: Tensor
    """True for keys from `ending` on that are past a sequence's end, bool [S, 1, keys, 1]."""
    tiles: tuple[_Tile, ...]


class CpuStep:
    """One batch of rows on this machine's CPU."""

    def __init__(self, plan: RowPlan, spec: ModelSpec, pool: KvPool, rope: Rope) -> None:
        self._pool, self._rope, self._spec = pool, rope, spec
        positions = row_positions(plan)
        self._turn = rope.at(torch.from_numpy(positions))
        first_slot = row_blocks(plan, positions, pool.block_size)[:, None] * pool.n_kv + np.arange(pool.n_kv)
        self._slots = torch.from_numpy((first_slot * pool.block_size + positions[:, None] % pool.block_size).ravel())
        self._groups = tuple(_group(plan, members, pool) for members in _alike(plan))
        self._scale = spec.head_dim**-0.5
        self._bmm = torch.bmm if multiplies_bf16() else _wide_bmm

    def rotate(self, x_THD: Tensor) -> Tensor:
        return self._rope.rotate(x_THD, self._turn)

    def attend(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, window: int = 0) -> Tensor:
        self._pool.write(layer, self._slots, k_THD, v_THD)
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in self._groups:
            keys, values = self._pool.gather(layer, group.pieces)
            values.view(len(group.pieces), self._pool.n_kv, *values.shape[1:])[:, :, group.ending :].masked_fill_(group.beyond, 0)
            for tile in group.tiles:
                out[tile.rows] = self._tile(q_THD[tile.rows], keys[:, : tile.keys], values[:, : tile.keys], tile, window)
        return out.flatten(1)

    def _tile(self, q_THD: Tensor, keys: Tensor, values: Tensor, tile: _Tile, window: int) -> Tensor:
        n_kv, head_dim, r = self._pool.n_kv, self._pool.head_dim, tile.n_rows
        per_kv = q_THD.shape[1] // n_kv
        q = q_THD.view(-1, r, n_kv, per_kv, head_dim).transpose(1, 2).reshape(len(keys), -1, head_dim)
        in_blocks = [keys[:, first : first + KEYS] for first in range(0, tile.keys, KEYS)]
        scores = torch.cat([self._bmm(q, block.transpose(1, 2)) for block in in_blocks], 2).float().mul_(self._scale)
        scores.view(-1, n_kv, r, per_kv, tile.keys).masked_fill_(tile.hidden_of(window), -math.inf)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        part_sums = weights.view(*weights.shape[:2], -1, KEYS).sum(-1)
        weights = weights.bfloat16()
        total, norm = None, None
        for b in range(tile.keys // KEYS):
            at = slice(b * KEYS, (b + 1) * KEYS)
            part, part_sum = self._bmm(weights[:, :, at], values[:, at]).float(), part_sums[:, :, b]
            total, norm = (part, part_sum) if total is None or norm is None else (total.add_(part), norm + part_sum)
        assert total is not None
        assert norm is not None
        mean = total.div_(norm[:, :, None]).bfloat16()
        return mean.view(-1, n_kv, r, per_kv, head_dim).transpose(1, 2).reshape(q_THD.shape)


def _wide_bmm(x_PTK: Tensor, y_PKN: Tensor) -> Tensor:
    """Compute `torch.bmm` of bf16 in float32, `ROWS` rows at a time."""
    rows = F.pad(x_PTK.float(), (0, 0, 0, -x_PTK.shape[1] % ROWS)).unflatten(1, (-1, ROWS))
    return torch.matmul(rows, y_PKN.float()[:, None]).flatten(1, 2)[:, : x_PTK.shape[1]]


def _alike(plan: RowPlan) -> Iterator[np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """Yield the sequences that attend together: those with few and equally many rows. Each other sequence is alone."""
    for count in np.unique(plan.n_rows_S):
        members = np.flatnonzero(plan.n_rows_S == count)
        if count <= TOGETHER:
            yield members
        else:
            yield from members[:, None]


def _group(plan: RowPlan, members: np.ndarray[tuple[int], np.dtype[np.intp]], pool: KvPool) -> _Group:
    count = int(plan.n_rows_S[members[0]])
    firsts = plan.first_position_S[members].astype(np.int64)
    starts = plan.row_start_S[members].astype(np.int64)
    keys = -(-int(firsts.max() + count) // KEYS) * KEYS
    n_blocks = keys // pool.block_size
    tables = np.zeros((len(members), n_blocks), np.int64)
    width = min(n_blocks, plan.tables_SB.shape[1])
    # Entries past a table's end have no weight, so block 0 fills them.
    tables[:, :width] = np.maximum(plan.tables_SB[members, :width], 0)
    pieces = tables[:, None] * pool.n_kv + np.arange(pool.n_kv)[:, None]
    key_B = np.arange(keys)
    tiles: list[_Tile] = []
    for first in range(0, count, TILE):
        within = np.arange(first, min(first + TILE, count))
        seen = -(-int(firsts.max() + within[-1] + 1) // KEYS) * KEYS
        behind = (firsts[:, None] + within)[:, :, None] - key_B[None, None, :seen]
        rows = (starts[:, None] + within).ravel()
        adjacent = int(rows[-1] - rows[0]) == len(rows) - 1
        chosen = slice(int(rows[0]), int(rows[-1]) + 1) if adjacent else torch.from_numpy(rows)
        tiles.append(_Tile(chosen, len(within), seen, torch.from_numpy(behind)[:, None, :, None]))
    ends = firsts + count
    ending = int(ends.min())
    beyond = key_B[None, ending:] >= ends[:, None]
    return _Group(torch.from_numpy(pieces), ending, torch.from_numpy(beyond)[:, None, :, None], tuple(tiles))
