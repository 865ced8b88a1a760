"""What this machine can give of its models to others: descriptions, and pieces of files. Nothing beyond the catalog and what it serves is reachable.

A model is named by its digest and a file by its place in the description, so what is asked for never becomes a path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import ModelFileError, ModelNotFound
from paceline.core.manifest import PIECE, FileEntry, ModelManifest, TensorAt, manifest_digest
from paceline.store.catalog import ModelLocation, find_whole
from paceline.store.digests import file_sums
from paceline.store.faults import damaged, unreadable
from paceline.store.hf_folder import CONFIG
from paceline.store.home import Home, identity_key
from paceline.store.selection import BESIDE
from paceline.store.tensor_files import TensorFiles

Examined = Callable[[int, int], None]
"""Told (bytes examined, bytes to examine) while a model is described for the first time. What it raises ends the description."""


@dataclass(frozen=True, slots=True)
class _Described:
    manifest: ModelManifest
    paths: tuple[Path, ...]
    keys: tuple[str, ...]
    """Of the files as they were described."""


class Library:
    """The models of one home, as others may read them. Its methods block; they may be called from any thread.

    Args:
        beside: models that lie elsewhere: files that a person named. More may be added while this lives.
    """

    def __init__(self, home: Home, beside: Sequence[ModelLocation] = ()) -> None:
        self._home: Final = home
        self._beside: Final = beside
        self._described: Final[dict[str, _Described]] = {}

    def describe(self, digest: str, examined: Examined) -> ModelManifest:
        """The files of a model. The first time they are read whole, unless their checksums are remembered.

        Raises:
            ModelNotFound: no whole model with this digest is here.
            ModelFileError: its files can't be read, or are others than those the digest was computed of.
        """
        known = self._described.get(digest)
        if known is None or not _unchanged(known):
            known = self._described[digest] = self._describe(digest, examined)
        return known.manifest

    def read(self, digest: str, file: int, piece: int) -> bytes:
        """One piece of a file that was described.

        Raises:
            ModelNotFound: the model was not described, or has no such piece.
            ModelFileError: the file can't be read, or is not the one that was described any more.
        """
        known = self._described.get(digest)
        if known is None or not 0 <= file < len(known.paths) or not 0 <= piece < known.manifest.files[file].n_pieces:
            raise ModelNotFound("a piece was asked for that no description has", "Ask for a description first")
        path, size = known.paths[file], known.manifest.files[file].piece_size(piece)
        try:
            if identity_key(path, "serve") != known.keys[file]:
                raise damaged(path, "it changed since it was described")
            with path.open("rb", buffering=0) as opened:
                opened.seek(piece * PIECE)
                data = opened.read(size)
        except OSError as error:
            raise unreadable(path, error) from error
        if len(data) != size:
            raise damaged(path, "it ends early")
        return data

    def _describe(self, digest: str, examined: Examined) -> _Described:
        found = find_whole(digest, self._home, self._beside)
        if found is None:
            raise ModelNotFound(f"no model with digest {digest[:12]} is on this machine", "Ask a node whose card lists it")
        location, weights = found
        paths = dict(_names(location, weights, self._home))
        keys = tuple(identity_key(path, "serve") for path in paths.values())
        total, done = sum(path.stat().st_size for path in paths.values()), 0
        files: list[FileEntry] = []
        covered = {*weights.files, location.path / CONFIG}
        for name, path in paths.items():
            before = done
            sums = file_sums(path, self._home, lambda read, before=before: examined(before + read, total))
            done += sums.size
            files.append(FileEntry(name, sums.size, sums.sha256, sums.pieces, path in covered))
        if manifest_digest(files) != digest:
            raise ModelFileError(f"{location.path} changed since its digest was computed", "Pull it again")
        places = {path: number for number, path in enumerate(paths.values())}
        tensors = (TensorAt(name, places[at.path], at.offset, at.nbytes) for name, at in weights.places.items())
        return _Described(ModelManifest(digest, tuple(files), tuple(tensors)), tuple(paths.values()), keys)


def _unchanged(described: _Described) -> bool:
    try:
        return tuple(identity_key(path, "serve") for path in described.paths) == described.keys
    except OSError:
        return False


def _names(location: ModelLocation, weights: TensorFiles, home: Home) -> list[tuple[str, Path]]:
    """The files that make the model, and their names relative to its folder."""
    if location.path.is_dir():
        extras = (location.path / name for name in BESIDE)
        paths = dict.fromkeys((*weights.files, *(path for path in extras if path.is_file())))
        return [(path.name, path) for path in paths]
    folder = home.models / location.name.partition(":")[0]
    return [(path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name, path) for path in weights.files]
