"""A range of layers, packed for the kernels: one array of records a matrix, reached by address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import step
from paceline.backends.cpu.forms import LANES, LAYOUT, Form
from paceline.backends.cpu.pack import pack_rows, row_bytes
from paceline.backends.cpu.sizes import CACHE_LINE, aligned
from paceline.backends.holding import FormOf
from paceline.backends.options import LoadProgress
from paceline.backends.quantize import blocks_of, slabs, tensor_shape, to_bf16_bits, to_float32
from paceline.core.errors import UnsupportedModel
from paceline.core.model import LayerRange, ModelSpec
from paceline.core.weights import EMBEDDING, FINAL_NORM, HEAD, BlockTensor, WeightSource, tensor_shapes

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


class _Arena:
    """One array for all records, so that large pages can back it. Its pages are first touched by the threads that pack."""

    def __init__(self, n_bytes: int) -> None:
        self.bytes = aligned(n_bytes)
        self._used = 0

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        start = self._used
        self._used += -(-n_bytes // CACHE_LINE) * CACHE_LINE
        return self.bytes[start : start + n_bytes]


@dataclass(frozen=True, slots=True)
class _Slab:
    """Rows of a matrix that one thread reads and packs at a time."""

    name: str
    rows: slice
    form: Form
    records: npt.NDArray[np.uint8]
    """Of the whole matrix."""


def _pack(source: WeightSource, slab: _Slab) -> int:
    """Read rows and write their records. Returns the bytes read, of the file's."""
    tensor = source.read(slab.name, slab.rows)
    whole = slice(0, slab.rows.stop - slab.rows.start)
    match slab.form.name:
        case "BF16":
            rows_NB = np.ascontiguousarray(to_bf16_bits(tensor)).view(np.uint8)
        case name if isinstance(tensor, BlockTensor) and tensor.type == name:
            rows_NB = tensor.rows_NB
        case "Q4_1" | "Q5_1" | "Q8_0" as name:
            rows_NB = np.empty((whole.stop, row_bytes(slab.form, tensor_shape(tensor)[1])), np.uint8)
            blocks_of(tensor, name, whole, rows_NB)
        case name:
            raise UnsupportedModel(f"Tensor {slab.name} can't be held as {name}", "Ask for --weights int8 or bf16.")
    pack_rows(slab.form, rows_NB, slab.rows.start, slab.records)
    return tensor.rows_NB.nbytes if isinstance(tensor, BlockTensor) else tensor.data.nbytes


def _pack_all(source: WeightSource, todo: Sequence[_Slab], threads: int, progress: Callable[[int], None]) -> None:
    """Pack all slabs on so many threads, telling the bytes of each in the calling thread."""
    if threads == 1:
        for slab in todo:
            progress(_pack(source, slab))
        return
    with ThreadPoolExecutor(threads, "pack") as pool:
        # What is left is cancelled where one fails, or `progress` gives up.
        for n_bytes in pool.map(partial(_pack, source), todo):
            progress(n_bytes)


def pack_model(
    source: WeightSource, layers: LayerRange, form_of: FormOf, *, edges: bool, threads: int = 1, progress: LoadProgress | None = None
) -> PackedModel:
    """Read and pack `layers` of a model, and with `edges` its embedding, final norm and head. Nothing but the records is ever held whole.

    Args:
        form_of: the form of a matrix. A tied head is held once, as the embedding.
        edges: with embedding, final norm and head.
        threads: that read and pack side by side.
        progress: called in this thread with bytes of the file.
    """
    spec = source.spec
    shapes = tensor_shapes(spec)
    rows = [_layer_names(spec, layer) for layer in range(layers.start, layers.stop)]
    head = EMBEDDING if spec.tied_head else HEAD
    rows.append({step.FINAL_NORM: [FINAL_NORM], step.HEAD: [head]} if edges else {})
    held = [name for row in rows for place, names in row.items() if place in MATRICES for name in names]
    if edges and EMBEDDING not in held:
        held.append(EMBEDDING)
    form_by_name = {name: form_of(name) for name in held}
    vectors = [name for row in rows for place, names in row.items() if place not in MATRICES for name in names]
    done, total = 0, sum(map(source.nbytes, [*held, *vectors]))

    def tell(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress:
            progress(done, total)

    arena = _Arena(sum(LAYOUT[form].packed_bytes(*_matrix(shapes[name])) + CACHE_LINE for name, form in form_by_name.items()))
    records = {name: arena.take(LAYOUT[form].packed_bytes(*_matrix(shapes[name]))) for name, form in form_by_name.items()}
    todo = [_Slab(name, part, form, records[name]) for name, form in form_by_name.items() for part in slabs(shapes[name])]
    _pack_all(source, todo, threads, tell)
    addresses = np.zeros((len(rows), step.N_WEIGHTS), np.int64)
    forms = np.full_like(addresses, -1)
    kept: list[npt.NDArray[np.float32]] = []
    for row, row_forms, places in zip(addresses, forms, rows, strict=True):
        for place, names in places.items():
            if place in MATRICES:
                (name,) = names
                row_forms[place], row[place] = form_by_name[name], records[name].ctypes.data
            else:
                kept.append(np.concatenate([to_float32(source.read(name)).ravel() for name in names]))
                row[place] = kept[-1].ctypes.data
                tell(sum(map(source.nbytes, names)))
    return PackedModel(
        spec,
        layers,
        addresses,
        forms,
        records[EMBEDDING].ctypes.data if edges else 0,
        form_by_name.get(EMBEDDING),
        -(-spec.vocab // LANES) * LANES,
        (arena.bytes, *kept),
    )


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
