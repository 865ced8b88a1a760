"""Paged attention on CUDA: torch's variable-length flash attention, reading keys through block tables.

The kernel wants pages of 256 tokens (FlashAttention 2's limit), int32 tables whose last dimension is contiguous, bf16 heads of at most
256. `num_splits=1` keeps each row's keys in one reduction: the order of its sums does not depend on the batch. Rows are aligned with the
last keys of their sequence (bottom-right causal mask), so a chunk in the middle of a prompt needs no mask of its own.

Shapes: T rows, S sequences, H query heads, N KV heads, D head dimension, B pages of the longest table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from paceline.backends.torch.step import Rope, row_blocks, row_positions
from paceline.engine.executor import Path
from paceline.engine.local import RowPlan

PAGE = 256
"""Tokens of a block on CUDA."""


class CudaPool:
    """Keys and values of a range of layers, bf16 [layers, 2, blocks, PAGE, N, D]."""

    def __init__(self, n_layers: int, n_blocks: int, n_kv: int, head_dim: int, device: torch.device) -> None:
        self.n_blocks, self.device = n_blocks, device
        pool = torch.zeros(n_layers, 2, n_blocks, PAGE, n_kv, head_dim, dtype=torch.bfloat16, device=device)
        self.pages = [(layer[0], layer[1]) for layer in pool]

    def block(self, block: int, layers: slice = slice(None)) -> list[Tensor]:
        """A block's keys and values in each layer, or in some, [PAGE, N, D]."""
        return [pages[block] for layer in self.pages[layers] for pages in layer]


@dataclass(frozen=True, slots=True)
class Tables:
    """A batch as the kernel sees it, on the device."""

    positions_T: Tensor
    slots_T: Tensor
    """Where each row's key lies: block * PAGE + offset."""
    query_starts: Tensor
    """int32 [S + 1]."""
    key_starts: Tensor
    """int32 [S + 1]: running sums of the lengths; the kernel finds keys by table, and lengths in `lengths_S`."""
    lengths_S: Tensor
    tables_SB: Tensor
    max_rows: int
    max_keys: int


def host_tables(plan: RowPlan) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of `Tables`, still on the host."""
    positions = row_positions(plan)
    lengths = (plan.first_position_S + plan.n_rows_S).astype(np.int32)
    return {
        "positions_T": positions,
        "slots_T": row_blocks(plan, positions, PAGE) * PAGE + positions % PAGE,
        "query_starts": np.concatenate([[0], np.cumsum(plan.n_rows_S)]).astype(np.int32),
        "key_starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        "lengths_S": lengths,
        "tables_SB": np.ascontiguousarray(np.maximum(plan.tables_SB[:, : -(-int(lengths.max()) // PAGE)], 0), np.int32),
    }


def to_device(plan: RowPlan, device: torch.device) -> Tables:
    """The plan of any batch."""
    arrays = {name: torch.from_numpy(array).to(device) for name, array in host_tables(plan).items()}
    longest = int((plan.first_position_S + plan.n_rows_S).max())
    return Tables(**arrays, max_rows=int(plan.n_rows_S.max()), max_keys=longest)


class CudaStep:
    """One batch on a CUDA device. There is one path: bf16."""

    path = Path.PROMPT

    def __init__(self, tables: Tables, pool: CudaPool, rope: Rope, scale: float) -> None:
        self._tables, self._pool, self._rope, self._scale = tables, pool, rope, scale
        self._turn = rope.at(tables.positions_T)

    def rotate(self, x_THD: Tensor) -> Tensor:
        return self._rope.rotate(x_THD, self._turn)

    def attend(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        at, (keys, values) = self._tables, self._pool.pages[layer]
        for pages, rows in ((keys, k_THD), (values, v_THD)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, at.slots_T, rows)
        out_THD = varlen_attn(
            q_THD.contiguous(),
            keys,
            values,
            at.query_starts,
            at.key_starts,
            at.max_rows,
            at.max_keys,
            scale=self._scale,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=at.lengths_S,
            block_table=at.tables_SB,
            num_splits=1,
        )
        assert isinstance(out_THD, Tensor)
        return out_THD.flatten(1)
