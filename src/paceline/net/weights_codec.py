"""A model's description as parts of weights.proto's DescribeWeightsResponse, and back.

What comes is held against its own numbers before anything is made of it: sizes, counts and places that don't fit raise `WrongBytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from paceline.core.errors import WrongBytes
from paceline.core.manifest import PIECE, SHA256_BYTES, FileEntry, ModelManifest, TensorAt
from paceline.core.text import printable
from paceline.net.mapper import Codec, Columns, Mapped, refuse_with
from paceline.net.wire import weights_pb2 as wire

MAX_FILES: Final = 4096
MAX_TENSORS: Final = 1 << 20
MAX_PIECES: Final = 1 << 22
"""4 TiB of weights. Raising these lets a node that talks nonsense take more memory of who listens: about 100 bytes a tensor, 32 a piece."""
_MAX_NAME: Final = 512
_TENSORS_A_PART: Final = 4096
_PIECES_A_PART: Final = 16384

_REFUSE: Final = refuse_with(WrongBytes)
_FILE: Final = Codec(
    FileEntry, wire.WeightsFile, _REFUSE, {"size": "size_bytes", "sha256": Mapped(write=bytes.fromhex, read=bytes.hex)}, given=["pieces"]
)
_TENSORS: Final = Columns(
    TensorAt, wire.TensorIndex, _REFUSE, name=Mapped("names"), file=Mapped("files"), offset=Mapped("offsets"), nbytes=Mapped("sizes")
)


def parts(manifest: ModelManifest) -> Iterator[wire.DescribeWeightsResponse]:
    """A description, in messages of at most about 0.5 MiB."""
    for first in range(0, len(manifest.files), _TENSORS_A_PART):
        yield wire.DescribeWeightsResponse(files=_FILE.write_all(manifest.files[first : first + _TENSORS_A_PART]))
    for number, file in enumerate(manifest.files):
        for first in range(0, file.n_pieces, _PIECES_A_PART):
            sums = file.pieces[first * SHA256_BYTES : (first + _PIECES_A_PART) * SHA256_BYTES]
            yield wire.DescribeWeightsResponse(pieces=[wire.PieceDigests(file=number, sha256=sums)])
    for first in range(0, len(manifest.tensors), _TENSORS_A_PART):
        yield wire.DescribeWeightsResponse(tensors=_TENSORS.write(manifest.tensors[first : first + _TENSORS_A_PART]))
    yield wire.DescribeWeightsResponse(complete=True)


class WeightsDescription:
    """A description as it comes in."""

    def __init__(self, digest: str) -> None:
        self._digest: Final = digest
        self._files: Final[list[wire.WeightsFile]] = []
        self._pieces: Final[dict[int, bytearray]] = {}
        self._n_pieces = 0
        self._tensors: Final[list[TensorAt]] = []

    def add(self, part: wire.DescribeWeightsResponse) -> None:
        """Append a part.

        Raises:
            WrongBytes: there is more of it than any model has, or its columns differ in length.
        """
        self._files.extend(part.files)
        for sums in part.pieces:
            self._pieces.setdefault(sums.file, bytearray()).extend(sums.sha256)
            self._n_pieces += max(1, len(sums.sha256) // SHA256_BYTES)
        tensors = _TENSORS.read(part.tensors)
        if any(len(named.name) > _MAX_NAME for named in (*tensors, *part.files)):
            raise WrongBytes("the description has a name longer than any")
        self._tensors.extend(tensors)
        if len(self._files) > MAX_FILES or len(self._tensors) > MAX_TENSORS or self._n_pieces > MAX_PIECES:
            raise WrongBytes("the description has more files, tensors or pieces than any model")

    def manifest(self) -> ModelManifest:
        """What was described.

        Raises:
            WrongBytes: the parts contradict one another.
        """
        files: list[FileEntry] = []
        for number, file in enumerate(self._files):
            entry = _FILE.read(file, pieces=bytes(self._pieces.get(number, b"")))
            if (
                len(file.sha256) != SHA256_BYTES
                or file.size_bytes > PIECE * MAX_PIECES
                or len(entry.pieces) != SHA256_BYTES * entry.n_pieces
            ):
                raise WrongBytes(f"the description of {printable(file.name)} has checksums that don't fit its {file.size_bytes} bytes")
            files.append(entry)
        for at in self._tensors:
            if at.file >= len(files) or at.offset + at.nbytes > files[at.file].size:
                raise WrongBytes(f"the description has tensor {printable(at.name)} outside of its file")
        if not files:
            raise WrongBytes("the description has no files")
        return ModelManifest(self._digest, tuple(files), tuple(self._tensors))
