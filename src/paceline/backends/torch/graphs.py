"""Decode steps as CUDA graphs: one launch for a whole step, at a few padded batch sizes.

A graph replays fixed addresses, so it has its own inputs, and a batch is copied into them. Padding rows are sequences of one token whose
table names a block that no sequence owns. Graphs are recorded when a size is first met; they share one memory pool.

Shapes: T rows = S sequences (one row each), D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.backends.torch.paged import PAGE, Tables, host_tables
from paceline.engine.executor import Path
from paceline.engine.local import RowPlan

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Rows a graph is recorded for. More sizes waste fewer padding rows and take more memory and time to record."""

Forward = Callable[[Tensor, Tables], Tensor]
"""Runs the layers: bf16 [T, D] to bf16 [T, D]."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    x_TD: Tensor
    tables: Tables
    out_TD: Tensor


class DecodeGraphs:
    """Graphs by size.

    Args:
        forward: what to record.
        hidden: D.
        context: the longest sequence; tables have room for it.
        spare: the block that padding rows write to.
        device: where.
    """

    def __init__(self, forward: Forward, *, hidden: int, context: int, spare: int, device: torch.device) -> None:
        self._forward, self._hidden, self._context, self._spare, self._device = forward, hidden, context, spare, device
        self._recorded: dict[int, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def takes(self, plan: RowPlan) -> bool:
        """Whether a batch is one row for each of at most `SIZES[-1]` sequences."""
        return bool((plan.n_rows_S == 1).all()) and len(plan.n_rows_S) <= SIZES[-1]

    def run(self, x_TD: Tensor, plan: RowPlan) -> Tensor:
        """Run a batch that `takes` takes. The result is valid until the next one."""
        rows = len(x_TD)
        size = next(size for size in SIZES if size >= rows)
        padded = self._padded(plan, size)
        recorded = self._recorded.get(size) or self._record(size, padded)
        recorded.x_TD[:rows].copy_(x_TD)
        self._fill(recorded.tables, padded)
        recorded.graph.replay()
        return recorded.out_TD[:rows]

    def _padded(self, plan: RowPlan, size: int) -> RowPlan:
        sequences = len(plan.n_rows_S)
        tables = np.full((size, -(-self._context // PAGE)), self._spare, np.int32)
        width = min(tables.shape[1], plan.tables_SB.shape[1])
        tables[:sequences, :width] = np.maximum(plan.tables_SB[:, :width], 0)
        first = np.zeros(size, np.int32)
        first[:sequences] = plan.first_position_S
        ones = np.ones(size, np.int32)
        return RowPlan(np.arange(size, dtype=np.int32), ones, first, np.full(size, Path.PROMPT, np.int32), tables)

    def _record(self, size: int, plan: RowPlan) -> _Recorded:
        x_TD = torch.zeros(size, self._hidden, dtype=torch.bfloat16, device=self._device)
        arrays = {name: torch.from_numpy(array).to(self._device) for name, array in host_tables(plan).items()}
        arrays["tables_SB"] = torch.from_numpy(plan.tables_SB).to(self._device)
        tables = Tables(**arrays, max_rows=1, max_keys=self._context)
        # A first run outside the graph lets libraries choose kernels and allocate workspaces.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(x_TD, tables)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out_TD = self._forward(x_TD, tables)
        self._recorded[size] = _Recorded(graph, x_TD, tables, out_TD)
        return self._recorded[size]

    def _fill(self, tables: Tables, plan: RowPlan) -> None:
        arrays = host_tables(plan)
        arrays["tables_SB"] = plan.tables_SB
        for name, array in arrays.items():
            getattr(tables, name).copy_(torch.from_numpy(array))
