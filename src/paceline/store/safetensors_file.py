"""A folder of safetensors (one file, or shards with an index) as a source of tensors.

Only the heads are read when it is opened. Not the safetensors library's reader: that maps the file, and its numpy side has no bf16.
Format: eight bytes of little-endian length, a JSON table, then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from paceline.core.errors import ModelFileError
from paceline.core.weights import TENSOR_TYPES
from paceline.store.digests import DigestCache
from paceline.store.faults import damaged, unreadable, unsupported
from paceline.store.hf_config import load_object, parse_object, spec_from_config
from paceline.store.selection import INDEX
from paceline.store.tensor_files import DENSE, StoredAt, TensorFiles

MAX_HEAD_BYTES: Final = 8 << 20
"""Some 60,000 tensors in one file. Raising it: a table of empty lists takes twenty times its size once it is read."""
SINGLE: Final = "model.safetensors"
CONFIG: Final = "config.json"

_COMPUTED: Final = ("rotary_emb.inv_freq", "masked_bias")
"""Endings of tensors that old checkpoints hold although they follow from the configuration."""


class SafetensorsWeights(TensorFiles):
    """The tensors of a folder with config.json and safetensors. The digest covers config.json too."""

    format = "safetensors"

    def __init__(self, folder: Path, digests: DigestCache) -> None:
        """Read the configuration and the heads of all files, and hold one against the other.

        Raises:
            ModelFileError: a file is missing, truncated or damaged, or its tensors don't fit the configuration.
            UnsupportedModel: a family, feature or tensor type Paceline does not run.
        """
        spec = spec_from_config(load_object(folder / CONFIG))
        files = weight_files(folder)
        tensors = {at.name: at for path in files for at in read_head(path) if not at.name.endswith(_COMPUTED)}
        super().__init__(spec, tensors, files, digests, beside=[folder / CONFIG])


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


def read_head(path: Path, leave_out: tuple[str, ...] = ()) -> Iterator[StoredAt]:
    """The tensors of a safetensors file, and where they lie.

    Args:
        leave_out: beginnings of the names of those that no one wants, of whatever type they are.

    Raises:
        ModelFileError: the file is missing, truncated or damaged.
        UnsupportedModel: a tensor's type is not F32, F16 or BF16.
    """
    try:
        if path.exists() and not path.is_file():
            raise damaged(path, "it is not a file")  # opening a pipe may never end
        size = path.stat().st_size
        if size < 10:
            raise damaged(path, f"it is truncated: it has {size} bytes")
        with path.open("rb", buffering=0) as file:
            n = int.from_bytes(file.read(8), "little")
            if n > min(size - 8, MAX_HEAD_BYTES):
                raise damaged(path, f"it is truncated: its table should have {n} bytes, the file has {size}")
            head = file.read(n)
    except OSError as error:
        raise unreadable(path, error) from error
    table = parse_object(path, head)
    for name, entry in table.fields.items():
        if name != "__metadata__" and not name.startswith(leave_out):
            yield _entry(path, name, entry, 8 + n, size)


def _entry(path: Path, name: str, entry: object, data_start: int, size: int) -> StoredAt:
    """One row of the table, checked against the file's size."""
    fields: dict[str, Any] = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
    kind, shape, offsets = fields.get("dtype"), _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(kind, str) or shape is None or offsets is None or len(offsets) != 2 or len(shape) > 8:
        raise damaged(path, f"its table has {json.dumps(entry)[:100]} for tensor {name}")
    if kind not in DENSE:
        raise unsupported(path, f"tensor {name} is of type {kind}, which Paceline does not read")
    stored_type = TENSOR_TYPES[kind]
    start, stop = offsets
    nbytes = math.prod(shape) * stored_type.nbytes
    if stop - start != nbytes:
        raise damaged(path, f"tensor {name} of shape {shape} and type {kind} can't have {stop - start} bytes")
    if data_start + stop > size:
        raise damaged(path, f"it is truncated: tensor {name} ends at byte {data_start + stop}, the file at {size}")
    return StoredAt(path, name, stored_type, tuple(shape), data_start + start, nbytes)


def _sizes(values: object) -> list[int] | None:
    """A list of non-negative integers, or None for anything else."""
    items = cast("list[object]", values) if isinstance(values, list) else [None]
    sizes = [item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
    return sizes if len(sizes) == len(items) else None
