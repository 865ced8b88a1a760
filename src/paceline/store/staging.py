"""A model that is being fetched from another node: files of full size under `partial/<digest>/`, filled piece by piece.

Bytes on the disk are never trusted. A piece counts as fetched if its bytes have the hash of the description, so a fetch that was
killed at any byte continues with everything that arrived. `seal` notes that layers are there; `finish` checks whole files and lists the model as
pulled. One process at a time may do this for one model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from paceline.core.errors import ConfigError, WrongBytes
from paceline.core.manifest import PIECE, FileEntry, ModelManifest, PieceRun, joined, manifest_digest
from paceline.store import hub
from paceline.store.catalog import MANIFEST, LocalModel
from paceline.store.digests import FileSums, remember_sums
from paceline.store.faults import can_not_write
from paceline.store.home import Home, only_one, read_json_object
from paceline.store.hub import verify
from paceline.store.partial import PartNote, make_way, read_note, write_note
from paceline.store.pull import check_space, entries_of, folder_lock, list_fetched, unlist
from paceline.store.selection import BESIDE, gguf_models

_LONGEST_NAME: Final = 200
_ZEROS: Final = bytes(PIECE)
_ZEROS_SHA256: Final = hashlib.sha256(_ZEROS).digest()


@contextlib.contextmanager
def staged(
    name: str,
    manifest: ModelManifest,
    home: Home,
    listed: hub.Listed | None = None,
    origin: Mapping[str, str] | None = None,
    *,
    for_others: bool = False,
) -> Generator[Staging]:
    """Start the fetch of a model, or continue it, for the duration of the block.

    Args:
        name: the model's name here.
        manifest: the description that a node sent. It is checked first.
        listed: the model's files as the hub lists them; None: only the description is known.
        origin: fields for each file in the model's manifest that say where it came from.
        for_others: another node asked for layers to run here, so they count against the budget of such layers.

    Raises:
        FetchInProgress: another process of this machine is fetching it.
        WrongBytes: the description does not fit its digest or the hub's list, has files of several models or of none, or names a file that
            is here with other bytes.
        ConfigError: the name can't be a model's name here, or another model has it.
        DownloadError: the disk can't be written.
    """
    _check_files(manifest)
    _check_name(name, home)
    if listed is None:
        _check_here(manifest, _model_folder(name, home), None)
    else:
        _check_listed(manifest, listed)
    folder = home.partial / manifest.digest
    with only_one(home.partial / f"{manifest.digest}.lock", name):
        staging = Staging(name, manifest, home, folder, listed, origin or {}, for_others=for_others)
        try:
            yield staging
        except OSError as error:
            raise can_not_write(name, folder, error) from error
        finally:
            staging.close()


class Staging:
    """The files of one model that is being fetched. `staged` creates it; only one thread may use it at a time."""

    def __init__(
        self,
        name: str,
        manifest: ModelManifest,
        home: Home,
        folder: Path,
        listed: hub.Listed | None,
        origin: Mapping[str, str],
        *,
        for_others: bool = False,
    ) -> None:
        self._listed: Final = listed
        self._origin: Final = origin
        self._for_others: Final = for_others
        self._name: Final = name
        self._manifest: Final = manifest
        self._home: Final = home
        self._folder: Final = folder
        self._open: Final[dict[int, BinaryIO]] = {}

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def missing(self, needed: Sequence[PieceRun], examined: Callable[[int], None]) -> list[PieceRun]:
        """Return the pieces that are not here yet. All needed pieces are read from the disk and checked, so this may take long.

        Args:
            needed: as `pieces_needed` returns them.
            examined: called with the bytes of right pieces found so far.

        Raises:
            DownloadError: the disk, or the budget of layers for other nodes, is too small for the rest.
        """
        lacking: list[PieceRun] = []
        here = 0
        # This comes before files of those sizes are made and their holes read, because a description may name any size.
        self._check_space(needed, on_disk=sum(_allocated(self._folder / entry.name) for entry in self._manifest.files))
        for run in needed:
            entry, found = self._manifest.files[run.file], self._handle(run.file)
            for piece in range(run.first, run.stop):
                found.seek(piece * PIECE)
                data = found.read(entry.piece_size(piece))
                if _is_piece(data, entry, piece):
                    here += len(data)
                    examined(here)
                elif lacking and lacking[-1].file == run.file and lacking[-1].stop == piece:
                    lacking[-1] = PieceRun(run.file, lacking[-1].first, piece + 1)
                else:
                    lacking.append(PieceRun(run.file, piece, piece + 1))
        self._check_space(lacking, on_disk=0)
        if self._for_others:
            make_way(self._name, self._manifest.digest, self._nbytes(lacking), self._home, time.time())
        self._unseal(lacking)
        return lacking

    def write(self, file: int, piece: int, data: bytes) -> None:
        """Write a piece that arrived to its file.

        Raises:
            WrongBytes: its bytes are not those of the description; nothing is written.
            OSError: the disk can't be written.
        """
        entry = self._manifest.files[file]
        if not _is_piece(data, entry, piece):
            raise WrongBytes(f"piece {piece} of {entry.name} has another checksum than was described")
        out = self._handle(file)
        out.seek(piece * PIECE)
        left = memoryview(data)
        while left:
            left = left[out.write(left) :]

    def seal(self, needed: Sequence[PieceRun]) -> None:
        """Flush the files, and note that these pieces are here and checked, so that their tensors may be opened."""
        self._flush()
        note = read_note(self._folder)
        held = {} if note is None else note.held
        entries = self._manifest.files
        gained = {entry.name: [(r.first, r.stop) for r in needed if r.file == at] for at, entry in enumerate(entries)}
        write_note(self._folder, PartNote(self._name, {name: joined([*held.get(name, ()), *runs]) for name, runs in gained.items()}))

    def finish(self, checked: Callable[[], None]) -> LocalModel:
        """Check the complete files, and list the model like a pulled one.

        Args:
            checked: called from time to time while files are read.

        Raises:
            WrongBytes: a file has another SHA-256 than the description says, although each piece is right: the description is false. The file is
                removed. Or a file is not the one that the hub lists.
            ModelFileError, UnsupportedModel: the files are not a model that runs here.
        """
        self._flush()
        self.close()
        for entry in self._manifest.files:
            path = self._folder / entry.name
            digest = _sha256(path, checked)
            if digest != entry.sha256:
                path.unlink()
                raise WrongBytes(f"{entry.name} has the SHA-256 {digest[:12]}..., {entry.sha256[:12]}... was promised")
        for file in () if self._listed is None else self._listed.files:
            # For other files the start has compared the description's SHA-256 with the hub's, and the loop above the bytes with it.
            if file.checksum.kind != "sha256" and not verify(self._folder / file.name, file):
                raise WrongBytes(f"{file.name} is not the file that the hub lists")
        with folder_lock(self._name.partition(":")[0], self._home):
            return self._install()

    def _check_space(self, runs: Sequence[PieceRun], *, on_disk: int) -> None:
        check_space(self._name, self._folder, self._nbytes(runs) - on_disk)

    def _nbytes(self, runs: Sequence[PieceRun]) -> int:
        files = self._manifest.files
        return sum(PIECE * len(run) - (PIECE - files[run.file].piece_size(run.stop - 1)) for run in runs if len(run))

    def _install(self) -> LocalModel:
        """Move the checked files into the model's folder, and list the model."""
        folder = _model_folder(self._name, self._home)
        entries = self._manifest.files
        if self._listed is None:
            _check_here(self._manifest, folder, self._folder)
        unlist(folder, [entry.name for entry in entries])
        for entry in entries:
            _place(self._folder / entry.name, folder / entry.name)
            # The sums are kept so that this node can serve the file to another one without reading it once more.
            remember_sums(folder / entry.name, FileSums(entry.size, entry.sha256, entry.pieces), self._home)
        about, files = ({}, {}) if self._listed is None else entries_of(self._listed)
        files = files or {entry.name: {"size": entry.size, "sha256": entry.sha256} for entry in entries}
        said = {file: {**entry, **self._origin} for file, entry in files.items()}
        model = list_fetched(folder, about, said, self._home)
        shutil.rmtree(self._folder, ignore_errors=True)
        return model

    def _handle(self, file: int) -> BinaryIO:
        """Return a file of the model, opened and extended to its full size."""
        opened = self._open.get(file)
        if opened is None:
            entry = self._manifest.files[file]
            path = self._folder / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            opened = self._open[file] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b", buffering=0)
            if path.stat().st_size != entry.size:
                opened.truncate(entry.size)
        return opened

    def _flush(self) -> None:
        for file in range(len(self._manifest.files)):
            os.fsync(self._handle(file).fileno())

    def _unseal(self, lacking: Sequence[PieceRun]) -> None:
        """Remove pieces that will be written again from the note, so that their tensors are not opened in the meantime."""
        note = read_note(self._folder)
        if note is None:
            return
        gone = {(self._manifest.files[run.file].name, piece) for run in lacking for piece in _pieces(run)}
        kept = {
            name: joined((p, p + 1) for first, stop in runs for p in range(first, stop) if (name, p) not in gone)
            for name, runs in note.held.items()
        }
        if kept != note.held:
            write_note(self._folder, PartNote(note.name, kept))


def _pieces(run: PieceRun) -> range:
    return range(run.first, run.stop)


def _allocated(path: Path) -> int:
    """Return the bytes of the disk that a file takes (holes take none); 0 if it does not exist."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _sha256(path: Path, checked: Callable[[], None]) -> str:
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while data := file.read(PIECE):
            whole.update(data)
            checked()
    return whole.hexdigest()


def _is_piece(data: bytes, entry: FileEntry, piece: int) -> bool:
    if len(data) != entry.piece_size(piece):
        return False
    # Comparing with zeros is much faster than hashing, and most missing pieces are holes.
    digest = _ZEROS_SHA256 if data == _ZEROS else hashlib.sha256(data).digest()
    return digest == entry.piece_sha256(piece)


def _check_files(manifest: ModelManifest) -> None:
    """Raise WrongBytes unless a description has only the files of one model, under safe names, and its digest is theirs."""
    names = [entry.name for entry in manifest.files]
    for entry in manifest.files:
        weights = entry.name.lower().endswith((".gguf", ".safetensors"))
        if not hub.is_safe(entry.name) or len(entry.name) > _LONGEST_NAME or not (weights or entry.name in BESIDE):
            raise WrongBytes(f"the description has a file called {entry.name[:200]!r}, which is not one of a model's")
        if weights and not entry.in_digest:
            raise WrongBytes(f"the description leaves {entry.name} out of the digest")
    if len({name.lower() for name in names}) != len(names):
        raise WrongBytes("the description has two files of one name")
    models = gguf_models(names)
    if models and (len(models) > 1 or sum(map(len, models.values())) != len(names)):
        raise WrongBytes("the description has files of several models")
    if manifest_digest(manifest.files) != manifest.digest:
        raise WrongBytes(f"the files described are not those of the model with digest {manifest.digest[:12]}")


def _check_listed(manifest: ModelManifest, listed: hub.Listed) -> None:
    """Raise WrongBytes unless a description has exactly the files that the hub lists, with their sizes and SHA-256."""
    described = {entry.name: entry for entry in manifest.files}
    if described.keys() != {file.name for file in listed.files}:
        raise WrongBytes(f"the files described are not those that the hub lists for {listed.ref.repo}")
    for file in listed.files:
        entry = described[file.name]
        if entry.size != file.size or (file.checksum.kind == "sha256" and entry.sha256 != file.checksum.hex):
            raise WrongBytes(f"{file.name} is described with another size or SHA-256 than the hub lists")


def _check_here(manifest: ModelManifest, folder: Path, staged_in: Path | None) -> None:
    """Raise WrongBytes if a file that is listed here would be replaced by one with other bytes.

    Args:
        staged_in: the folder of the fetched files; None before they are fetched.
    """
    files = (read_json_object(folder / MANIFEST) or {}).get("files")
    known = cast("dict[str, Any]", files) if isinstance(files, dict) else {}
    for entry in manifest.files:
        said = known.get(entry.name)
        here = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        sha256, sha1 = here.get("sha256"), here.get("sha1")
        other = sha256 is not None and sha256 != entry.sha256
        if sha1 is not None and staged_in is not None:
            other = not verify(staged_in / entry.name, hub.HubFile(entry.name, entry.size, hub.Checksum("sha1", str(sha1)), ""))
        if other:
            raise WrongBytes(f"{entry.name} is here already, with other bytes than are described")


def _check_name(name: str, home: Home) -> None:
    folder = name.partition(":")[0]
    if not hub.is_safe(folder) or folder.startswith(".") or len(folder) > _LONGEST_NAME:
        raise ConfigError(f"{name[:200]!r} can't be a model's name", "Pull it by its digest from a node that calls it something else")
    elsewhere = (read_json_object(_model_folder(name, home) / MANIFEST) or {}).get("path")
    if elsewhere is not None:
        raise ConfigError(f"the name {folder!r} is taken by {elsewhere}", "Remove that model from the list first")


def _model_folder(name: str, home: Home) -> Path:
    return home.models / name.partition(":")[0]


def _place(staged_file: Path, target: Path) -> None:
    """Put a checked file in place. It also stays in staging until the model is listed, so it is never lost."""
    target.parent.mkdir(parents=True, exist_ok=True)
    linked = target.with_name(f".{target.name}.new")
    linked.unlink(missing_ok=True)
    try:
        linked.hardlink_to(staged_file)
    except OSError:  # a file system without hard links
        staged_file.replace(target)
    else:
        linked.replace(target)
