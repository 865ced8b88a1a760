"""What a model's files are made of: names, sizes, checksums, pieces, and where each tensor lies. Values only, nothing is read here.

A piece is what is fetched, checked and kept as one: `PIECE` bytes of a file, the last one shorter.
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
"""Stretches of a file that are asked for as one."""
SHA256_BYTES: Final = 32
_LAYER: Final = re.compile(r"^model\.layers\.(\d{1,9})\.")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_EDGES: Final = frozenset({EMBEDDING, FINAL_NORM, HEAD})


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a model."""

    name: str
    """Relative to the model's folder, with `/`."""
    size: int
    sha256: str
    pieces: bytes
    """SHA-256 of each piece, in order, 32 bytes each."""
    in_digest: bool
    """The model's digest covers it: weights and configuration, not tokenizers."""

    @property
    def n_pieces(self) -> int:
        return -(-self.size // PIECE)

    def piece_size(self, piece: int) -> int:
        return min(PIECE, self.size - piece * PIECE)

    def piece_sha256(self, piece: int) -> bytes:
        return self.pieces[piece * SHA256_BYTES : (piece + 1) * SHA256_BYTES]


@dataclass(frozen=True, slots=True)
class TensorAt:
    """Where a tensor lies."""

    name: str
    """Hugging Face's. One that no layer and no edge has is needed to open any of the model."""
    file: int
    """Place in the manifest's files."""
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """One model, file by file."""

    digest: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorAt, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Layers of a model, as a stage needs them."""

    layers: LayerRange
    edges: bool
    """Embedding, final norm and head too."""

    def needs(self, tensor: str) -> bool:
        """Whether the part can't be opened or run without a tensor."""
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
    """Bytes of a file: `count` times `length`, each `stride` behind the one before. Of a matrix, some columns of its rows."""

    file: int
    """Place in the manifest's files."""
    offset: int
    length: int
    stride: int
    count: int

    @property
    def nbytes(self) -> int:
        return self.length * self.count

    def pieces(self) -> Iterator[ByteRuns]:
        """The same bytes in the same order, at most `PIECE` and `MOST_RUNS` at a time."""
        if self.count == 1:
            for at in range(0, self.length, PIECE):
                yield replace(self, offset=self.offset + at, length=min(PIECE, self.length - at))
            return
        step = max(1, min(MOST_RUNS, PIECE // max(1, self.length)))
        for first in range(0, self.count, step):
            yield replace(self, offset=self.offset + first * self.stride, count=min(step, self.count - first))


def is_sha256(text: str) -> bool:
    """Whether `text` is a SHA-256 in hex, as digests are written here."""
    return _SHA256.fullmatch(text) is not None


def combined_digest(files: Iterable[tuple[str, str]]) -> str:
    """One digest for a model of several files, from (name without folder, hex SHA-256): equal when names and bytes are.

    A single file's own digest stands for it.
    """
    ordered = sorted(files)
    if len(ordered) == 1:
        return ordered[0][1]
    lines = "".join(f"{name}\0{digest}\n" for name, digest in ordered)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def manifest_digest(files: Sequence[FileEntry]) -> str:
    """The digest of a model with these files."""
    return combined_digest((file.name.rpartition("/")[2], file.sha256) for file in files if file.in_digest)


def files_digest(files: Iterable[FileEntry]) -> str:
    """One digest for all files of a model, those that its own digest leaves out too."""
    return combined_digest((file.name.rpartition("/")[2], file.sha256) for file in files)


def pieces_needed(manifest: ModelManifest, part: ModelPart | None) -> list[PieceRun]:
    """The pieces a part of a model needs, in order and without overlap; all where `part` is None.

    What is not weights (heads, tables, files of other kinds) is always needed: a model can't be opened without it.
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
    """Runs (first, stop) in order, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((first, stop))
    return tuple(found)
