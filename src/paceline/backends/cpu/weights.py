"""A range of layers, packed for the kernels: one array of records a matrix, reached by address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import pack, step
from paceline.backends.cpu.gemm import BF16, INT4, INT8
from paceline.backends.options import LoadProgress
from paceline.backends.quantize import to_bf16_bits, to_float32, to_grouped
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import StoredTensor, WeightSource


@dataclass(frozen=True, slots=True)
class PackedModel:
    """Weights of a range of layers in the kernels' layout. Arrays are kept alive in `arrays`."""

    spec: ModelSpec
    layers: LayerRange
    form: int
    head_form: int
    embed_form: int
    addresses: npt.NDArray[np.int64]
    """[layer, place] as `step` names the places."""
    edges: npt.NDArray[np.int64]
    embedding: int
    """Address of the embedding's records; 0 without edges."""
    padded_vocab: int
    arrays: tuple[npt.NDArray[np.generic], ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class _Packer:
    """Reads tensors of one source, packs them and counts what was read."""

    def __init__(self, source: WeightSource, total: int, progress: LoadProgress | None) -> None:
        self.arrays: list[npt.NDArray[np.generic]] = []
        self._source, self._total, self._progress, self._done = source, total, progress, 0

    def _read(self, name: str) -> StoredTensor:
        tensor = self._source.read(name)
        self._done += self._source.nbytes(name)
        if self._progress:
            self._progress(self._done, self._total)
        return tensor

    def _keep(self, array: npt.NDArray[np.generic]) -> int:
        self.arrays.append(array)
        return array.ctypes.data

    def vector(self, names: Sequence[str]) -> int:
        return self._keep(np.concatenate([to_float32(self._read(name)).ravel() for name in names]))

    def matrix(self, names: Sequence[str], form: int, *, interleave: bool = False) -> int:
        """Pack matrices one after the other, or their blocks of 16 outputs in turn."""
        parts = [_packed(self._read(name), form) for name in names]
        joined = np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]) if interleave else np.concatenate(parts)
        return self._keep(joined)


def _packed(tensor: StoredTensor, form: int) -> pack.Bytes:
    if form == BF16:
        return pack.pack_bf16(to_bf16_bits(tensor))
    return pack.pack_grouped(to_grouped(tensor, 4 if form == INT4 else 8))


def pack_model(
    source: WeightSource, layers: LayerRange, weights: WeightsFormat, *, edges: bool, progress: LoadProgress | None = None
) -> PackedModel:
    """Read and pack `layers` of a model, and with `edges` its embedding, final norm and head."""
    spec = source.spec
    form = pack.FORM[weights]
    head_form = BF16 if weights is WeightsFormat.BF16 else INT8
    names = _layer_names(spec, layers)
    edge_names = ["model.embed_tokens.weight", "model.norm.weight"] + ([] if spec.tied_head else ["lm_head.weight"]) if edges else []
    total = sum(source.nbytes(name) for group in names for place in group for name in place) + sum(map(source.nbytes, edge_names))
    packer = _Packer(source, total, progress)
    addresses = np.zeros((len(layers), step.N_WEIGHTS), np.int64)
    for row, group in zip(addresses, names, strict=True):
        for place, tensors in enumerate(group):
            if not tensors:
                continue
            if place in _MATRICES:
                row[place] = packer.matrix(tensors, form, interleave=place == step.GATE_UP)
            else:
                row[place] = packer.vector(tensors)
    edge_addresses = np.zeros(step.N_EDGES, np.int64)
    embedding = 0
    if edges:
        edge_addresses[step.FINAL_NORM] = packer.vector(["model.norm.weight"])
        embedding = packer.matrix(["model.embed_tokens.weight"], head_form)
        edge_addresses[step.HEAD] = embedding if spec.tied_head else packer.matrix(["lm_head.weight"], head_form)
    return PackedModel(
        spec,
        layers,
        form,
        head_form,
        head_form,
        addresses,
        edge_addresses,
        embedding,
        -(-spec.vocab // pack.LANES) * pack.LANES,
        tuple(packer.arrays),
    )


_MATRICES = frozenset({step.QKV, step.OUT, step.GATE_UP, step.DOWN})


def _layer_names(spec: ModelSpec, layers: LayerRange) -> list[list[list[str]]]:
    """Tensor names by layer and place."""
    named: Callable[[int, str], str] = lambda i, name: f"model.layers.{i}.{name}"  # noqa: E731
    result: list[list[list[str]]] = []
    for i in range(layers.start, layers.stop):
        places: list[list[str]] = [[] for _ in range(step.N_WEIGHTS)]
        places[step.ATTN_NORM] = [named(i, "input_layernorm.weight")]
        places[step.QKV] = [named(i, f"self_attn.{p}_proj.weight") for p in "qkv"]
        if spec.qkv_bias:
            places[step.QKV_BIAS] = [named(i, f"self_attn.{p}_proj.bias") for p in "qkv"]
        if spec.qk_norm:
            places[step.Q_NORM] = [named(i, "self_attn.q_norm.weight")]
            places[step.K_NORM] = [named(i, "self_attn.k_norm.weight")]
        places[step.OUT] = [named(i, "self_attn.o_proj.weight")]
        places[step.FFN_NORM] = [named(i, "post_attention_layernorm.weight")]
        places[step.GATE_UP] = [named(i, f"mlp.{p}_proj.weight") for p in ("gate", "up")]
        places[step.DOWN] = [named(i, "mlp.down_proj.weight")]
        result.append(places)
    return result
