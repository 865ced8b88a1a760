"""A range of layers, packed for the kernels: one array of records a matrix, reached by address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import pack, step
from paceline.backends.cpu.aligned import CACHE_LINE, aligned
from paceline.backends.cpu.gemm import BF16, INT4, INT8
from paceline.backends.options import LoadProgress
from paceline.backends.quantize import tensor_shape, to_bf16_bits, to_float32, to_grouped
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import GROUP, StoredTensor, WeightSource

Shape = tuple[int, int]
"""(N, K): outputs and inputs."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """Weights of a range of layers in the kernels' layout. Arrays are kept alive in `arrays`."""

    spec: ModelSpec
    layers: LayerRange
    form: int
    head_form: int
    addresses: npt.NDArray[np.int64]
    """[layer, place] as `step` names the places."""
    edges: npt.NDArray[np.int64]
    embedding: int
    """Address of the embedding's records; 0 without edges."""
    padded_vocab: int
    arrays: tuple[npt.NDArray[np.generic], ...]


class _Packer:
    """Reads tensors of one source and packs them into one array, so that large pages can back it; counts what was read."""

    def __init__(self, source: WeightSource, n_bytes: int, total: int, progress: LoadProgress | None) -> None:
        self.arena = aligned(n_bytes)
        self.vectors: list[npt.NDArray[np.float32]] = []
        self._used = 0
        self._source, self._total, self._progress, self._done = source, total, progress, 0

    def _read(self, name: str) -> StoredTensor:
        tensor = self._source.read(name)
        self._done += self._source.nbytes(name)
        if self._progress:
            self._progress(self._done, self._total)
        return tensor

    def vector(self, names: Sequence[str]) -> int:
        joined = np.concatenate([to_float32(self._read(name)).ravel() for name in names])
        self.vectors.append(joined)
        return joined.ctypes.data

    def matrix(self, names: Sequence[str], shape: Shape, form: int, *, interleave: bool = False) -> int:
        """Pack matrices one after the other, or their blocks of 16 outputs in turn. `shape`: of all together."""
        n_bytes = pack.packed_bytes(form, *shape)
        records = self.arena[self._used : self._used + n_bytes].view(np.uint16).reshape(-1, shape[1] // GROUP, pack.RECORD[form] // 2)
        self._used += -(-n_bytes // CACHE_LINE) * CACHE_LINE
        at = 0
        for i, name in enumerate(names):
            tensor = self._read(name)
            if interleave:
                out = records[i :: len(names)]
            else:
                blocks = -(-tensor_shape(tensor)[0] // pack.LANES)
                out, at = records[at : at + blocks], at + blocks
            if form == BF16:
                pack.pack_bf16(to_bf16_bits(tensor), out)
            else:
                pack.pack_grouped(to_grouped(tensor, 4 if form == INT4 else 8), out)
        return records.ctypes.data


def _matrix_shapes(spec: ModelSpec) -> dict[int, Shape]:
    """(N, K) of each matrix of a layer."""
    heads, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    return {
        step.QKV: (heads + 2 * kv, spec.hidden),
        step.OUT: (spec.hidden, heads),
        step.GATE_UP: (2 * spec.ffn, spec.hidden),
        step.DOWN: (spec.hidden, spec.ffn),
    }


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
    shapes = _matrix_shapes(spec)
    head_shape = (spec.vocab, spec.hidden)
    layer_bytes = sum(pack.packed_bytes(form, *shape) + CACHE_LINE for shape in shapes.values())
    head_bytes = pack.packed_bytes(head_form, *head_shape) + CACHE_LINE
    n_heads = (1 if spec.tied_head else 2) if edges else 0
    packer = _Packer(source, len(layers) * layer_bytes + n_heads * head_bytes, total, progress)
    addresses = np.zeros((len(layers), step.N_WEIGHTS), np.int64)
    for row, group in zip(addresses, names, strict=True):
        for place, tensors in enumerate(group):
            if not tensors:
                continue
            if place in shapes:
                row[place] = packer.matrix(tensors, shapes[place], form, interleave=place == step.GATE_UP)
            else:
                row[place] = packer.vector(tensors)
    edge_addresses = np.zeros(step.N_EDGES, np.int64)
    embedding = 0
    if edges:
        edge_addresses[step.FINAL_NORM] = packer.vector(["model.norm.weight"])
        embedding = packer.matrix(["model.embed_tokens.weight"], head_shape, head_form)
        edge_addresses[step.HEAD] = embedding if spec.tied_head else packer.matrix(["lm_head.weight"], head_shape, head_form)
    return PackedModel(
        spec,
        layers,
        form,
        head_form,
        addresses,
        edge_addresses,
        embedding,
        -(-spec.vocab // pack.LANES) * pack.LANES,
        (packer.arena, *packer.vectors),
    )


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
