"""Reads the tensors of a layer range into the modules that hold them, and counts what it read.

A tensor is read once, when a family asks for it by name; nothing else is. Progress is told in bytes of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.backends.options import LoadProgress
from paceline.backends.quantize import to_float32
from paceline.backends.torch.blocks import RmsNorm
from paceline.backends.torch.linear import Linear, Scratch, Table, dense, make_linear, make_table
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import EMBEDDING, FINAL_NORM, HEAD, StoredTensor, WeightSource, tensor_shapes


class TensorReader:
    """Where families get their weights from.

    Args:
        source: the model's tensors.
        formats: what each matrix is held in.
        scratch: for streamed prompt weights; None: resident.
        device: where everything goes.
        progress: told after every tensor.
    """

    def __init__(
        self,
        source: WeightSource,
        formats: Mapping[str, WeightsFormat],
        scratch: Scratch | None,
        device: torch.device,
        progress: LoadProgress | None,
    ) -> None:
        self._source, self._formats, self._scratch, self._device, self._progress = source, formats, scratch, device, progress
        self._done, self._total = 0, 0

    @property
    def spec(self) -> ModelSpec:
        return self._source.spec

    def expect(self, layers: LayerRange, *, edges: bool) -> None:
        """Say what will be read, for the progress told."""
        prefixes = tuple(f"model.layers.{i}." for i in range(layers.start, layers.stop))
        edge_names = {EMBEDDING, FINAL_NORM} | (set[str]() if self.spec.tied_head else {HEAD})
        self._total = sum(self._source.nbytes(n) for n in self._source.names() if n.startswith(prefixes) or (edges and n in edge_names))

    def linear(self, prefix: str, *names: str, bias: bool = False) -> Linear:
        """`names` under `prefix`, fused along their outputs."""
        tensors = [(self._read(at), self._formats[at]) for at in (f"{prefix}.{name}.weight" for name in names)]
        bias_N = dense([self._read(f"{prefix}.{name}.bias") for name in names], self._device) if bias else None
        return make_linear(tensors, bias_N, self._scratch, self._device)

    def dense_linear(self, prefix: str, name: str) -> Linear:
        """A matrix held in bf16 under every format: a router's choices are not worth the bytes saved."""
        return make_linear([(self._read(f"{prefix}.{name}.weight"), WeightsFormat.BF16)], None, None, self._device)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._vector(name), self.spec.rms_eps)

    def table(self, name: str) -> Table:
        """The embedding, or the head."""
        return make_table(self._read(name), self._formats[name], self._device)

    def _vector(self, name: str) -> Tensor:
        return torch.from_numpy(to_float32(self._read(name))).to(self._device)

    def _read(self, name: str) -> StoredTensor:
        tensor = self._source.read(name)
        self._done += self._source.nbytes(name)
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor


def linear_numbers(spec: ModelSpec, layers: LayerRange) -> int:
    """Weights of the linear layers of a range: what bf16 copies would double."""
    one = sum(math.prod(shape) for name, shape in tensor_shapes(spec).items() if name.startswith("model.layers.0.") and len(shape) == 2)
    return len(layers) * one
