"""A range of layers, packed for the kernels: one array of records a matrix, reached by address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import step
from paceline.backends.cpu.aligned import CACHE_LINE, aligned
from paceline.backends.cpu.forms import LANES, LAYOUT, Form
from paceline.backends.cpu.pack import pack_rows
from paceline.backends.options import LoadProgress
from paceline.backends.quantize import to_bf16_bits, to_blocks, to_float32
from paceline.core.model import LayerRange, ModelSpec, WeightsFormat
from paceline.core.weights import EMBEDDING, FINAL_NORM, HEAD, BlockTensor, StoredTensor, WeightSource, tensor_shapes

Shape = tuple[int, int]
"""(N, K): outputs and inputs."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """Weights of a range of layers in the kernels' layout. Arrays are kept alive in `arrays`."""

    spec: ModelSpec
    layers: LayerRange
    addresses: npt.NDArray[np.int64]
    """[layer, place] as `step` names the places; the row after the last layer has the edges."""
    forms: npt.NDArray[np.int64]
    """[layer, place]: the `Form` of each matrix, -1 elsewhere."""
    embedding: int
    """Address of the embedding's records; 0 without edges."""
    embedding_form: Form | None
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

    def matrix(self, name: str, shape: Shape, form: Form) -> int:
        n_bytes = LAYOUT[form].packed_bytes(*shape)
        records = self.arena[self._used : self._used + n_bytes]
        self._used += -(-n_bytes // CACHE_LINE) * CACHE_LINE
        pack_rows(form, _stored_as(self._read(name), form), 0, records)
        return records.ctypes.data


def uniform_forms(weights: WeightsFormat) -> Callable[[str], Form]:
    """The form of each matrix by its tensor's name, where a model is held in one format; embedding and head at least in 8 bits."""
    form = {WeightsFormat.INT4: Form.Q4_1, WeightsFormat.INT8: Form.Q8_0, WeightsFormat.BF16: Form.BF16}[weights]
    head_form = Form.Q8_0 if form is Form.Q4_1 else form
    return lambda name: head_form if name in {EMBEDDING, HEAD} else form


def pack_model(
    source: WeightSource, layers: LayerRange, form_of: Callable[[str], Form], *, edges: bool, progress: LoadProgress | None = None
) -> PackedModel:
    """Read and pack `layers` of a model, and with `edges` its embedding, final norm and head.

    Args:
        form_of: the form of a matrix, by its tensor's name. A tied head is held once, as the embedding.
    """
    spec = source.spec
    shapes = tensor_shapes(spec)
    rows = [_layer_names(spec, layer) for layer in range(layers.start, layers.stop)]
    head = EMBEDDING if spec.tied_head else HEAD
    rows.append({step.FINAL_NORM: [FINAL_NORM], step.HEAD: [head]} if edges else {})
    matrices = {name for row in rows for place, names in row.items() if place in MATRICES for name in names} | (
        {EMBEDDING} if edges else set()
    )
    forms_by_name = {name: form_of(name) for name in matrices}
    names = {name for row in rows for place in row.values() for name in place} | matrices
    n_bytes = sum(LAYOUT[form].packed_bytes(*_matrix(shapes[name])) + CACHE_LINE for name, form in forms_by_name.items())
    packer = _Packer(source, n_bytes, sum(map(source.nbytes, names)), progress)
    addresses = np.zeros((len(rows), step.N_WEIGHTS), np.int64)
    forms = np.full_like(addresses, -1)
    embedding = packer.matrix(EMBEDDING, _matrix(shapes[EMBEDDING]), forms_by_name[EMBEDDING]) if edges else 0
    for row, row_forms, places in zip(addresses, forms, rows, strict=True):
        for place, tensors in places.items():
            if place not in MATRICES:
                row[place] = packer.vector(tensors)
                continue
            (name,) = tensors
            row_forms[place] = forms_by_name[name]
            row[place] = embedding if name == EMBEDDING else packer.matrix(name, _matrix(shapes[name]), forms_by_name[name])
    padded_vocab = -(-spec.vocab // LANES) * LANES
    return PackedModel(
        spec, layers, addresses, forms, embedding, forms_by_name.get(EMBEDDING), padded_vocab, (packer.arena, *packer.vectors)
    )


def _stored_as(tensor: StoredTensor, form: Form) -> npt.NDArray[np.uint8]:
    """A matrix as GGML stores it in a form's type, uint8 [N, row bytes]."""
    if isinstance(tensor, BlockTensor) and tensor.type == form.name:
        return tensor.rows_NB
    if form is Form.BF16:
        return np.ascontiguousarray(to_bf16_bits(tensor)).view(np.uint8)
    return to_blocks(tensor, "Q8_0" if form is Form.Q8_0 else "Q4_1").rows_NB


MATRICES = {
    step.Q: "self_attn.q_proj", step.K: "self_attn.k_proj", step.V: "self_attn.v_proj", step.OUT: "self_attn.o_proj",
    step.GATE: "mlp.gate_proj", step.UP: "mlp.up_proj", step.DOWN: "mlp.down_proj", step.HEAD: "lm_head",
}  # fmt: skip
"""Places that hold a matrix, and its name."""


def _matrix(shape: tuple[int, ...]) -> Shape:
    n, k = shape
    return n, k


def _layer_names(spec: ModelSpec, layer: int) -> dict[int, list[str]]:
    """Tensor names by place; vectors that lie one after the other are several."""
    stems = {place: [f"{stem}.weight"] for place, stem in MATRICES.items() if place != step.HEAD}
    stems |= {step.ATTN_NORM: ["input_layernorm.weight"], step.FFN_NORM: ["post_attention_layernorm.weight"]}
    if spec.qkv_bias:
        stems[step.QKV_BIAS] = [f"self_attn.{p}_proj.bias" for p in "qkv"]
    if spec.qk_norm:
        stems |= {step.Q_NORM: ["self_attn.q_norm.weight"], step.K_NORM: ["self_attn.k_norm.weight"]}
    return {place: [f"model.layers.{layer}.{stem}" for stem in group] for place, group in sorted(stems.items())}
