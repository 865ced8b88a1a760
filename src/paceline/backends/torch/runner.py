"""A range of layers on this machine's CPU with torch: weights and a KV pool, without any scheduling.

torch has one thread count for the whole process. It is set before each batch, because another runner may have changed it.

Shapes: T rows, D hidden, R rows with logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.backends.numerics import Numerics
from paceline.backends.torch.attention import CpuStep, KvPool, Rope, Step
from paceline.backends.torch.families import Layer, RmsNorm
from paceline.backends.torch.linear import Linear
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange, ModelSpec
from paceline.engine.local import Int32, RowPlan, StepWatch, WireBits


@dataclass(frozen=True, slots=True)
class Edges:
    """The parts before the first layer and after the last."""

    embedding: Linear
    norm: RmsNorm
    head: Linear


@dataclass(frozen=True, slots=True)
class TorchModel:
    """The loaded weights of a range of layers."""

    spec: ModelSpec
    held: LayerRange
    layers: Sequence[Layer]
    edges: Edges | None

    def part(self, part: LayerRange | None) -> Sequence[Layer]:
        """Return the layers of a range; None: all. Raises ValueError for layers that are not held."""
        if part is None:
            return self.layers
        if part.start < self.held.start or part.stop > self.held.stop:
            raise ValueError(f"layers {part}; this runner holds {self.held}")
        return self.layers[part.start - self.held.start : part.stop - self.held.start]


class TorchPool(Protocol):
    """KV blocks of a range of layers, as tensors."""

    def block(self, block: int, layers: slice = slice(None)) -> list[Tensor]:
        """Return a block's keys and values in each layer, or in some layers."""
        ...


Pool = TypeVar("Pool", bound=TorchPool)


class PooledRunner(Generic[Pool]):
    """Common base of the runners with bf16 tensors as activations and KV blocks."""

    layers: LayerRange
    _pool: Pool

    def to_wire(self, x_TD: Tensor) -> WireBits:
        return wire_bits(x_TD)

    @property
    def block_bytes(self) -> int:
        return bytes_of(self._pool.block(0))

    @torch.inference_mode()
    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        copy_out(self._pool.block(block, (part or self.layers).within(self.layers)), into)

    @torch.inference_mode()
    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        copy_in(self._pool.block(block, (part or self.layers).within(self.layers)), data)


class TorchRunner(PooledRunner[KvPool]):
    """A `LayerRunner` with bf16 tensors [T, D] as activations.

    Args:
        pool: KV blocks for its layers.
        rope: tables for every position that the pool can hold.
        numerics: the measured numerics of these kernels.
    """

    kv_layout = "torch cpu"
    one_path = True

    def __init__(self, model: TorchModel, pool: KvPool, rope: Rope, threads: int, numerics: Numerics) -> None:
        self._model, self._pool, self._rope, self._threads = model, pool, rope, threads
        self.layers = model.held
        self.n_blocks, self.block_size = pool.n_blocks, pool.block_size
        self.numerics_id, self.holds_identity = numerics.id, numerics.holds_identity

    @torch.inference_mode()
    def embed(self, token_ids_T: Int32) -> Tensor:
        return edges_of(self._model).embedding.rows(torch.from_numpy(token_ids_T.astype(np.int64)))

    @torch.inference_mode()
    def run_layers(self, x_TD: Tensor, plan: RowPlan, part: LayerRange | None = None) -> Tensor:
        """Run the layers, writing K and V of the rows into their blocks. Returns the residual, bf16 [T, D]."""
        self._use_threads()
        layers = self._model.part(part)
        if not len(x_TD):
            return x_TD
        step = CpuStep(plan, self._model.spec, self._pool, self._rope)
        return run_watched(layers, x_TD, step, plan.watch)

    @torch.inference_mode()
    def logits(self, x_TD: Tensor, rows_R: Int32) -> npt.NDArray[np.float32]:
        """Apply final norm and head to rows `rows_R`. Returns float32 [R, V]."""
        edges = edges_of(self._model)
        if not len(rows_R):
            return np.zeros((0, self._model.spec.vocab), np.float32)
        self._use_threads()
        h_RD = edges.norm(x_TD[torch.from_numpy(rows_R.astype(np.int64))])
        return edges.head(h_RD).float().numpy()

    def from_wire(self, x_TD: WireBits) -> Tensor:
        return from_bits(x_TD)

    def close(self) -> None:
        """Free weights and KV. Idempotent."""
        self._model = TorchModel(self._model.spec, LayerRange(0, 0), (), None)
        self._pool = KvPool(0, 0, self.block_size, self._pool.n_kv, self._pool.head_dim)

    def _use_threads(self) -> None:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)


def run_watched(layers: Sequence[Layer], x_TD: Tensor, step: Step, watch: StepWatch | None) -> Tensor:
    """Run layers one after the other, until all are done or `watch` gives up."""
    for layer in layers:
        if watch is not None and watch.gives_up:
            break
        x_TD = layer(x_TD, step)
        if watch is not None:
            watch.layer_done()
    return x_TD


def wire_bits(x_TD: Tensor) -> WireBits:
    """Return the bits of a bf16 tensor as uint16, on the host."""
    return x_TD.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)


def from_bits(x_TD: WireBits) -> Tensor:
    """Return the bf16 tensor with these bits, on the CPU."""
    return torch.from_numpy(np.ascontiguousarray(x_TD).view(np.int16)).view(torch.bfloat16)


def bytes_of(parts: Sequence[Tensor]) -> int:
    """Return the bytes of all tensors together."""
    return sum(part.numel() * part.element_size() for part in parts)


def copy_out(parts: Sequence[Tensor], into: memoryview) -> None:
    """Copy bf16 tensors from any device into `into`, one after the other."""
    start = 0
    for part in parts:
        data = wire_bits(part).reshape(-1).view(np.uint8)
        into[start : start + len(data)] = data.data
        start += len(data)


def copy_in(parts: Sequence[Tensor], data: memoryview) -> None:
    """Fill bf16 tensors with bytes in the order of `copy_out`."""
    bits, start = np.frombuffer(data, np.uint16), 0
    for part in parts:
        part.copy_(from_bits(bits[start : start + part.numel()]).view(part.shape))
        start += part.numel()


def edges_of(model: TorchModel) -> Edges:
    """Return a model's edges. Raises RuntimeError if it has none, which is a mistake of the caller."""
    if model.edges is None:
        raise RuntimeError("this runner holds layers only: it was loaded with edges=False, or closed")
    return model.edges
