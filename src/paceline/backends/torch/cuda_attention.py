"""Attention on an NVIDIA GPU: keys and values in pages, cut into the same segments for every row, whatever else is in the batch.

torch's variable-length flash attention reads keys through block tables. Its kernel needs pages of 256 tokens (FlashAttention 2's limit), int32 tables
with a contiguous last dimension, and bf16 heads of at most 256. It processes one sequence's keys in order (`num_splits=1`: if it chose the splits, the
order of sums would depend on the batch), which leaves most of a GPU idle if few rows have many keys. So each segment of `SEGMENT` keys is passed to the
kernel as a separate sequence, and a row's means over segments are merged in the order of the keys (`cuda_kernels.merge`). In a row's last segment, its own,
the causal mask applies. Rows behind a segment see all of it.

Rows are aligned with the last keys of their piece (bottom-right causal mask), so a chunk in the middle of a prompt needs no mask. Layers with a window
have a single piece, in which the kernel skips the keys before the window.

Shapes: T rows, S sequences, P pieces, H query heads, N KV heads, G = H / N, D head dimension, B pages of the longest table, E rows of all earlier pieces
together, C segments before the last of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from paceline.backends.holding import KEYS_ON_GPU
from paceline.backends.torch import cuda_kernels
from paceline.backends.torch.attention import Rope, row_blocks, row_positions
from paceline.engine.local import RowPlan

PAGE = 256
"""Tokens of a block on CUDA."""
SEGMENT: Final = KEYS_ON_GPU
_PAGES = SEGMENT // PAGE

Arrays = dict[str, npt.NDArray[np.generic]]


class CudaPool:
    """Keys and values of a range of layers, bf16 [layers, 2, blocks, PAGE, N, D]."""

    def __init__(self, n_layers: int, n_blocks: int, n_kv: int, head_dim: int, device: torch.device) -> None:
        pool = torch.zeros(n_layers, 2, n_blocks, PAGE, n_kv, head_dim, dtype=torch.bfloat16, device=device)
        self.pages = [(layer[0], layer[1]) for layer in pool]

    def block(self, block: int, layers: slice = slice(None)) -> list[Tensor]:
        """Return a block's keys and values in each layer, or in some layers, [PAGE, N, D] each."""
        return [pages[block] for layer in self.pages[layers] for pages in layer]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch in the layout of the kernels, on the device."""

    tensors: Mapping[str, Tensor]
    """The arrays of `pieces_of` or `rows_apart`, by their names there."""
    max_rows: int
    max_keys: int
    packed: bool
    """True if each row is a separate sequence, and the queries of one KV head are its rows."""

    @property
    def n_earlier(self) -> int:
        """Most segments before a row's own: C."""
        return self.tensors["places"].shape[1]


def segments_before(plan: RowPlan) -> int:
    """Return the number of segments of the longest sequence without its last one: C."""
    return (int((plan.first_position_S + plan.n_rows_S).max()) - 1) // SEGMENT


def pieces_of(plan: RowPlan, *, whole: bool) -> Arrays:
    """Return a batch cut into pieces, as arrays on the host.

    Args:
        whole: also describe each sequence as one piece, for layers with a window.
    """
    positions = row_positions(plan)
    ends = (plan.first_position_S + plan.n_rows_S).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(plan.n_rows_S)])
    n_earlier = segments_before(plan)
    tables = _tables(plan.tables_SB, n_earlier + 1)
    own, earlier, rows = list[tuple[int, int, int, int]](), list[tuple[int, int, int, int]](), list[npt.NDArray[np.int64]]()
    places, n_parts = np.full((len(positions), n_earlier), -1, np.int32), 0
    for sequence, (first, end, start) in enumerate(zip(plan.first_position_S.tolist(), ends.tolist(), starts.tolist(), strict=False)):
        for segment in range((end - 1) // SEGMENT + 1):
            here, behind = segment * SEGMENT, (segment + 1) * SEGMENT
            if behind > first:
                own.append((sequence, segment, min(end, behind) - max(first, here), min(end, behind) - here))
            if behind < end:
                seeing = np.arange(start + max(first, behind) - first, start + end - first)
                earlier.append((sequence, segment, len(seeing), SEGMENT))
                places[seeing, segment] = n_parts + np.arange(len(seeing))
                rows.append(seeing)
                n_parts += len(seeing)
    return {
        "positions": positions,
        "slots": row_blocks(plan, positions, PAGE) * PAGE + positions % PAGE,
        **_pieces("own", own, tables),
        **_pieces("earlier", earlier, tables),
        "earlier_rows": np.concatenate([*rows, np.zeros(0, np.int64)]),
        "places": places,
        **(_as_pieces("whole", plan.n_rows_S, ends, tables.reshape(len(ends), -1)) if whole else {}),
    }


def rows_apart(plan: RowPlan, rows: int, n_earlier: int, per_kv: int, spare: int, *, whole: bool) -> Arrays:
    """Return a batch with each row as a separate sequence. The arrays have the same shapes for any batch, so that a graph can take them.

    Args:
        rows: number of rows that the arrays have. Padding rows, with one key each, follow those of the batch.
        n_earlier: most segments before a row's own.
        per_kv: G, queries of a KV head.
        spare: the block that padding rows write to.
        whole: as in `pieces_of`.
    """
    positions, count = np.zeros(rows, np.int64), int(plan.n_rows_S.sum())
    positions[:count] = row_positions(plan)
    by_segment = np.full((rows, n_earlier + 1, _PAGES), spare, np.int32)
    by_segment[:count] = np.repeat(_tables(plan.tables_SB, n_earlier + 1), plan.n_rows_S, 0)
    tables, ones = by_segment.reshape(rows, -1), np.ones(rows, np.int64)
    segment, segments = positions // SEGMENT, np.arange(n_earlier)
    is_earlier = segments < segment[:, None]
    earlier_rows = np.zeros(rows * n_earlier, np.int64)
    earlier_rows[: is_earlier.sum()] = np.nonzero(is_earlier)[0]
    return {
        "positions": positions,
        "slots": tables[np.arange(rows), positions // PAGE].astype(np.int64) * PAGE + positions % PAGE,
        **_as_pieces("own", ones * per_kv, positions % SEGMENT + 1, by_segment[np.arange(rows), segment]),
        # A piece without keys also has no rows: if it had some, the kernel would write into the logarithms of other pieces.
        **_as_pieces("earlier", is_earlier.ravel() * per_kv, is_earlier.ravel() * SEGMENT, by_segment[:, :n_earlier].reshape(-1, _PAGES)),
        "earlier_rows": earlier_rows,
        "places": np.where(is_earlier, is_earlier.cumsum().reshape(is_earlier.shape) - 1, -1).astype(np.int32),
        **(_as_pieces("whole", ones, positions + 1, tables) if whole else {}),
    }


def _tables(tables_SB: npt.NDArray[np.int32], n_segments: int) -> npt.NDArray[np.int32]:
    """Return the block tables by segment, int32 [S, segments, pages of a segment]."""
    whole = np.zeros((len(tables_SB), n_segments * _PAGES), np.int32)
    width = min(whole.shape[1], tables_SB.shape[1])
    whole[:, :width] = np.maximum(tables_SB[:, :width], 0)
    return whole.reshape(len(tables_SB), n_segments, _PAGES)


def _pieces(kind: str, pieces: Sequence[tuple[int, int, int, int]], tables: npt.NDArray[np.int32]) -> Arrays:
    """Return the kernel's arrays for pieces, each given as (sequence, segment, rows, keys)."""
    sequences, segments, rows, lengths = np.array(pieces, np.int64).reshape(-1, 4).T
    return _as_pieces(kind, rows, lengths, tables[sequences, segments])


def _as_pieces(kind: str, rows_P: npt.NDArray[np.integer], lengths_P: npt.NDArray[np.integer], tables: npt.NDArray[np.int32]) -> Arrays:
    """Return the kernel's arrays for sequences: starts of their rows, running sums of their keys (it finds keys by table), numbers of keys, and tables."""
    return {
        f"{kind}_starts": np.concatenate([[0], np.cumsum(rows_P)]).astype(np.int32),
        f"{kind}_key_starts": np.concatenate([[0], np.cumsum(lengths_P)]).astype(np.int32),
        f"{kind}_lengths": lengths_P.astype(np.int32),
        f"{kind}_tables": np.ascontiguousarray(tables),
    }


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Arrays on the device, in one tensor for each type, so that one copy fills all arrays of a type."""

    together: Mapping[type[np.generic], Tensor]
    apart: Mapping[str, Tensor]

    @classmethod
    def of(cls, arrays: Arrays, device: torch.device) -> OnDevice:
        together = {dtype: torch.from_numpy(each).to(device) for dtype, each in joined(arrays).items()}
        apart, used = dict[str, Tensor](), dict.fromkeys(together, 0)
        for name, array in arrays.items():
            first = used[array.dtype.type]
            used[array.dtype.type] = first + array.size
            apart[name] = together[array.dtype.type][first : first + array.size].view(array.shape)
        return cls(together, apart)

    def fill(self, arrays: Arrays) -> None:
        """Overwrite the arrays with others of the same names, types and shapes."""
        for dtype, array in joined(arrays).items():
            self.together[dtype].copy_(torch.from_numpy(array))


def joined(arrays: Arrays) -> dict[type[np.generic], npt.NDArray[np.generic]]:
    """Return the arrays of each type, flattened and concatenated."""
    types = {array.dtype.type: None for array in arrays.values()}
    return {dtype: np.concatenate([array.ravel() for array in arrays.values() if array.dtype.type is dtype]) for dtype in types}


def batch_of(plan: RowPlan, device: torch.device, *, whole: bool) -> Batch:
    """Return a batch of any plan, on the device."""
    # If no sequence has more than one row, the kernel packs queries itself, and returns logarithms of sums in another order than documented.
    # So `max_rows` is at least 2.
    most = int((plan.first_position_S + plan.n_rows_S).max())
    arrays = OnDevice.of(pieces_of(plan, whole=whole), device)
    return Batch(arrays.apart, max(2, int(plan.n_rows_S.max())), most, packed=False)


class CudaStep:
    """One batch on a CUDA device."""

    def __init__(self, batch: Batch, pool: CudaPool, rope: Rope, scale: float) -> None:
        self._batch, self._pool, self._rope, self._scale = batch, pool, rope, scale

    def rotate(self, x_THD: Tensor) -> Tensor:
        return cuda_kernels.rotate(x_THD, self._rope.cos_CD, self._rope.sin_CD, self._batch.tensors["positions"])

    def attend(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, window: int = 0) -> Tensor:
        keys, values = self._pool.pages[layer]
        for pages, rows in ((keys, k_THD), (values, v_THD)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, self._batch.tensors["slots"], rows)
        if window:
            return self._flash(layer, q_THD.contiguous(), "whole", (window - 1, 0))[0].flatten(1)
        return (self._packed(layer, q_THD) if self._batch.packed else self._unpacked(layer, q_THD)).flatten(1)

    def _unpacked(self, layer: int, q_THD: Tensor) -> Tensor:
        at = self._batch.tensors
        own, own_logs = self._flash(layer, q_THD.contiguous(), "own", (-1, 0))
        if not self._batch.n_earlier:
            return own
        parts, logs = self._flash(layer, q_THD[at["earlier_rows"]], "earlier", (-1, -1))
        return cuda_kernels.merge(own, own_logs, parts, logs, at["places"], q_THD.shape[1], self._n_kv)

    def _packed(self, layer: int, q_THD: Tensor) -> Tensor:
        heads, width = q_THD.shape[1:]
        q_TGND = q_THD.unflatten(1, (self._n_kv, -1)).transpose(1, 2).contiguous()
        own, own_logs = self._flash(layer, q_TGND.view(-1, self._n_kv, width), "own", (-1, -1))
        parts, logs = own, own_logs
        if self._batch.n_earlier:
            q_each = q_TGND[self._batch.tensors["earlier_rows"]].view(-1, self._n_kv, width)
            parts, logs = self._flash(layer, q_each, "earlier", (-1, -1))
        return cuda_kernels.merge(own, own_logs, parts, logs, self._batch.tensors["places"], heads, self._n_kv)

    @property
    def _n_kv(self) -> int:
        return self._pool.pages[0][0].shape[2]

    def _flash(self, layer: int, q: Tensor, kind: str, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Run the kernel on the `own`, `earlier` or `whole` pieces. A window of (-1, 0) is a causal mask, one of (-1, -1) is none.

        Returns:
            Means over keys, in the shape of `q`, and the logarithms of their sums, float32 [heads, rows].
        """
        keys, values = self._pool.pages[layer]
        at = self._batch.tensors
        out, logs = varlen_attn(
            q,
            keys,
            values,
            at[f"{kind}_starts"],
            at[f"{kind}_key_starts"],
            self._batch.max_rows,
            self._batch.max_keys if kind == "whole" else SEGMENT,
            return_aux=AuxRequest(lse=True),
            scale=self._scale,
            window_size=window,
            enable_gqa=q.shape[1] != self._n_kv,
            seqused_k=at[f"{kind}_lengths"],
            block_table=at[f"{kind}_tables"],
            num_splits=1,
        )
        return out, logs
