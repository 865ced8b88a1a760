"""A range of a model's layers in MLX: mlx-lm's layers in order, over this backend's KV pool.

MLX computes an array only when it is evaluated, by the thread that made it, so each method evaluates its results. A lock separates copies of blocks
from batches, because the pool is written in place only while a single thread refers to it.

Shapes: T rows, D hidden, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import numpy as np
import numpy.typing as npt

from paceline.backends.mlx.paged import LayerCache, MlxPool, step_of
from paceline.backends.numerics import Numerics
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange, ModelSpec
from paceline.engine.local import Int32, RowPlan, WireBits

FEW = 32
"""Most rows of a short step. Its layers are submitted without waiting for each, so its `StepWatch` is ahead of the computation."""


@dataclass(frozen=True, slots=True)
class MlxModel:
    """mlx-lm's modules with loaded weights."""

    spec: ModelSpec
    held: LayerRange
    layers: Sequence[Any]
    edges: Any | None
    """mlx-lm's whole model, of which embedding, norm and head are used; None: this runner has none of them."""
    n_kv_heads: int
    """KV heads of each layer that this rank holds."""

    def embed(self, ids_T: mx.array) -> mx.array:
        return self._edges.model.embed_tokens(ids_T)

    def head(self, x_RD: mx.array) -> mx.array:
        h_RD = self._edges.model.norm(x_RD)
        return self._edges.model.embed_tokens.as_linear(h_RD) if self.spec.tied_head else self._edges.lm_head(h_RD)

    @property
    def _edges(self) -> Any:
        if self.edges is None:
            raise RuntimeError("this runner holds layers only: it was loaded with edges=False, or closed")
        return self.edges


class MlxRunner:
    """A `LayerRunner` with bf16 MLX arrays [T, D] as activations.

    Args:
        numerics: the measured numerics of MLX on this machine.
    """

    one_path = True
    kv_layout = "mlx"

    def __init__(self, model: MlxModel, pool: MlxPool, numerics: Numerics) -> None:
        self._model, self._pool = model, pool
        self.layers = model.held
        self.n_blocks, self.block_size = pool.n_blocks, pool.block_size
        self.numerics_id, self.holds_identity = numerics.id, numerics.holds_identity
        self._one_at_a_time = threading.Lock()

    def embed(self, token_ids_T: Int32) -> mx.array:
        return _evaluated(self._model.embed(mx.array(token_ids_T)))

    def run_layers(self, x_TD: mx.array, plan: RowPlan, part: LayerRange | None = None) -> mx.array:
        """Run the layers, writing K and V of the rows into their blocks. Returns the residual, bf16 [T, D]."""
        part, watch = self._checked(part), plan.watch
        if not len(part) or not x_TD.shape[0]:
            return x_TD
        evaluate = mx.eval if x_TD.shape[0] > FEW else mx.async_eval
        with self._one_at_a_time:
            step = step_of(plan, self._pool)
            h_T1D = x_TD[:, None]
            for index in range(part.start, part.stop):
                if watch is not None and watch.gives_up:
                    break
                slot = index - self.layers.start
                h_T1D = self._model.layers[slot](h_T1D, None, LayerCache(step, slot, self._model.spec.window_of(index)))
                evaluate(h_T1D, self._pool.layers[slot])
                if watch is not None:
                    watch.layer_done()
            return _evaluated(h_T1D[:, 0])

    def to_wire(self, x_TD: mx.array) -> WireBits:
        return np.array(x_TD.view(mx.uint16))

    def from_wire(self, x_TD: WireBits) -> mx.array:
        return _evaluated(mx.array(np.ascontiguousarray(x_TD)).view(mx.bfloat16))

    def logits(self, x_TD: mx.array, rows_R: Int32) -> npt.NDArray[np.float32]:
        """Apply final norm and head to rows `rows_R`. Returns float32 [R, V] on the host."""
        if not len(rows_R):
            return np.zeros((0, self._model.spec.vocab), np.float32)
        return np.array(self._model.head(x_TD[mx.array(rows_R)]).astype(mx.float32))

    @property
    def block_bytes(self) -> int:
        return 2 * len(self._pool.layers) * self._pool.piece_bytes

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        at, size = self._pool.block(block), self._pool.piece_bytes
        with self._one_at_a_time:
            pieces = [array[at].view(mx.uint16) for layer in self._layers_of(part) for array in layer]
            for place, piece in enumerate(pieces):
                into[place * size : (place + 1) * size] = np.array(piece).reshape(-1).view(np.uint8).data

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        at, bits = self._pool.block(block), np.frombuffer(data, np.uint16).reshape(-1, at_rows(self._pool), self._pool.head_dim)
        with self._one_at_a_time:
            for pieces, layer in zip(bits.reshape(-1, 2, *bits.shape[1:]), self._layers_of(part), strict=True):
                for which, piece in enumerate(pieces):
                    layer[which][at] = mx.array(piece).view(mx.bfloat16)
                mx.eval(layer)

    def close(self) -> None:
        """Free weights and KV. Idempotent."""
        with self._one_at_a_time:
            self._model = MlxModel(self._model.spec, LayerRange(0, 0), (), None, 0)
            self._pool = MlxPool(0, 0, self.block_size, self._pool.n_kv, self._pool.head_dim)
            mx.clear_cache()

    def _checked(self, part: LayerRange | None) -> LayerRange:
        if part is not None and (part.start < self.layers.start or part.stop > self.layers.stop):
            raise ValueError(f"layers {part}; this runner holds {self.layers}")
        return self.layers if part is None else part

    def _layers_of(self, part: LayerRange | None) -> list[list[mx.array]]:
        return self._pool.layers[(self.layers if part is None else part).within(self.layers)]


def at_rows(pool: MlxPool) -> int:
    """Return the rows of a layer's array that a block takes."""
    return pool.n_kv * pool.block_size


def _evaluated(x: mx.array) -> mx.array:
    mx.eval(x)
    return x
