"""Layers shared over MLX's ring: each rank holds an equal share of every layer's heads and feed-forward columns (mlx-lm's `shard`), and of KV.

All ranks load in the same way. The first is a `LayerRunner` like any other. It sends each step to the other ranks, and all run it, with two `all_sum` in
each layer. Commands travel over the ring as well, as a sum to which the other ranks add zeros. A step that has begun is never given up, because the other
ranks would wait. MLX has no timeouts: the process that started the ranks must notice that one is lost.

Shapes: T rows, D hidden, S sequences, B blocks of the longest table, W ranks, L layers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import numpy as np
import numpy.typing as npt

from paceline.backends.mlx.paged import MlxPool
from paceline.backends.mlx.runner import MlxModel, MlxRunner
from paceline.backends.numerics import Numerics
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange
from paceline.engine.local import Int32, RowPlan


class RingCommand(IntEnum):
    """A command that the first rank sends to the others."""

    STEP = 1
    EXPORT = 2
    IMPORT = 3
    CLOSE = 4


class RingRunner(MlxRunner):
    """One rank's share of layers. The first rank is called like any runner; the others run `follow`."""

    def __init__(self, model: MlxModel, pool: MlxPool, numerics: Numerics, group: mx.distributed.Group) -> None:
        super().__init__(model, pool, numerics)
        self._group, self._closed = group, False
        self.kv_layout = f"mlx, {group.size()} ranks"
        self._turn = threading.Lock()

    def run_layers(self, x_TD: mx.array, plan: RowPlan, part: LayerRange | None = None) -> mx.array:
        part, watch = self._checked(part), plan.watch
        if not len(part) or not x_TD.shape[0] or (watch is not None and watch.gives_up):
            return x_TD
        sizes = [part.start, part.stop, *plan.tables_SB.shape]
        columns = (plan.row_start_S, plan.n_rows_S, plan.first_position_S, plan.path_S)
        with self._turn:
            self._tell(RingCommand.STEP, np.concatenate([sizes, *columns, plan.tables_SB.ravel()]), self.to_wire(x_TD))
            x_TD = super().run_layers(x_TD, replace(plan, watch=None), part)
        for _ in range(len(part) if watch is not None else 0):
            watch.layer_done()  # pyright: ignore[reportOptionalMemberAccess]
        return x_TD

    @property
    def block_bytes(self) -> int:
        return super().block_bytes * self._group.size()

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        part = self._checked(part)
        with self._turn:
            self._tell(RingCommand.EXPORT, [block, part.start, part.stop])
            shares_WL = self._gathered(block, part).reshape(self._group.size(), len(part), -1)
        into[:] = np.ascontiguousarray(shares_WL.swapaxes(0, 1)).reshape(-1).view(np.uint8).data

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        part, bits = self._checked(part), np.frombuffer(data, np.uint16)
        with self._turn:
            self._tell(RingCommand.IMPORT, [block, part.start, part.stop], bits)
            self._take(block, part, bits)

    def close(self) -> None:
        """Free weights and KV; on the first rank, make the other ranks do so too. Idempotent."""
        with self._turn:
            if not self._closed and self._group.rank() == 0:
                self._tell(RingCommand.CLOSE, [])
            self._closed = True
        super().close()

    def follow(self) -> None:
        """Run the commands of the first rank until it closes."""
        while True:
            kind, n, size = self._sum(None, 3, mx.int32).tolist()
            said, bits = self._sum(None, n, mx.int32), self._sum(None, size, mx.uint16)
            match RingCommand(kind):
                case RingCommand.STEP:
                    x_TD = self.from_wire(bits.reshape(-1, self._model.spec.hidden))
                    super().run_layers(x_TD, _plan_of(said), LayerRange(int(said[0]), int(said[1])))
                case RingCommand.EXPORT:
                    self._gathered(BlockId(int(said[0])), LayerRange(int(said[1]), int(said[2])))
                case RingCommand.IMPORT:
                    self._take(BlockId(int(said[0])), LayerRange(int(said[1]), int(said[2])), bits)
                case RingCommand.CLOSE:
                    self.close()
                    return

    def _tell(
        self, command: RingCommand, said: Sequence[int] | npt.NDArray[np.integer[Any]], bits: npt.NDArray[np.uint16] | None = None
    ) -> None:
        numbers, words = np.array(said, np.int32), np.zeros(0, np.uint16) if bits is None else bits.reshape(-1)
        self._sum(np.array([command, len(numbers), len(words)], np.int32), 3, mx.int32)
        self._sum(numbers, len(numbers), mx.int32)
        self._sum(words, len(words), mx.uint16)

    def _sum(self, own: Any, size: int, dtype: mx.Dtype) -> npt.NDArray[Any]:
        """Return the numbers of the first rank, which gives them as `own`; the other ranks give None and add zeros."""
        if not size:
            return np.zeros(0, np.int32)
        return np.array(mx.distributed.all_sum(mx.zeros(size, dtype) if own is None else mx.array(own), group=self._group))

    def _gathered(self, block: BlockId, part: LayerRange) -> npt.NDArray[np.uint16]:
        own = np.zeros(super().block_bytes // 2 // len(self.layers) * len(part), np.uint16)
        super().export_block(block, own.view(np.uint8).data, part)
        bits: Any = own
        return np.array(mx.distributed.all_gather(mx.array(bits), group=self._group))

    def _take(self, block: BlockId, part: LayerRange, bits: npt.NDArray[np.uint16]) -> None:
        shares_LW = bits.reshape(len(part), self._group.size(), -1)
        own = np.ascontiguousarray(shares_LW[:, self._group.rank()])
        super().import_block(block, own.reshape(-1).view(np.uint8).data, part)


def _plan_of(said: Int32) -> RowPlan:
    sequences, width = int(said[2]), int(said[3])
    columns = said[4 : 4 + 4 * sequences].reshape(4, sequences)
    tables_SB = said[4 + 4 * sequences :].reshape(sequences, width)
    return RowPlan(columns[0], columns[1], columns[2], columns[3], tables_SB)
