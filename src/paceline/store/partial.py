"""Models of which this machine has, or is fetching, only some layers: `partial/<digest>/` holds sparse files and a note of their pieces.

The files have the model's own names and offsets, so the readers of whole models open them. A tensor in a hole is refused here, never read as
zeros. The files' own tables say which layers are there; claims of other nodes do not count. While layers are fetched, a tensor can be
read as soon as its pieces are on disk and checked. A reader waits for them until the fetch ends, so every fetch must call `Arrivals.end`.

Layers of other nodes' models, which no command here asked for, share a budget of disk space: the least recently used are removed first.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from paceline.core.errors import DownloadError, FetchInProgress, ModelFileError, ModelNotFound, PacelineError
from paceline.core.files import nearest_folder, write_file
from paceline.core.ids import is_sha256
from paceline.core.manifest import PIECE, ModelManifest, ModelPart, PieceRun, pieces_needed
from paceline.core.model import LayerRange, ModelSpec
from paceline.core.weights import EMBEDDING, FINAL_NORM, HEAD, StoredTensor, WeightSource, tensor_shapes
from paceline.store.catalog import PART, find_whole, open_weights
from paceline.store.digests import DigestCache
from paceline.store.faults import damaged
from paceline.store.home import Home, only_one, read_json_object
from paceline.store.selection import gguf_models
from paceline.store.tensor_files import StoredAt, TensorFiles

SHARE: Final = 0.8
"""Share of the disk space that would be free without such layers, which they may take. Raising it: this machine's own work finds a fuller disk."""
IN_USE_S: Final = 600.0
"""Seconds after they were opened for which layers are not removed, because they may still be read. Raising it: new layers are refused while old ones
keep their room."""


def make_way(name: str, digest: str, more: int, home: Home, now: float) -> None:
    """Remove the least recently used layers until `more` bytes fit into the budget.

    Args:
        name: the model that needs the bytes, for the error.
        digest: of that model; its layers here stay.
        now: Unix seconds.

    Raises:
        DownloadError: the bytes don't fit, and nothing is left that may be removed.
    """
    held = {folder: allocated_bytes(folder) for folder in home.partial.glob("*") if is_sha256(folder.name)}
    free = shutil.disk_usage(nearest_folder(home.partial)).free
    budget = SHARE * (free + sum(held.values()))
    for folder in sorted(held, key=last_used):
        if sum(held.values()) + more <= budget:
            return
        if folder.name != digest and now - last_used(folder) > IN_USE_S and _remove(folder):
            del held[folder]
    if sum(held.values()) + more > budget:
        raise DownloadError(
            f"{name} needs {more >> 20} MiB more, and layers for other machines may take {int(budget) >> 20} MiB here, {sum(held.values()) >> 20} of which they have",
            f"Free some space, or remove folders under {home.partial}",
        )


def note_use(folder: Path) -> None:
    """Record that layers in a folder are opened now."""
    try:
        os.utime(folder / PART)
    except OSError:
        return  # the layers keep their earlier time


def last_used(folder: Path) -> float:
    """Return the time when layers in a folder were last opened, in Unix seconds; 0 for a folder that does not exist."""
    try:
        return (folder / PART).stat().st_mtime
    except OSError:
        return folder.stat().st_mtime if folder.exists() else 0.0


def allocated_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder take on the disk; holes take nothing."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _remove(folder: Path) -> bool:
    """Remove a folder, unless a fetch is filling it. Returns whether it is gone."""
    try:
        with only_one(folder.with_name(f"{folder.name}.lock"), folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    except (FetchInProgress, DownloadError):
        return False
    return not folder.exists()


Runs = tuple[tuple[int, int], ...]
"""Ranges [first, stop) of piece numbers of one file, in order and not adjacent."""


@dataclass(frozen=True, slots=True)
class PartNote:
    """The content of `part.json`."""

    name: str
    held: Mapping[str, Runs]
    """Pieces that were checked and may be read, by file name."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Layers of a model on this machine, as a list shows them."""

    name: str
    digest: str
    path: Path
    layers: tuple[LayerRange, ...]
    n_layers: int
    edges: bool
    nbytes: int
    problem: str | None = None
    """Reason why it can't be opened."""


class SomeTensors:
    """A `WeightSource` with some of a model's tensors: those that are here or on their way. `spec` and `digest` are the whole model's."""

    def __init__(self, weights: TensorFiles, digest: str, names: Iterable[str]) -> None:
        self._weights: Final = weights
        self._names: Final = frozenset(names)
        self.digest: Final = digest

    @property
    def spec(self) -> ModelSpec:
        return self._weights.spec

    def names(self) -> Iterable[str]:
        return self._names

    def nbytes(self, name: str) -> int:
        return self._weights.nbytes(name)

    def type_of(self, name: str) -> str:
        return self._weights.type_of(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        """Read one tensor.

        Raises:
            ModelFileError: it is not one of the tensors of this source.
        """
        if name not in self._names:
            raise damaged(self._weights.files[0], f"tensor {name} was never fetched")
        return self._weights.read(name, rows, columns)

    @property
    def path(self) -> Path:
        """The path by which other processes open these weights, as `TensorFiles.path`."""
        return self._weights.path


class PartWeights(SomeTensors):
    """The tensors of a model that are here."""

    def __init__(self, weights: TensorFiles, digest: str, held: Mapping[Path, Runs]) -> None:
        places = weights.places
        here = (name for name in weights.names() if all(_all_held(held.get(at.path, ()), at) for at in places[name].ranges))
        super().__init__(weights, digest, here)

    @property
    def layers(self) -> tuple[LayerRange, ...]:
        """Ranges of the layers that are here with all their tensors."""
        missing = {name for name in tensor_shapes(self.spec) if name not in self._names}
        found: list[LayerRange] = []
        for layer in range(self.spec.n_layers):
            prefix = f"model.layers.{layer}."
            if any(name.startswith(prefix) for name in missing):
                continue
            if found and found[-1].stop == layer:
                found[-1] = LayerRange(found[-1].start, layer + 1)
            else:
                found.append(LayerRange(layer, layer + 1))
        return tuple(found)

    @property
    def edges(self) -> bool:
        return {EMBEDDING, FINAL_NORM, *(() if self.spec.tied_head else (HEAD,))} <= self._names

    def holds(self, part: ModelPart) -> bool:
        return all(name in self._names for name in tensor_shapes(self.spec) if part.needs(name))


def open_part(digest: str, part: ModelPart, home: Home) -> WeightSource:
    """Open the weights of a part of a model: from the whole model if it is here, otherwise from its fetched layers.

    Raises:
        ModelNotFound: this machine does not have the part.
        ModelFileError: the files are damaged.
    """
    whole = find_whole(digest, home)
    if whole is not None:
        return whole[1]
    folder = home.partial / digest
    found = _open(folder, home) if is_sha256(digest) else None
    if found is not None:
        note_use(folder)
    if found is None or not found.holds(part):
        which = f"layers {part.layers.words} of the model with digest {digest[:12]}"
        raise ModelNotFound(f"{which} are not on this machine", "Fetch them from a node that has them")
    return found


def open_heads(digest: str, home: Home) -> tuple[Path, ModelSpec]:
    """Return the path of a model (a folder, or the first GGUF file) as `open_weights` takes it, and its sizes. Only the files' heads need be here.

    Raises:
        ModelNotFound, ModelFileError: as `open_part`.
    """
    spec, folder = open_part(digest, HEADS, home).spec, home.partial / digest
    note = read_note(folder)
    models = gguf_models(note.held) if note is not None else {}
    return (folder / next(iter(models)) if models else folder), spec


def covers(digest: str, part: ModelPart, home: Home) -> bool:
    """Return whether `open_part` can open the part. Damaged files count as absent, so they are fetched again."""
    try:
        open_part(digest, part, home)
    except (ModelNotFound, ModelFileError):
        return False
    return True


def list_parts(home: Home) -> list[HeldPart]:
    """Return the models of which only some layers are here, by name. Damaged ones are listed with their problem; models without a whole layer are not."""
    found: list[HeldPart] = []
    for note_path in sorted(home.partial.glob(f"*/{PART}")):
        folder, note = note_path.parent, read_note(note_path.parent)
        if note is None:
            continue
        nbytes = PIECE * sum(stop - first for runs in note.held.values() for first, stop in runs)
        try:
            weights = _open(folder, home)
        except PacelineError as error:
            found.append(HeldPart(note.name, folder.name, folder, (), 0, edges=False, nbytes=nbytes, problem=error.message))
            continue
        if weights is not None and (weights.layers or weights.edges):
            found.append(HeldPart(note.name, folder.name, folder, weights.layers, weights.spec.n_layers, weights.edges, nbytes))
    return sorted(found, key=lambda part: part.name.lower())


def read_note(folder: Path) -> PartNote | None:
    """Read the note of a folder under `partial/`; None if there is none, or if it is damaged."""
    fields = read_json_object(folder / PART) or {}
    name, held = fields.get("name"), fields.get("held")
    if not isinstance(name, str) or not isinstance(held, dict):
        return None
    return PartNote(name, {str(file): _runs(runs) for file, runs in cast("dict[Any, Any]", held).items()})


def write_note(folder: Path, note: PartNote) -> None:
    """Write the note of a folder under `partial/`, durably.

    Raises:
        OSError: the note can't be written.
    """
    write_file(folder / PART, json.dumps({"name": note.name, "held": note.held}).encode(), durable=True)


def _open(folder: Path, home: Home) -> PartWeights | None:
    note = read_note(folder)
    if note is None or not any(note.held.values()):
        return None
    models = gguf_models(note.held)
    weights = open_weights(folder / next(iter(models)) if models else folder, DigestCache(home))
    return PartWeights(weights, folder.name, {folder / name: runs for name, runs in note.held.items()})


def _all_held(held: Runs, at: StoredAt) -> bool:
    """Return whether all pieces that a tensor lies in are held."""
    first, stop = at.offset // PIECE, -(-(at.offset + at.nbytes) // PIECE)
    return any(run_first <= first and stop <= run_stop for run_first, run_stop in held)


def _runs(value: object) -> Runs:
    """Return the ranges that a note lists in JSON; none if they are damaged."""
    try:
        return tuple((int(first), int(stop)) for first, stop in cast("list[list[int]]", value))
    except (TypeError, ValueError):
        return ()


HEADS: Final = ModelPart(LayerRange(0, 0), edges=False)
"""The part without any layer, embedding or head: its pieces are the files' own heads, which are enough to open them."""


class Arrivals:
    """The pieces of a model that are here. The fetch reports them, and other threads wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._here: set[tuple[str, int]] = set()
        self._manifest: ModelManifest | None = None
        self._over: PacelineError | None = None

    def described(self, manifest: ModelManifest) -> None:
        """Record the description of the model's files, which a source has sent."""
        with self._changed:
            self._manifest = manifest
            self._changed.notify_all()

    def came(self, runs: Iterable[PieceRun]) -> None:
        """Record pieces that were written or found on the disk, and checked."""
        with self._changed:
            assert self._manifest is not None, "a piece is of what was described"
            self._here |= {(self._manifest.files[run.file].name, piece) for run in runs for piece in range(run.first, run.stop)}
            self._changed.notify_all()

    def end(self, error: PacelineError) -> None:
        """Record that the fetch is over. Only the first call has an effect.

        Args:
            error: raised in every thread that waits, now or later, for a piece that is absent.
        """
        with self._changed:
            self._over = self._over or error
            self._changed.notify_all()

    def heads(self) -> ModelManifest:
        """Wait until the heads of all files are here, and return the description.

        Raises:
            PacelineError: the fetch ended before that.
        """
        self._wait(lambda: self._manifest is not None)
        manifest = self._manifest
        assert manifest is not None
        self.wait((manifest.files[run.file].name, piece) for run in pieces_needed(manifest, HEADS) for piece in range(run.first, run.stop))
        return manifest

    def wait(self, pieces: Iterable[tuple[str, int]]) -> None:
        """Wait until these pieces are here, each given by its file's name and its number.

        Raises:
            PacelineError: the fetch ended before that.
        """
        wanted = set(pieces)
        self._wait(lambda: wanted <= self._here)

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: holds() or self._over is not None)
            if not holds():
                assert self._over is not None
                raise self._over


class ArrivingWeights(SomeTensors):
    """The tensors of a part of a model that is being fetched. `read` waits for a tensor that is on its way."""

    def __init__(self, weights: TensorFiles, digest: str, part: ModelPart, folder: Path, arrivals: Arrivals) -> None:
        super().__init__(weights, digest, (name for name in weights.names() if part.needs(name)))
        self._folder, self._arrivals = folder, arrivals

    @property
    def path(self) -> Path:
        """The path by which other processes open these weights, as `TensorFiles.path`. Waits until all tensors are here."""
        for name in self._names:
            self._await(name)
        return super().path

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        """Read one tensor. Waits until all of it is here.

        Raises:
            ModelFileError: it is not one of the tensors that are fetched.
            PacelineError: the fetch ended before the tensor arrived.
        """
        if name in self._names:
            self._await(name)
        return super().read(name, rows, columns)

    def _await(self, name: str) -> None:
        self._arrivals.wait(
            (at.path.relative_to(self._folder).as_posix(), piece)
            for at in self._weights.places[name].ranges
            for piece in range(at.offset // PIECE, -(-(at.offset + at.nbytes) // PIECE))
        )


def open_arriving(part: ModelPart, home: Home, arrivals: Arrivals) -> ArrivingWeights:
    """Open a part that is being fetched. Waits until the heads of its files are here.

    Raises:
        PacelineError: the fetch ended before that.
        ModelFileError, UnsupportedModel: the files can't be opened.
    """
    manifest = arrivals.heads()
    folder = home.partial / manifest.digest
    models = gguf_models(entry.name for entry in manifest.files)
    weights = open_weights(folder / next(iter(models)) if models else folder, DigestCache(home))
    return ArrivingWeights(weights, manifest.digest, part, folder, arrivals)


def path_of(source: WeightSource) -> Path:
    """Return the path by which other processes of this machine open weights. Waits until all tensors are here.

    Raises:
        ModelNotFound: the weights are not in files of this machine.
        PacelineError: the fetch ended before all tensors arrived.
    """
    if not isinstance(source, TensorFiles | SomeTensors):
        raise ModelNotFound("These weights are in no files of this machine", "Pull the model here.")
    return source.path
