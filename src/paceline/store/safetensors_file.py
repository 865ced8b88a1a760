"""A folder of safetensors (one file, or shards with an index) as a source of tensors.

Only the heads are read when it is opened; each tensor is one plain read of its own bytes when asked for. Not the safetensors
library's reader: that maps the file, mapped pages count as this process's memory, and its numpy side has no bf16.
Format: eight bytes of little-endian length, a JSON table, then the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelFileError
from paceline.core.model import ModelSpec
from paceline.core.weights import DenseTensor, StoredTensor
from paceline.store.digests import DigestCache, digest_of_files
from paceline.store.faults import damaged, unreadable, unsupported
from paceline.store.hf_config import spec_from_config
from paceline.store.json_object import load_object, parse_object
from paceline.store.layout import check_tensors

MAX_HEAD_BYTES: Final = 100_000_000
"""The format's own limit on its table."""
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"

DType = Literal["f32", "f16", "bf16"]
_DTYPES: Final[Mapping[str, DType]] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_NUMPY: Final[Mapping[DType, type[np.generic]]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
_COMPUTED: Final = ("rotary_emb.inv_freq", "masked_bias")
"""Endings of tensors that old checkpoints hold although they follow from the configuration."""


@dataclass(frozen=True, slots=True)
class StoredAt:
    """Where a tensor lies."""

    path: Path
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsWeights:
    """A `WeightSource` over a folder with config.json and safetensors."""

    def __init__(self, folder: Path, digests: DigestCache) -> None:
        """Read the configuration and the heads of all files, and hold one against the other.

        Raises:
            ModelFileError: a file is missing, truncated or damaged, or its tensors don't fit the configuration.
            UnsupportedModel: a family, feature or tensor type Paceline does not run.
        """
        self.folder: Final = folder
        self._digests = digests
        self._digest: str | None = None
        config = load_object(folder / CONFIG)
        self._spec: Final = spec_from_config(config)
        self._files: Final = tuple(weight_files(folder))
        tensors: dict[str, StoredAt] = {}
        for path in self._files:
            tensors.update((name, at) for name, at in read_head(path) if not name.endswith(_COMPUTED))
        self._tensors: Final = tensors
        check_tensors(self._files[0], self._spec, {name: at.shape for name, at in tensors.items()})

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def digest(self) -> str:
        """SHA-256 over the digests of the weights and of config.json; read only if a file changed since the last time."""
        if self._digest is None:
            self._digest = digest_of_files(self._digests, [*self._files, self.folder / CONFIG])
        return self._digest

    @property
    def tensor_type(self) -> str:
        """The type most of the bytes are in."""
        weight: dict[str, int] = {}
        for at in self._tensors.values():
            weight[at.dtype] = weight.get(at.dtype, 0) + at.nbytes
        return max(weight, key=weight.__getitem__).upper()

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def nbytes(self, name: str) -> int:
        return self._at(name).nbytes

    def read(self, name: str) -> StoredTensor:
        at = self._at(name)
        array: npt.NDArray[np.generic] = np.empty(at.shape, _NUMPY[at.dtype])
        view, filled = array.reshape(-1).view(np.uint8).data, 0
        try:
            with at.path.open("rb", buffering=0) as file:
                file.seek(at.offset)
                # One read returns at most 2 GiB on Linux.
                while filled < at.nbytes:
                    n = file.readinto(view[filled:])
                    if not n:
                        raise damaged(at.path, f"tensor {name} is cut short: the file changed since it was opened")
                    filled += n
        except OSError as error:
            raise unreadable(at.path, error) from error
        return DenseTensor(array, at.dtype)

    def _at(self, name: str) -> StoredAt:
        at = self._tensors.get(name)
        if at is None:
            raise damaged(self.folder, f"tensor {name} is missing")
        return at


def weight_files(folder: Path) -> list[Path]:
    """The files a folder's weights lie in.

    Raises:
        ModelFileError: there are none, the index is damaged, or it names a file that isn't there.
    """
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        if single.exists():
            return [single]
        others = sorted(folder.glob("*.safetensors"))
        if len(others) == 1:
            return others
        found = f"{len(others)} safetensors files and no {INDEX}" if others else "no safetensors file"
        raise ModelFileError(f"{folder} holds {found}", "A model folder has config.json and safetensors; Paceline reads GGUF files too")
    table = load_object(index).child("weight_map")
    if table is None or not table.fields or not all(isinstance(name, str) for name in table.fields.values()):
        raise damaged(index, "it has no weight_map of file names")
    names = sorted(set(cast("dict[str, str]", table.fields).values()))
    for name in names:
        if "/" in name or "\\" in name or "\0" in name or not (folder / name).is_file():
            raise damaged(folder, f"{name!r}, which its index names, is not there")
    return [folder / name for name in names]


def read_head(path: Path) -> Iterator[tuple[str, StoredAt]]:
    """The tensors of a safetensors file, and where they lie.

    Raises:
        ModelFileError: the file is missing, truncated or damaged.
        UnsupportedModel: a tensor's type is not F32, F16 or BF16.
    """
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            n = int.from_bytes(file.read(8), "little")
            if size < 10 or n > min(size - 8, MAX_HEAD_BYTES):
                raise damaged(path, f"it is truncated: its table should have {n} bytes, the file has {size}")
            head = file.read(n)
    except OSError as error:
        raise unreadable(path, error) from error
    table = parse_object(path, head)
    for name, entry in table.fields.items():
        if name != "__metadata__":
            yield name, _entry(path, name, entry, 8 + n, size)


def _entry(path: Path, name: str, entry: object, data_start: int, size: int) -> StoredAt:
    """One row of the table, checked against the file's size."""
    fields: dict[str, Any] = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    kind, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(kind, str) or shape is None or offsets is None or len(offsets) != 2 or len(shape) > 8:
        raise damaged(path, f"its table has {json.dumps(entry)[:100]} for tensor {name}")
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise unsupported(path, f"tensor {name} is of type {kind}, which Paceline does not read")
    start, stop = offsets
    weights = 1
    for length in shape:
        weights *= length
    nbytes = weights * np.dtype(_NUMPY[dtype]).itemsize
    if stop - start != nbytes:
        raise damaged(path, f"tensor {name} of shape {shape} and type {kind} can't have {stop - start} bytes")
    if data_start + stop > size:
        raise damaged(path, f"it is truncated: tensor {name} ends at byte {data_start + stop}, the file at {size}")
    return StoredAt(path, dtype, tuple(shape), data_start + start, nbytes)


def _sizes(values: object) -> list[int] | None:
    """A list of non-negative integers, or None for anything else."""
    items = cast("list[object]", values) if isinstance(values, list) else [None]
    sizes = [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
    return sizes if len(sizes) == len(items) else None
