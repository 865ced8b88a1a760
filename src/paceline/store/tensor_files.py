"""Tensors in files of any format: the place of each tensor, and reading it.

Each read opens the file, reads one range and closes it. Nothing is mapped: mapped pages would count as this process's memory.

A model's tensors are checked against its configuration when it is opened, so a wrong file is refused, with its name, before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from paceline.core.model import ModelSpec, YarnSpec, rotary_dims
from paceline.core.weights import HEAD, BlockTensor, DenseTensor, Shape, StoredTensor, TensorType, columns_of, tensor_shapes
from paceline.store.digests import DigestCache, digest_of_files
from paceline.store.faults import damaged, reading, unsupported

MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 1 << 17
"""Most experts in all layers together, five times those of the largest models. Raising it: a hostile configuration costs more time and memory, since
the tensors of each expert are named one by one."""


def check_tensors(path: Path, spec: ModelSpec, found: Mapping[str, Shape]) -> None:
    """Check that a file has exactly the tensors of its spec.

    Raises:
        ModelFileError: a tensor is missing or has another shape.
        UnsupportedModel: the file has tensors that the family does not have, so results without them would be wrong.
    """
    expected = tensor_shapes(spec)
    missing = [name for name in expected if name not in found]
    if missing:
        which = f"tensor {missing[0]} is" if len(missing) == 1 else f"tensor {missing[0]} and {len(missing) - 1} more are"
        raise damaged(path, f"{which} missing")
    for name, shape in expected.items():
        if found[name] != shape:
            raise damaged(path, f"tensor {name} has shape {list(found[name])}, its configuration says {list(shape)}")
    extra = sorted(found.keys() - expected.keys() - {HEAD})
    if extra:
        raise unsupported(path, f"tensor {extra[0]} is not part of the {spec.model_type} family")


def check_range(path: Path, sizes: Mapping[str, int]) -> None:
    """Raise ModelFileError for a size that no model has."""
    for name, size in sizes.items():
        if not 0 < size < 1 << 31:
            raise damaged(path, f"its configuration says {name} = {size}")


def check_sizes(path: Path, spec: ModelSpec) -> None:
    """Check a spec's sizes before they are used to allocate or to divide.

    Raises:
        ModelFileError: a size is out of range, or sizes contradict one another.
    """
    sizes = {
        "layers": spec.n_layers, "hidden size": spec.hidden, "heads": spec.n_heads, "KV heads": spec.n_kv_heads,
        "head size": spec.head_dim, "feed-forward size": spec.ffn, "vocabulary": spec.vocab, "context": spec.max_context,
    }  # fmt: skip
    if spec.window is not None:
        sizes["sliding window"] = spec.window.tokens
    if spec.long is not None:
        sizes["longest context"] = spec.long.tokens
    if (low := spec.low) is not None:
        sizes |= {"value size": low.value_dim, "rank of queries": low.queries, "rank of keys and values": low.keys}
    if spec.moe is not None:
        sizes |= {"experts": spec.moe.n_experts, "experts a token": spec.moe.top_k, "expert size": spec.moe.ffn}
    check_range(path, sizes)
    n_experts = 1 if spec.moe is None else spec.moe.n_experts
    if spec.n_layers > MAX_LAYERS or spec.n_layers * n_experts > MAX_EXPERTS:
        experts = "" if spec.moe is None else f" of {n_experts} experts"
        raise damaged(path, f"its configuration says {spec.n_layers} layers{experts}")
    rope, turning = spec.rope, rotary_dims(spec.rope, spec.head_dim)
    for divisors in (rope.divisors, () if spec.long is None else spec.long.rope.divisors):
        sound = not divisors or (len(divisors) == turning // 2 and min(divisors) > 0)
        if not 0 < turning <= spec.head_dim or turning % 2 or not sound:
            raise damaged(path, f"its rope turns {turning} of {spec.head_dim} dimensions by {len(divisors)} divisors")
    if spec.low is not None and (spec.own_dims <= 0 or spec.n_heads != spec.n_kv_heads):
        raise damaged(
            path, f"{spec.n_heads} heads and {spec.n_kv_heads} KV heads, of which {turning} of {spec.head_dim} turn, don't go together"
        )
    if not 0 < rope.gain < math.inf or (rope.yarn and not _is_sound(rope.yarn, rope.theta)):
        raise damaged(path, "the factors of its rope scaling contradict one another")
    if spec.n_heads % spec.n_kv_heads or spec.head_dim % 2:
        raise damaged(path, f"{spec.n_heads} heads, {spec.n_kv_heads} KV heads and head size {spec.head_dim} don't go together")
    local = spec.window.rope if spec.window is not None else None
    if local is not None and (not 0 < local.theta < math.inf or rotary_dims(local, spec.head_dim) != turning):
        raise damaged(path, f"the rope of its windows has base {local.theta}, and turns other dimensions than its own")
    if spec.moe is not None and spec.moe.top_k > spec.moe.n_experts:
        raise damaged(path, f"its configuration uses {spec.moe.top_k} of {spec.moe.n_experts} experts")
    if not (0 < spec.rope.theta < math.inf and 0 <= spec.rms_eps < math.inf and 0 < spec.rope.linear_factor < math.inf):
        scaling = f", its rope's factor {spec.rope.linear_factor}" if spec.rope.linear_factor != 1 else ""
        raise damaged(path, f"its rope base is {spec.rope.theta} and its norm's epsilon {spec.rms_eps}{scaling}")


def _is_sound(yarn: YarnSpec, theta: float) -> bool:
    return 0 < yarn.factor < math.inf and yarn.original > 0 and 0 < yarn.slow < yarn.fast < math.inf and theta > 1


Bytes = npt.NDArray[np.uint8]
DENSE: Final[Mapping[str, tuple[Literal["f32", "f16", "bf16"], type[np.generic]]]] = {
    "F32": ("f32", np.float32),
    "F16": ("f16", np.float16),
    "BF16": ("bf16", np.uint16),
}
"""Types of unquantised tensors, by their names in files: our name, and the NumPy type that holds them."""


@dataclass(frozen=True, slots=True)
class StoredAt:
    """The place of a tensor: one range of one file. A subclass may combine several ranges (`ranges`)."""

    path: Path
    name: str
    """Name in the file."""
    type: TensorType
    shape: Shape
    """Row-major: (outputs, inputs) for a matrix."""
    offset: int
    nbytes: int
    stride: int = field(default=0, kw_only=True)
    """For columns of a matrix, bytes from one row to the next; 0: the rows are contiguous."""

    @property
    def ranges(self) -> tuple[StoredAt, ...]:
        """Ranges of files that are read for this tensor: itself, or those that it is made of."""
        return (self,)

    def rows(self, start: int, stop: int) -> StoredAt:
        """Return the place of rows [start, stop). Rows consist of whole blocks."""
        first, end = (at * self.nbytes // self.shape[0] for at in (start, stop))
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=self.offset + first, nbytes=end - first)

    def columns(self, start: int, stop: int) -> StoredAt:
        """Return the place of columns [start, stop) of a matrix, which must begin and end between blocks."""
        first, end = (self.type.row_bytes(at) for at in (start, stop))
        n = self.shape[0]
        return replace(
            self, shape=(n, stop - start), offset=self.offset + first, nbytes=n * (end - first), stride=self.nbytes // n if n else 0
        )

    @property
    def runs(self) -> tuple[int, int]:
        """Number of contiguous runs that the tensor lies in, and the bytes of each."""
        return (self.shape[0], self.nbytes // self.shape[0]) if self.stride else (1, self.nbytes)

    def read(self) -> Bytes:
        """Read the tensor's bytes, `nbytes` in a flat array.

        Raises:
            ModelFileError: the file can't be read, or ends too early.
        """
        raw, (count, length) = np.empty(self.nbytes, np.uint8), self.runs
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            for run in range(count):
                file.seek(self.offset + run * self.stride)
                view, filled = raw.data[run * length : (run + 1) * length], 0
                # One read returns at most 2 GiB on Linux.
                while filled < length:
                    n = file.readinto(view[filled:])
                    if not n:
                        raise damaged(self.path, f"tensor {self.name} is cut short: the file changed since it was opened")
                    filled += n
        return raw


HALVES: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Offsets in bytes of the half-precision scales in a block of each type. IQ1_M is absent, because its scale is in four pieces; MXFP4 has an exponent."""


def _scales_are_finite(kind: TensorType, rows_NB: Bytes) -> bool:
    if kind.name == "MXFP4":
        return not (rows_NB.reshape(-1, kind.nbytes)[:, 0] == 255).any()
    if kind.name not in HALVES:
        return True
    words_NG = rows_NB.view(np.uint16).reshape(-1, kind.nbytes // 2)
    return not any(((words_NG[:, at // 2] & 0x7C00) == 0x7C00).any() for at in HALVES[kind.name])


def stored_tensor(at: StoredAt, raw: Bytes) -> StoredTensor:
    """Return a tensor made of its place and the bytes that were read there.

    Raises:
        ModelFileError: a scale is not a finite number, so these can't be weights.
    """
    if at.type.name in DENSE:
        dtype, numpy_type = DENSE[at.type.name]
        return DenseTensor(raw.view(numpy_type).reshape(at.shape), dtype)
    blocks = BlockTensor(at.type.name, at.shape, raw.reshape(math.prod(at.shape[:-1]), at.type.row_bytes(at.shape[-1])))
    if not _scales_are_finite(at.type, blocks.rows_NB):
        raise damaged(at.path, f"tensor {at.name} has a scale that is not a finite number")
    return blocks


class TensorFiles:
    """A `WeightSource` over files. The subclass of each format finds the tensors when it is opened."""

    format: ClassVar[str]

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Mapping[str, StoredAt],
        files: Sequence[Path],
        digests: DigestCache,
        beside: Sequence[Path] = (),
        *,
        neighbours: bool = False,
    ) -> None:
        """Check the tensors against the spec.

        Args:
            tensors: places by Hugging Face's names.
            digests: the cache of the files' digests.
            beside: files without tensors that the digest also covers.
            neighbours: in the files, the two rows of a rope pair are neighbours in the queries' and keys' matrices.

        Raises:
            ModelFileError: tensors are missing or of the wrong shape.
            UnsupportedModel: the files have tensors that Paceline does not know.
        """
        check_tensors(files[0], spec, {name: at.shape for name, at in tensors.items()})
        self.spec: Final = spec
        self._tensors: Final = tensors
        self._digests: Final = digests
        self._beside: Final = beside
        self._digest: str | None = None
        self.files: Final = tuple(files)
        self.reads: Callable[[StoredAt], Bytes] = methodcaller("read")
        """Function that reads the bytes of a place. Replace it to get them from elsewhere than these files."""
        self._permuted: Final = {"q_proj": spec.n_heads, "k_proj": spec.n_kv_heads} if neighbours else {}

    @property
    def path(self) -> Path:
        """Path by which `store.catalog.open_weights` opens these weights: a folder, or the first GGUF file."""
        return self.files[0].parent if self._beside else self.files[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the file, or of the digests of several files. A file is read only if it changed since the last time."""
        if self._digest is None:
            self._digest = digest_of_files(self._digests, [*self.files, *self._beside])
        return self._digest

    @property
    def known_digest(self) -> str | None:
        """The digest, if the digests of all weight files are remembered; otherwise None, because the weights would have to be read."""
        return self.digest if all(self._digests.known(file) is not None for file in self.files) else None

    @property
    def tensor_type(self) -> str:
        """Type of most of the bytes. People name a file's quantisation by it."""
        weight: dict[str, int] = {}
        for at in self._tensors.values():
            weight[at.type.name] = weight.get(at.type.name, 0) + at.nbytes
        return max(weight, key=weight.__getitem__)

    @property
    def places(self) -> Mapping[str, StoredAt]:
        """Places of all tensors that are read from these files, on opening or later. Those with Hugging Face's names are the model's."""
        return self._tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def nbytes(self, name: str) -> int:
        return self._at(name).nbytes

    def type_of(self, name: str) -> str:
        return self._at(name).type.name

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        whole = self._at(name)
        start, stop, _ = (rows or slice(None)).indices(whole.shape[0])
        at = whole.rows(start, stop)
        if columns is None or self._heads_of(name) is not None or whole.ranges != (whole,):
            return columns_of(stored_tensor(at, self._raw_rows(name, whole, start, stop)), columns)
        part = at.columns(columns.start, columns.stop)
        return stored_tensor(part, self.reads(part))

    def _heads_of(self, name: str) -> int | None:
        """Return the number of heads of a tensor with rows that are permuted within each head; None: its rows are in order."""
        return self._permuted.get(name.rpartition(".self_attn.")[2].partition(".")[0])

    def _raw_rows(self, name: str, at: StoredAt, start: int, stop: int) -> Bytes:
        """Read the bytes of rows [start, stop) of a tensor. Neighbouring rows of rope pairs are put into the order of half-split rope."""
        heads = self._heads_of(name)
        if heads is None or start == stop:
            return self.reads(at.rows(start, stop))
        # Rows are permuted within a head, so whole heads must be read.
        a_head = at.shape[0] // heads
        first, last = start // a_head, -(-stop // a_head)
        rows_NB = self.reads(at.rows(first * a_head, last * a_head)).reshape(last - first, a_head, -1)
        turning = rotary_dims(self.spec.rope, self.spec.head_dim)
        pairs = rows_NB[:, :turning].reshape(last - first, turning // 2, 2, -1)
        rows_NB[:, :turning] = pairs.swapaxes(1, 2).reshape(last - first, turning, -1).copy()
        return rows_NB.reshape(-1, rows_NB.shape[-1])[start - first * a_head : stop - first * a_head].reshape(-1)

    def _at(self, name: str) -> StoredAt:
        at = self._tensors.get(name)
        if at is None:
            raise damaged(self.files[0], f"tensor {name} is missing")
        return at
