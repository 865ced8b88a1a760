"""What a layer needs to know of one batch: the path its rows run, how heads turn, and attention over paged keys.

Shapes: T rows, H heads of query or key, D head dimension.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.core.model import RopeSpec
from paceline.core.weights import rope_tables
from paceline.engine.executor import Path
from paceline.engine.local import RowPlan


class Step(Protocol):
    """One batch of rows of one path."""

    @property
    def path(self) -> Path: ...

    def rotate(self, x_THD: Tensor) -> Tensor:
        """Rotary embedding of bf16 heads, computed in float32."""
        ...

    def attend(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        """Write keys and values into their blocks, then causal attention of every row: bf16 [T, H * D].

        `layer` counts from the first layer of the runner's range.
        """
        ...


class Rope:
    """Rotary tables on a device: cos [C, D] and signed sin [C, D] of every position, float32."""

    def __init__(self, rope: RopeSpec, head_dim: int, positions: int, device: torch.device) -> None:
        cos, sin = rope_tables(rope, head_dim, positions)
        self._cos_CD = torch.from_numpy(np.concatenate([cos, cos], 1)).to(device)
        self._sin_CD = torch.from_numpy(np.concatenate([-sin, sin], 1)).to(device)
        self._half = head_dim // 2

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tables, [T, 1, D]."""
        return self._cos_CD[positions_T][:, None], self._sin_CD[positions_T][:, None]

    def rotate(self, x_THD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Two products and a sum, each rounded by itself: a fused multiply-add would depend on how a loop was vectorised."""
        wide = x_THD.float()
        return (wide * turn[0]).add_(wide.roll(self._half, -1).mul_(turn[1])).bfloat16()


def row_positions(plan: RowPlan) -> npt.NDArray[np.int64]:
    """Position of every row, int64 [T]."""
    n_rows = plan.n_rows_S.astype(np.int64)
    within = np.arange(n_rows.sum()) - np.repeat(np.cumsum(n_rows) - n_rows, n_rows)
    return within + np.repeat(plan.first_position_S.astype(np.int64), n_rows)


def row_blocks(plan: RowPlan, positions_T: npt.NDArray[np.int64], block_size: int) -> npt.NDArray[np.int64]:
    """Block that holds every row, int64 [T]."""
    sequences_T = np.repeat(np.arange(len(plan.n_rows_S)), plan.n_rows_S)
    return plan.tables_SB[sequences_T, positions_T // block_size].astype(np.int64)


def of_path(plan: RowPlan, path: Path) -> tuple[RowPlan, npt.NDArray[np.int64]]:
    """The sequences of one path as a plan of their own, and which rows of the batch they are."""
    chosen = np.flatnonzero(plan.path_S == path)
    n_rows = plan.n_rows_S[chosen]
    starts = (np.cumsum(n_rows) - n_rows).astype(np.int32)
    rows = np.concatenate([np.arange(s, s + n) for s, n in zip(plan.row_start_S[chosen], n_rows, strict=True)])
    return RowPlan(starts, n_rows, plan.first_position_S[chosen], plan.path_S[chosen], plan.tables_SB[chosen]), rows
