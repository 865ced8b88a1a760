"""The head of a GGUF file: metadata and tensor table. Nothing in it is trusted.

Every count, length and offset is checked against the file's size before anything is allocated or read for it. A value that does not fit
raises ModelFileError; an unknown version or tensor type raises UnsupportedModel. Long arrays (vocabularies) are only located at first, and decoded
on demand.
Source: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from paceline.core.errors import UnsupportedModel
from paceline.core.weights import TENSOR_TYPES
from paceline.store.faults import Fields, check_not_pointer, damaged, reading, unsupported
from paceline.store.tensor_files import StoredAt

MAGIC: Final = b"GGUF"
MAX_HEADER_BYTES: Final = 32 << 20
"""Twice the size of the heads with the largest vocabularies. Raising this, or a bound below: a hostile file takes more time and memory before it
is refused."""
MAX_TENSORS: Final = 1 << 16
MAX_KEYS: Final = 1 << 12
MAX_STRINGS: Final = 1 << 20
"""Most strings in one array. A vocabulary has up to twice as many merges as tokens."""
_FIRST_READ: Final = 4 << 20
_MAX_DIMS: Final = 4
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[Mapping[int, struct.Struct]] = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"), 4: struct.Struct("<I"),
    5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"), 10: struct.Struct("<Q"), 11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}  # fmt: skip
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_TYPE_BY_CODE: Final = {kind.code: kind for kind in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """An array of the metadata, not decoded: its element type, its length and where it lies in the file."""

    kind: int
    count: int
    start: int
    stop: int


Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufHeader(Fields):
    """Metadata and tensor table of one file."""

    fields: Mapping[str, Scalar | ArrayRef]
    tensors: Mapping[str, StoredAt]

    def called(self, key: str) -> str:
        """See `Fields.called`."""
        return f"metadata {key}"

    def strings(self, key: str) -> list[str] | None:
        """Read an array of strings from the file; None if the key is absent. Raises ModelFileError if the value is something else."""
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, ArrayRef) or value.kind != _STRING:
            raise damaged(self.path, f"metadata {key} is not an array of strings")
        data = self._read(value)
        found: list[str] = []
        at = 0
        for _ in range(value.count):
            stop = at + 8 + _U64.unpack_from(data, at)[0]
            try:
                found.append(data[at + 8 : stop].decode())
            except UnicodeDecodeError as error:
                raise damaged(self.path, f"metadata {key} holds text that is not UTF-8") from error
            at = stop
        return found

    def numbers(self, key: str) -> list[float] | None:
        """Read an array of numbers from the file; None if the key is absent. Raises ModelFileError if the value is something else."""
        value = self.fields.get(key)
        if value is None:
            return None
        if not isinstance(value, ArrayRef) or value.kind not in _SCALARS:
            raise damaged(self.path, f"metadata {key} is not an array of numbers")
        return [item[0] for item in _SCALARS[value.kind].iter_unpack(self._read(value))]

    def same_integer(self, key: str) -> int | None:
        """Return an integer that is stored once, or as an array that repeats it for each layer; None if the key is absent.

        Raises:
            ModelFileError: the value is something else.
            UnsupportedModel: the array's numbers differ.
        """
        if not isinstance(self.fields.get(key), ArrayRef):
            return self.integer(key)
        found = set(self.numbers(key) or ())
        if len(found) > 1:
            raise unsupported(self.path, f"{key} differs between layers")
        value = next(iter(found), None)
        if value is None or not float(value).is_integer():
            raise damaged(self.path, f"metadata {key} is not a list of integers")
        return int(value)

    def _read(self, array: ArrayRef) -> bytes:
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            file.seek(array.start)
            data = file.read(array.stop - array.start)
        if len(data) != array.stop - array.start:
            raise damaged(self.path, "it changed while it was read")
        return data


class HeadIncomplete(Exception):
    """The head of a file is longer than the beginning that is on the disk."""


def read_header(path: Path, size: int | None = None) -> GgufHeader:
    """Parse the head of a GGUF file.

    Args:
        size: bytes of the whole file, if only its beginning is at `path`; None: the file is complete.

    Raises:
        HeadIncomplete: the beginning is too short.
        ModelFileError: the file is missing, truncated or damaged.
        UnsupportedModel: Paceline does not read its GGUF version, byte order or a tensor type.
    """
    with reading(path):
        here = path.stat().st_size
        return _parse(_Cursor(path, here if size is None else size, partial=size is not None))


class _Cursor:
    """A position in the file's head, over a buffer that grows as more is read, up to MAX_HEADER_BYTES."""

    def __init__(self, path: Path, size: int, *, partial: bool = False) -> None:
        self.path = path
        self.size = size
        self._partial = partial
        self.at = 0
        self._data = b""

    def need(self, n: int, what: str) -> int:
        """Make sure that `n` bytes lie ahead, and step over them. Returns their offset; `what` names them in errors."""
        start, stop = self.at, self.at + n
        if stop > self.size:
            raise damaged(self.path, f"it ends inside {what} (it has {self.size} bytes and needs {stop})")
        if stop > len(self._data):
            self._grow(stop)
        self.at = stop
        return start

    def _grow(self, stop: int) -> None:
        if stop > MAX_HEADER_BYTES:
            raise damaged(self.path, f"its metadata is longer than {MAX_HEADER_BYTES >> 20} MiB")
        target = min(self.size, MAX_HEADER_BYTES, max(stop, 2 * len(self._data), _FIRST_READ))
        with self.path.open("rb", buffering=0) as file:
            self._data = file.read(target)
        if len(self._data) < stop:
            raise HeadIncomplete if self._partial else damaged(self.path, "it changed while it was read")

    def peek(self, start: int, n: int) -> bytes:
        """Return bytes that were already stepped over."""
        return self._data[start : start + n]

    def u32(self, what: str) -> int:
        start = self.need(4, what)
        return _U32.unpack_from(self._data, start)[0]

    def u64(self, what: str) -> int:
        start = self.need(8, what)
        return _U64.unpack_from(self._data, start)[0]

    def scalar(self, kind: int, what: str) -> Scalar:
        codec = _SCALARS[kind]
        start = self.need(codec.size, what)
        return codec.unpack_from(self._data, start)[0]

    def count(self, least_bytes: int, what: str, most: int | None = None) -> int:
        """Read the number of things that take at least `least_bytes` each. Raises if there are more than `most`, or than the file can hold."""
        n = self.u64(what)
        if most is not None and n > most:
            raise damaged(self.path, f"it claims {n} {what}; the bound is {most}")
        if n * least_bytes > self.size - self.at:
            raise damaged(self.path, f"it claims {n} {what}, more than its {self.size} bytes can hold")
        return n

    def string(self, what: str) -> str:
        n = self.u64(what)
        start = self.need(n, what)
        try:
            return self._data[start : start + n].decode()
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"{what} is not UTF-8") from error

    def skip_strings(self, count: int, what: str) -> None:
        """Step over strings. Does not call `need` for each: a vocabulary has 10^5, and this loop takes most of the time to open a model."""
        unpack, data, at = _U64.unpack_from, self._data, self.at
        for _ in range(count):
            if at + 8 > len(data):
                self.at = at
                self.need(8, what)
                data = self._data
            at += 8 + unpack(data, at)[0]
        if at > self.size:
            raise damaged(self.path, f"it ends inside {what} (it has {self.size} bytes and needs {at})")
        self.at = at


def is_gguf(path: Path) -> bool:
    """Return whether `path` is a file that begins with GGUF's magic number. Raises ModelFileError if it can't be read."""
    if not path.is_file():
        return False
    with reading(path), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _parse(cursor: _Cursor) -> GgufHeader:
    path = cursor.path
    if cursor.size < 24:
        raise damaged(path, f"{cursor.size} bytes are too few for a GGUF file")
    start = cursor.need(4, "the magic number")
    magic = cursor.peek(start, 4)
    if magic != MAGIC:
        check_not_pointer(path, cursor.peek(start, 24))
        raise damaged(path, f"it starts with {magic!r}, not with b'GGUF'")
    version = cursor.u32("the version")
    if version not in {2, 3}:
        raise UnsupportedModel(
            f"{path} is a GGUF file of version {version}, or big-endian, and versions 2 and 3 are read, little-endian",
            "Get the model in another file, or convert it anew.",
        )
    n_tensors = cursor.count(24, "tensors", MAX_TENSORS)
    n_keys = cursor.count(13, "metadata keys", MAX_KEYS)
    metadata = _parse_metadata(cursor, n_keys)
    tensors: dict[str, StoredAt] = {}
    for _ in range(n_tensors):
        tensor = _parse_tensor(cursor)
        if tensor.name in tensors:
            raise damaged(path, f"tensor {tensor.name} is there twice")
        tensors[tensor.name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in {1 << n for n in range(3, 17)}:
        raise damaged(path, f"its alignment is {alignment!r}")
    data_start = -(-cursor.at // alignment) * alignment
    placed: dict[str, StoredAt] = {}
    for tensor in tensors.values():
        absolute = data_start + tensor.offset
        if absolute + tensor.nbytes > cursor.size:
            end = absolute + tensor.nbytes
            raise damaged(path, f"it is truncated: tensor {tensor.name} ends at byte {end}, the file at {cursor.size}")
        placed[tensor.name] = replace(tensor, offset=absolute)
    return GgufHeader(path, metadata, placed)


def _parse_metadata(cursor: _Cursor, n_keys: int) -> dict[str, Scalar | ArrayRef]:
    metadata: dict[str, Scalar | ArrayRef] = {}
    for _ in range(n_keys):
        key = cursor.string("a metadata key")
        kind = cursor.u32(f"metadata {key}")
        if key in metadata:
            raise damaged(cursor.path, f"metadata {key} is there twice")
        if kind == _STRING:
            metadata[key] = cursor.string(f"metadata {key}")
        elif kind == _ARRAY:
            metadata[key] = _parse_array(cursor, key)
        elif kind in _SCALARS:
            metadata[key] = cursor.scalar(kind, f"metadata {key}")
        else:
            raise damaged(cursor.path, f"metadata {key} has unknown type {kind}")
    return metadata


def _parse_array(cursor: _Cursor, key: str) -> ArrayRef:
    kind = cursor.u32(f"metadata {key}")
    what = f"elements of metadata {key}"
    if kind == _STRING:
        count = cursor.count(8, what, MAX_STRINGS)
        start = cursor.at
        cursor.skip_strings(count, what)
    elif kind in _SCALARS:
        width = _SCALARS[kind].size
        count = cursor.count(width, what)
        start = cursor.need(count * width, what)
    else:
        raise damaged(cursor.path, f"metadata {key} is an array of unknown type {kind}")
    return ArrayRef(kind, count, start, cursor.at)


def _parse_tensor(cursor: _Cursor) -> StoredAt:
    """Read one row of the tensor table. The offset in it is still relative to the data section."""
    path = cursor.path
    name = cursor.string("a tensor's name")
    n_dims = cursor.u32(f"tensor {name}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise damaged(path, f"tensor {name} has {n_dims} dimensions")
    dims = [cursor.u64(f"tensor {name}") for _ in range(n_dims)]
    code = cursor.u32(f"tensor {name}")
    kind = _TYPE_BY_CODE.get(code)
    if kind is None:
        raise unsupported(path, f"tensor {name} is of GGML type {code}, which Paceline does not read")
    offset = cursor.u64(f"tensor {name}")
    weights = math.prod(dims)
    if weights == 0 or dims[0] % kind.block:
        raise damaged(path, f"tensor {name} of type {kind.name} has the impossible shape {dims}")
    return StoredAt(path, name, kind, tuple(reversed(dims)), offset, weights // kind.block * kind.nbytes)
