"""The manifest of a model's files: names, sizes, checksums, pieces, and the place of each tensor. Values only; nothing is read here.

A piece is the unit that is fetched, checked and kept: `PIECE` bytes of a file, the last one shorter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from paceline.core.model import LayerRange
from paceline.core.weights import EMBEDDING, FINAL_NORM, HEAD

PIECE: Final = 1 << 20
MOST_RUNS: Final = 1 << 14
"""Byte runs in one request for weights, at most. Raising it: a request costs the peer more reads; lowering it: narrow columns need more requests."""
SHA256_BYTES: Final = 32
_LAYER: Final = re.compile(r"^model\.layers\.(\d{1,9})\.")
_EDGES: Final = frozenset({EMBEDDING, FINAL_NORM, HEAD})


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a model."""

    name: str
    """Path relative to the model's folder, with `/`."""
    size: int
    sha256: str
    pieces: bytes
    """SHA-256 of each piece, in order, 32 bytes each."""
    in_digest: bool
    """The model's digest covers the file: weights and configuration, not tokenizers."""

    @property
    def n_pieces(self) -> int:
        return -(-self.size // PIECE)

    def piece_size(self, piece: int) -> int:
        return min(PIECE, self.size - piece * PIECE)

    def piece_sha256(self, piece: int) -> bytes:
        return self.pieces[piece * SHA256_BYTES : (piece + 1) * SHA256_BYTES]


@dataclass(frozen=True, slots=True)
class TensorAt:
    """The place of a tensor in a file, in bytes."""

    name: str
    """Hugging Face's name. A tensor outside the layers, the embedding, the final norm and the head is needed to open any part of the model."""
    file: int
    """Index into the manifest's files."""
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """A model's digest, files and tensors."""

    digest: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorAt, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The layers of a model that one stage needs."""

    layers: LayerRange
    edges: bool
    """The part includes the embedding, the final norm and the head."""

    def needs(self, tensor: str) -> bool:
        """Return whether the part needs a tensor to be opened or run."""
        layer = _LAYER.match(tensor)
        if layer is not None:
            return int(layer[1]) in self.layers
        return self.edges or tensor not in _EDGES


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces [first, stop) of a file."""

    file: int
    first: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Strided bytes of a file: `count` runs of `length` bytes, each starting `stride` bytes after the one before. Example: some columns of a matrix."""

    file: int
    """Index into the manifest's files."""
    offset: int
    length: int
    stride: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.length * self.count

    def pieces(self) -> Iterator[ByteRuns]:
        """Yield the same bytes in the same order, at most `PIECE` bytes and `MOST_RUNS` runs at a time."""
        if self.count == 1:
            for at in range(0, self.length, PIECE):
                yield replace(self, offset=self.offset + at, length=min(PIECE, self.length - at))
            return
        step = max(1, min(MOST_RUNS, PIECE // max(1, self.length)))
        for first in range(0, self.count, step):
            yield replace(self, offset=self.offset + first * self.stride, count=min(step, self.count - first))


def combined_digest(files: Iterable[tuple[str, str]]) -> str:
    """Return one digest for several files, from (name without folder, hex SHA-256). It is equal when all names and bytes are.

    A single file's own digest is returned as it is.
    """
    ordered = sorted(files)
    if len(ordered) == 1:
        return ordered[0][1]
    lines = "".join(f"{name}\0{digest}\n" for name, digest in ordered)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def manifest_digest(files: Sequence[FileEntry]) -> str:
    """Return the digest of a model with these files. It covers weights and configuration only."""
    return combined_digest((file.name.rpartition("/")[2], file.sha256) for file in files if file.in_digest)


def files_digest(files: Iterable[FileEntry]) -> str:
    """Return one digest for all files of a model, including those that the model's own digest leaves out."""
    return combined_digest((file.name.rpartition("/")[2], file.sha256) for file in files)


def pieces_needed(manifest: ModelManifest, part: ModelPart | None) -> list[PieceRun]:
    """Return the pieces that a part of a model needs, in order and without overlap; all pieces if `part` is None.

    Bytes outside the tensors (headers, tables, files of other kinds) are always needed: a model can't be opened without them.
    """
    needed: list[PieceRun] = []
    tensors: dict[int, list[TensorAt]] = {}
    for tensor in manifest.tensors:
        tensors.setdefault(tensor.file, []).append(tensor)
    for number, file in enumerate(manifest.files):
        own = tensors.get(number, [])
        if part is None or not own:
            needed += [PieceRun(number, 0, file.n_pieces)] if file.size else []
            continue
        spans = [(0, min(tensor.offset for tensor in own))]
        spans += [(tensor.offset, tensor.offset + tensor.nbytes) for tensor in own if part.needs(tensor.name)]
        pieces = ((start // PIECE, -(-stop // PIECE)) for start, stop in spans if start < stop)
        needed += [PieceRun(number, first, stop) for first, stop in joined(pieces)]
    return needed


def joined(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return runs (first, stop) in order, with those that touch or overlap merged."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((first, stop))
    return tuple(found)
