"""Packs a range of layers for the kernels: one array of records for each matrix, which kernels find by its address."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, product

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import places, sync
from paceline.backends.cpu.forms import LANES, LAYOUT, Form
from paceline.backends.cpu.pack import pack_rows, row_bytes
from paceline.backends.cpu.shares import Share, covered, whole
from paceline.backends.cpu.sizes import CACHE_LINE, aligned, record_bytes
from paceline.backends.holding import FormOf
from paceline.backends.options import LoadProgress
from paceline.backends.quantize import blocks_of, slabs, tensor_shape, to_bf16_bits, to_float32
from paceline.core.errors import UnsupportedModel
from paceline.core.model import LayerRange, ModelSpec
from paceline.core.weights import (
    EMBEDDING,
    FINAL_NORM,
    GROUP,
    HEAD,
    NORM_NAMES,
    ROUTER,
    SINKS,
    TENSOR_TYPES,
    BlockTensor,
    StoredTensor,
    WeightSource,
    tensor_shapes,
)

Shape = tuple[int, int]
"""(N, K): outputs and inputs."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """Weights of a range of layers in the kernels' layout. Arrays are kept alive in `arrays`."""

    spec: ModelSpec
    """Sizes of the whole model."""
    share: Share
    """The part of the model that this object holds."""
    attended: range
    """Inputs of the attention output's matrices that are held: those of the share, extended to whole superblocks if the file has them."""
    inner: range
    """Inputs of the feed-forward down matrices that are held, extended in the same way."""
    layers: LayerRange
    addresses: npt.NDArray[np.int64]
    """Addresses, [layer, place], with the places of `places`. The row after the last layer holds the final norm and the head."""
    forms: npt.NDArray[np.int64]
    """`Form` of each matrix, [layer, place]; -1 for places without one."""
    embedding: int
    """Address of the embedding's records; 0 without it."""
    embedding_form: Form | None
    arrays: tuple[npt.NDArray[np.generic], ...]


class _Arena:
    """One array for all records, so that large pages can back it. The threads that pack are the first to touch its pages."""

    def __init__(self, n_bytes: int) -> None:
        self.bytes = aligned(n_bytes)
        self._used = 0

    def take(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        start = self._used
        self._used += -(-n_bytes // CACHE_LINE) * CACHE_LINE
        return self.bytes[start : start + n_bytes]


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a matrix that a share holds."""

    outputs: range
    inputs: range | None = None
    """None: all inputs."""

    def shape(self, k: int) -> Shape:
        """Return (N, K) of the part, for a matrix of K inputs."""
        return len(self.outputs), k if self.inputs is None else len(self.inputs)


@dataclass(frozen=True, slots=True)
class _Slab:
    """Rows of a matrix that one thread reads and packs at a time."""

    name: str
    part: _Part
    rows: slice
    """Rows, counted in the part."""
    form: Form
    first: int
    """Row of the records at which the part begins."""
    records: npt.NDArray[np.uint8]
    """Records of the whole part, or of several contiguous parts."""
    node: int
    """Memory node of the threads that will read these rows."""

    def read(self, source: WeightSource) -> StoredTensor:
        first, inputs = self.part.outputs.start, self.part.inputs
        columns = None if inputs is None else slice(inputs.start, inputs.stop)
        return source.read(self.name, slice(first + self.rows.start, first + self.rows.stop), columns)


def _pack(source: WeightSource, slab: _Slab) -> int:
    """Read rows and write their records. Returns the bytes that the rows take in the file."""
    tensor = slab.read(source)
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
    pack_rows(slab.form, rows_NB, slab.first + slab.rows.start, slab.records)
    return tensor.rows_NB.nbytes if isinstance(tensor, BlockTensor) else tensor.data.nbytes


def _pack_all(
    source: WeightSource, todo: Sequence[_Slab], threads: int, nodes: Sequence[frozenset[int]], progress: Callable[[int], None]
) -> None:
    """Pack all slabs on `threads` threads, each slab on the memory node that will read it. Calls `progress` with the bytes of each, in this thread."""
    if threads == 1:
        for slab in todo:
            progress(_pack(source, slab))
        return
    with ExitStack() as pools:
        packed = list[Iterable[int]]()
        for number in range(max(1, len(nodes))):
            pool = ThreadPoolExecutor(-(-threads // max(1, len(nodes))), "pack", partial(sync.bind, nodes[number]) if nodes else None)
            # The remaining slabs are cancelled if one fails, or if `progress` raises.
            pools.callback(pool.shutdown, cancel_futures=True)
            packed.append(pool.map(partial(_pack, source), [slab for slab in todo if slab.node == number]))
        for n_bytes in chain(*packed):
            progress(n_bytes)


def _among(rows: Sequence[Mapping[int, list[str]]], outputs: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return, for each matrix, the place of its first output in its product, and the product's number of outputs.

    Queries, keys and values are one product, or with low ranks two; every other matrix is a product alone.
    """
    among = {name: (0, n) for name, n in outputs.items()}
    for row, together in product(rows, ((places.Q, places.K, places.V), (places.Q_LOW, places.KV_LOW))):
        names = [row[place][0] for place in together if place in row]
        sizes = [outputs[name] for name in names]
        among |= {name: (first, sum(sizes)) for name, first in zip(names, accumulate(sizes, initial=0), strict=False)}
    return among


def pack_model(
    source: WeightSource,
    layers: LayerRange,
    form_of: FormOf,
    *,
    edges: bool,
    threads: int = 1,
    progress: LoadProgress | None = None,
    share: Share | None = None,
) -> PackedModel:
    """Read and pack `layers` of a model, and with `edges` its embedding, final norm and head. Only the records are ever held completely.

    Args:
        form_of: returns the form of a matrix. A tied head is held once, as the embedding.
        edges: also pack embedding, final norm and head.
        threads: number of threads that read and pack at the same time.
        progress: called in this thread with (bytes read, bytes in all) of the file.
        share: the part of each layer and of the head that one rank of a tensor group has. The first rank has the embedding. None: all.

    Raises:
        UnsupportedModel: a matrix can't be held in its form.
    """
    spec, share = source.spec, whole(source.spec) if share is None else share
    shapes = tensor_shapes(spec)
    rows = [_layer_names(spec, layer) for layer in range(layers.start, layers.stop)]
    head = EMBEDDING if spec.tied_head else HEAD
    rows.append({places.FINAL_NORM: [FINAL_NORM], places.HEAD: [head]} if edges else {})
    held = [name for row in rows for place, names in row.items() if place in MATRICES for name in names]
    if edges and EMBEDDING not in held:
        held.append(EMBEDDING)
    if not _has_embedding(share):
        held = [name for name in held if name != EMBEDDING or spec.tied_head]
    form_by_name = {name: form_of(name) for name in held}
    attended, inner = share.attended(spec), share.inner(spec)
    layouts = {name: LAYOUT[form] for name, form in form_by_name.items()}
    if any(form.groups > 1 or TENSOR_TYPES[source.type_of(name)].block > GROUP for name, form in layouts.items() if name.endswith(_SHARED)):
        attended, inner = covered(attended, spec.n_heads * spec.value_dim), covered(inner, spec.ffn)
    part_by_name = {
        name: _Part(range(shapes[name][0])) if _is_undivided(name) else _part_of(name, spec, share, attended, inner) for name in held
    }
    vectors = [name for row in rows for place, names in row.items() if place not in MATRICES for name in names]
    done, total = 0, sum(map(source.nbytes, vectors)) + sum(_stored_bytes(source, name, part_by_name[name], *shapes[name]) for name in held)

    def tell(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress:
            progress(done, total)

    shape_by_name = {name: part.shape(shapes[name][1]) for name, part in part_by_name.items()}
    stacks = _stacks(rows, form_by_name)
    size_by_name = {
        names[0]: LAYOUT[form_by_name[names[0]]].packed_bytes(sum(shape_by_name[name][0] for name in names), shape_by_name[names[0]][1])
        for names in stacks
    }
    arena = _Arena(sum(size + CACHE_LINE for size in size_by_name.values()))
    records = {name: arena.take(size) for name, size in size_by_name.items()}
    nodes, among = sync.nodes()[:threads], _among(rows, {name: n for name, (n, _) in shape_by_name.items()})
    todo = list[_Slab]()
    for names in stacks:
        first = 0
        for name in names:
            form, (before, outputs) = form_by_name[name], among[name]
            for slab in slabs(shape_by_name[name]):
                node = sync.node_of(before + slab.start, outputs, len(nodes))
                todo.append(_Slab(name, part_by_name[name], slab, form, first, records[names[0]], node))
            first += shape_by_name[name][0]
    _pack_all(source, todo, threads, nodes, tell)
    addresses = np.zeros((len(rows), places.N_WEIGHTS), np.int64)
    forms = np.full_like(addresses, -1)
    kept: list[npt.NDArray[np.float32]] = []
    for row, row_forms, named in zip(addresses, forms, rows, strict=True):
        for place, names in named.items():
            if place in MATRICES:
                row_forms[place], row[place] = form_by_name[names[0]], records[names[0]].ctypes.data
            else:
                values = [to_float32(source.read(name)).ravel() for name in names]
                if place == places.QKV_BIAS:
                    parts = [_part_of(name.replace(".bias", ".weight"), spec, share, attended, inner).outputs for name in names]
                    values = [value[part.start : part.stop] for value, part in zip(values, parts, strict=True)]
                if place == places.SINKS:
                    heads = share.attended(spec)
                    values = [sink_records(values[0][heads.start // spec.head_dim : heads.stop // spec.head_dim], spec.head_dim)]
                # Zeros fill the last vector.
                kept.append(np.concatenate([*values, np.zeros(-sum(map(len, values)) % LANES, np.float32)]))
                row[place] = kept[-1].ctypes.data
                tell(sum(map(source.nbytes, names)))
    has_embedding = edges and _has_embedding(share)
    return PackedModel(
        spec,
        share,
        attended,
        inner,
        layers,
        addresses,
        forms,
        records[EMBEDDING].ctypes.data if has_embedding else 0,
        form_by_name.get(EMBEDDING) if has_embedding else None,
        (arena.bytes, *kept),
    )


def sink_records(sinks: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Return the sinks of heads as records of a segment: the score times log2(e), a weight of one, and zeros for the values."""
    records = np.zeros((len(sinks), record_bytes(head_dim) // 4), np.float32)
    records[:, head_dim] = sinks * np.float32(math.log2(math.e))
    records[:, head_dim + 1] = 1
    return records.ravel()


def _stacks(rows: Sequence[Mapping[int, Sequence[str]]], form_by_name: Mapping[str, Form]) -> list[Sequence[str]]:
    """Return groups of names of matrices with contiguous records: all experts of one place form a group, any other matrix is alone."""
    stacks = [names for row in rows for place, names in row.items() if place in MATRICES and names[0] in form_by_name]
    for names in stacks:
        if len({form_by_name[name] for name in names}) > 1:
            raise UnsupportedModel(f"Experts like {names[0]} are held in several forms", "Ask for --weights int8 or bf16.")
    known = {names[0] for names in stacks}
    return [*stacks, *((name,) for name in form_by_name if name == EMBEDDING and name not in known)]


def _has_embedding(share: Share) -> bool:
    return share.vocab.start == 0


def _is_undivided(name: str) -> bool:
    """Return whether every share has all of a matrix: an expert's, a router, or one of the low-rank matrices of queries, keys and values."""
    return ".mlp.experts." in name or name.endswith((ROUTER, *_OF_TWO.values()))


def _part_of(name: str, spec: ModelSpec, share: Share, attended: range, inner: range) -> _Part:
    """Return the part of a matrix that a share has. The first rank has all of the embedding: its first outputs are that rank's part of a tied head.

    Args:
        attended: inputs of the attention output that are held. `inner`: those of feed-forward down.
    """
    heads = range(share.kv_heads.start * spec.head_dim, share.kv_heads.stop * spec.head_dim)
    match name.split(".")[-2]:
        case "embed_tokens" if _has_embedding(share):
            return _Part(range(spec.vocab))
        case "embed_tokens" | "lm_head":
            return _Part(range(LANES * share.vocab.start, min(LANES * share.vocab.stop, spec.vocab)))
        case "q_proj":
            return _Part(share.attended(spec))
        case "k_proj" | "v_proj":
            return _Part(heads)
        case "o_proj":
            return _Part(range(spec.hidden), attended)
        case "down_proj":
            return _Part(range(spec.hidden), inner)
        case _:
            return _Part(share.inner(spec))


def _stored_bytes(source: WeightSource, name: str, part: _Part, n: int, k: int) -> int:
    """Return the bytes that a part of a matrix of N x K weights takes in its file."""
    outputs, inputs = part.shape(k)
    return source.nbytes(name) * outputs * inputs // (n * k)


_SHARED = ("o_proj.weight", "down_proj.weight")
"""Endings of the names of matrices with inputs that ranks share."""

MATRICES = {
    places.Q: "self_attn.q_proj", places.K: "self_attn.k_proj", places.V: "self_attn.v_proj", places.OUT: "self_attn.o_proj",
    places.GATE: "mlp.gate_proj", places.UP: "mlp.up_proj", places.DOWN: "mlp.down_proj", places.ROUTER: "mlp.gate", places.HEAD: "lm_head",
    places.Q_LOW: "self_attn.q_a_proj", places.KV_LOW: "self_attn.kv_a_proj_with_mqa",
}  # fmt: skip
"""Names of the matrices, by their places."""
_OF_TWO = {
    places.Q_LOW: "self_attn.q_a_proj.weight", places.KV_LOW: "self_attn.kv_a_proj_with_mqa.weight", places.Q: "self_attn.q_b_proj.weight",
    places.K: "self_attn.kv_b_proj.weight",
}  # fmt: skip
"""Names of the low-rank matrices of queries, keys and values, by their places. Keys and values are in one matrix, for each head the key's outputs first."""


def _layer_names(spec: ModelSpec, layer: int) -> dict[int, list[str]]:
    """Return the tensor names of a layer by place. A place with several names holds vectors, or experts' matrices, one after the other."""
    stems = {
        place: [f"{MATRICES[place]}.weight"] for place in (places.Q, places.K, places.V, places.OUT, places.GATE, places.UP, places.DOWN)
    }
    if spec.low is not None:
        del stems[places.V]
        stems |= {place: [name] for place, name in _OF_TWO.items()}
        stems |= {places.Q_LOW_NORM: ["self_attn.q_a_layernorm.weight"], places.KV_LOW_NORM: ["self_attn.kv_a_layernorm.weight"]}
    if spec.moe is not None:
        for place in (places.GATE, places.UP, places.DOWN):
            stem = MATRICES[place].removeprefix("mlp.")
            stems[place] = [f"mlp.experts.{expert}.{stem}.weight" for expert in range(spec.moe.n_experts)]
        stems[places.ROUTER] = [f"{MATRICES[places.ROUTER]}.weight"]
    norms = zip((places.ATTN_NORM, places.ATTN_OUT_NORM, places.FFN_NORM, places.FFN_OUT_NORM), NORM_NAMES[spec.norms], strict=True)
    stems |= {place: [f"{name}.weight"] for place, name in norms if name is not None}
    if spec.moe is not None and spec.moe.biased:
        stems[places.ROUTER_BIAS] = ["mlp.gate.bias"]
        for place, of in ((places.GATE_BIAS, places.GATE), (places.UP_BIAS, places.UP), (places.DOWN_BIAS, places.DOWN)):
            stems[place] = [name.replace(".weight", ".bias") for name in stems[of]]
    if spec.out_bias:
        stems[places.OUT_BIAS] = ["self_attn.o_proj.bias"]
    if spec.sinks:
        stems[places.SINKS] = [SINKS]
    if spec.qkv_bias:
        stems[places.QKV_BIAS] = [f"self_attn.{p}_proj.bias" for p in "qkv"]
    if spec.qk_norm:
        stems |= {places.Q_NORM: ["self_attn.q_norm.weight"], places.K_NORM: ["self_attn.k_norm.weight"]}
    return {place: [f"model.layers.{layer}.{stem}" for stem in group] for place, group in sorted(stems.items())}
