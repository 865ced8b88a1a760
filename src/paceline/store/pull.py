"""Bring a model to this machine, from a hub or from a folder or GGUF file that is already here; and delete it again.

A hub's files lie under `models/<org>/<name>/`. The manifest is written last, so a model is listed only once all of its files
are there, checked, and open as a model. A model elsewhere on the disk is opened to verify it, then registered by its path, not copied.
A model is removed from the list before its files are deleted, so a process that ends in between leaves no incomplete model in the list.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.core.errors import ConfigError, DownloadError, ModelFileError, ModelNotFound, UnsupportedModel
from paceline.core.files import nearest_folder, write_file
from paceline.store import hub
from paceline.store.catalog import MANIFEST, PART, LocalModel, ModelLocation, describe, exists, locations, open_model, resolve
from paceline.store.digests import DigestCache, cached_sums
from paceline.store.encoder_files import is_encoder, open_encoder_at
from paceline.store.gguf_file import check_beginning
from paceline.store.hf_folder import CONFIG, ENCODERS, load_object, spec_from_config
from paceline.store.home import Home, only_one, read_json_object
from paceline.store.hub import fetch, part_of, verify
from paceline.store.selection import HubRef, gguf_models, is_path, parse_ref
from paceline.store.tokenizer_files import cached_tokenizer

if TYPE_CHECKING:
    import httpx


HEAD_BYTES: Final = 8 << 20
"""Bytes of a GGUF file after which its head is checked: most heads are shorter. A longer one is checked again at twice as many. Raising it: a model
that can't run is refused later."""

Progress = Callable[[int, int], None]
"""Callback with (bytes here, bytes in all) of the model's files together. Bytes that an earlier pull left are included."""

Mirror = Callable[[hub.Listed], LocalModel | None]
"""Function that fetches exactly the files that a hub lists from another place, such as a node; None if that place does not have them."""


def pull(
    ref: str,
    home: Home,
    progress: Progress,
    *,
    endpoint: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
    mirror: Mirror | None = None,
) -> LocalModel:
    """Make a model available by name.

    Args:
        ref: `org/name`, optionally with `@revision` and `:file-or-quantisation`; a folder; a GGUF file; or the name of a model here.
        progress: called in the caller's thread after every piece.
        endpoint: the hub's address; default: `HF_ENDPOINT`, or the hub of huggingface_hub.
        mirror: tried first for the files that the hub lists.

    Raises:
        NotAtHub, HubSilent: the hub does not list the model.
        ModelNotFound: the file or path does not exist.
        DownloadError: the download could not be finished. Fetched bytes are kept, and the next pull continues from there.
        FetchInProgress: the same model is being pulled already.
        ModelFileError, UnsupportedModel: the model can't run. If its configuration or head shows it, this comes before the weights are fetched.
        ConfigError: the files can't be kept under `home`.
    """
    hub_ref = None if is_path(ref) else parse_ref(ref)
    if hub_ref is None or _is_local(ref, hub_ref, home):
        try:
            location = resolve(ref, home)
        except ModelNotFound as error:
            if is_path(ref):
                raise
            hint = "A name at the hub has two parts: org/name, or org/name:Q4_K_M for one of its files"
            raise ModelNotFound(f"{ref[:200]!r} is no name at the hub, and no model of this machine", hint) from error
        return _register(location, home)
    with _client() as client:
        listed = hub.list_model(client, hub.endpoint() if endpoint is None else endpoint.rstrip("/"), hub_ref)
        mirrored = None if mirror is None else mirror(listed)
        if mirrored is not None:
            return mirrored
        with folder_lock(hub_ref.folder, home):
            return _pull_listed(client, listed, home, progress, sleep)


def list_at_hub(ref: HubRef) -> hub.Listed:
    """Return the files of a model as the hub lists them. Raises as `hub.list_model`."""
    with _client() as client:
        return hub.list_model(client, hub.endpoint(), ref)


def _client() -> httpx.Client:
    import httpx

    access = hub.token()
    headers = {} if access is None else {"Authorization": f"Bearer {access}"}
    return httpx.Client(headers=headers, timeout=httpx.Timeout(30.0, connect=10.0), follow_redirects=True)


def _is_local(ref: str, hub_ref: HubRef, home: Home) -> bool:
    """Return whether `ref` is a relative path, which looks like a hub id. A model that was pulled under that name takes precedence."""
    return exists(Path(ref)) and not (home.models / hub_ref.folder).exists()


def _register(location: ModelLocation, home: Home) -> LocalModel:
    """Verify a model that is already on this machine, and list it under the name of its file or folder.

    Raises:
        ModelFileError, UnsupportedModel: it can't be run.
        ConfigError: another model has that name, or it can't be a model's name.
    """
    _check_opens(location.path, home)
    known = locations(home)
    if all(other.path != location.path for other in known):
        taken = next((other for other in known if other.name.lower() == location.name.lower()), None)
        if taken is not None:
            raise ConfigError(f"the name {location.name!r} is taken by {taken.path}", "Rename the file or folder, or name it by its path")
        if not hub.is_safe(location.name) or location.name.startswith("."):
            raise ConfigError(f"{location.name!r} can't be a model's name", "Rename the file or folder")
        _write(home.models / location.name / MANIFEST, {"path": str(location.path)})
    return describe(location, home)


def _pull_listed(client: httpx.Client, listed: hub.Listed, home: Home, progress: Progress, sleep: Callable[[float], None]) -> LocalModel:
    ref, files = listed.ref, listed.files
    first = next(iter(gguf_models(file.name for file in files)), None)
    folder = home.models / ref.folder
    total, done = sum(file.size for file in files), 0
    _check_space(folder, files)
    digests = DigestCache(home)
    arrived: list[tuple[hub.HubFile, Path]] = []
    for file in files:
        before = done

        target = folder / file.name
        watch = _HeadWatch(part_of(file, target), file.size) if file.name == first else None

        def advance(on_disk: int, before: int = before, watch: _HeadWatch | None = watch) -> None:
            if watch is not None:
                watch.see(on_disk)
            progress(before + on_disk, total)

        if not _is_here(file, target, digests):
            part = fetch(client, file, target, advance, sleep)
            if file.name == CONFIG and (config := load_object(part)).text("model_type") not in ENCODERS:
                spec_from_config(config)
            arrived.append((file, part))
        done += file.size
        progress(done, total)
    # All renames come at the end, so that a pull of a newer revision that breaks off leaves the older model complete. Between the first
    # rename and the new manifest, the files are a mix of both. If this process ends there, no list may show them.
    unlist(folder, [file.name for file, _ in arrived])
    for file, part in arrived:
        try:
            part.replace(folder / file.name)
        except OSError as error:
            raise DownloadError(f"{part} can't be renamed: {error.strerror}", "Check who may write there, and try again") from error
        if file.checksum.kind == "sha256":
            digests.remember(folder / file.name, file.checksum.hex)
    return list_fetched(folder, *entries_of(listed), home)


def list_fetched(folder: Path, about: dict[str, object], files: dict[str, dict[str, object]], home: Home) -> LocalModel:
    """Open a model that was fetched into a folder, and list it.

    Args:
        about: fields of the manifest for all files, such as `repo` and `revision`.
        files: fields of the manifest for each file, by its name.

    Raises:
        ModelFileError, UnsupportedModel: it can't be run.
        ConfigError: the manifest can't be written.
    """
    first = next(iter(gguf_models(files)), None)
    path = folder if first is None else folder / first
    _check_opens(path, home)
    write_manifest(folder, about, files)
    return describe(next(location for location in locations(home) if location.path == path), home)


def _check_opens(path: Path, home: Home) -> None:
    """Open a model (a text model or an encoder) to verify that it runs.

    Raises:
        ModelFileError, UnsupportedModel: it can't be run.
    """
    if is_encoder(path):
        open_encoder_at(path, home)
    else:
        open_model(str(path), home)


class _HeadWatch:
    """Checks the beginning of a GGUF file while the rest arrives, and ends the transfer of a model that can't run."""

    def __init__(self, part: Path, size: int) -> None:
        self._part, self._size = part, size
        self._next: int | None = min(size, HEAD_BYTES)

    def see(self, on_disk: int) -> None:
        """Check the head, if enough bytes are on the disk.

        Raises:
            UnsupportedModel: the model can't run. The fetched bytes are removed.
        """
        if self._next is None or on_disk < self._next:
            return
        try:
            done = check_beginning(self._part, self._size)
        except UnsupportedModel:
            self._part.unlink()
            raise
        except ModelFileError:
            done = True  # bytes were changed on the way: the checksum will show it
        self._next = None if done or on_disk >= self._size else min(self._size, 2 * on_disk)


def _is_here(file: hub.HubFile, target: Path, digests: DigestCache) -> bool:
    """Return whether a file was fetched before and has the right checksum. A SHA-256 that was computed for this is remembered."""
    if not target.is_file():
        return False
    if digests.known(target) == file.checksum.hex:
        return True
    try:
        whole = verify(target, file)
    except OSError as error:
        raise DownloadError(f"{target} can't be read: {error.strerror}", "Check who may read it") from error
    if whole and file.checksum.kind == "sha256":
        digests.remember(target, file.checksum.hex)
    return whole


def _check_space(folder: Path, files: Sequence[hub.HubFile]) -> None:
    """Refuse a pull that the disk has no room for. Bytes that are already here count as fetched."""
    missing = 0
    for file in files:
        target = folder / file.name
        parts = [target, part_of(file, target)]
        missing += max(0, file.size - max(part.stat().st_size if part.is_file() else 0 for part in parts))
    check_space(folder.name, folder, missing)


def check_space(name: str, folder: Path, missing: int) -> None:
    """Refuse a fetch that the disk has no room for.

    Args:
        name: the model, as the error names it.

    Raises:
        DownloadError: fewer than `missing` bytes are free where `folder` is or will be.
    """
    existing = nearest_folder(folder)
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise DownloadError(
            f"{name} needs {missing >> 20} MiB more and {existing} has {free >> 20} MiB free",
            "Free some space, or set PACELINE_HOME to a larger disk",
        )


def folder_lock(folder: str, home: Home) -> contextlib.AbstractContextManager[None]:
    """Return a context in which no other process changes this folder under `models/`. Raises FetchInProgress if another one is changing it."""
    return only_one(home.partial / f"{folder.replace('/', '--')}.lock", folder)


def write_manifest(folder: Path, about: dict[str, object], files: dict[str, dict[str, object]]) -> None:
    """Add fetched files to a folder's manifest. Entries of other files stay, because a folder may hold several GGUF models of one repository.

    Raises:
        ConfigError: the manifest can't be written.
    """
    path = folder / MANIFEST
    before = read_json_object(path) or {}
    known = before.get("files")
    kept = known if isinstance(known, dict) else {}
    _write(path, {**before, **about, "files": {**kept, **files}})


def entries_of(listed: hub.Listed) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Return a manifest's entries for files that the hub lists: the fields for all of them, and those of each file by its name."""
    files: dict[str, dict[str, object]] = {file.name: {"size": file.size, file.checksum.kind: file.checksum.hex} for file in listed.files}
    return {"repo": listed.ref.repo, "revision": listed.commit}, files


def unlist(folder: Path, names: list[str]) -> None:
    """Remove files from a folder's manifest, because they are about to change.

    Raises:
        ConfigError: the manifest can't be written.
    """
    entry = read_json_object(folder / MANIFEST) or {}
    known = entry.get("files")
    if isinstance(known, dict) and not known.keys().isdisjoint(names):
        _write(folder / MANIFEST, {**entry, "files": {name: about for name, about in known.items() if name not in names}})


def _write(path: Path, entry: dict[str, object]) -> None:
    try:
        write_file(path, json.dumps(entry, indent=1).encode())
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", "Check PACELINE_HOME and the space on its disk") from error


@dataclass(frozen=True, slots=True)
class Removed:
    location: ModelLocation
    freed_bytes: int
    kept: bool
    """True if the files lie outside of the home: the model was removed from the list, and its files stay."""


def remove_model(ref: str, home: Home) -> Removed:
    """Delete a pulled model.

    Raises:
        ModelNotFound: this machine has no model of that name.
        ConfigError: the model was not pulled into this home or registered in it.
        FetchInProgress: it is being fetched.
    """
    try:
        location = resolve(ref, home)
    except ModelNotFound:
        if (part := _removed_in_part(ref, home)) is None:
            raise
        return part
    folder = home.models / location.name.partition(":")[0]
    entry = read_json_object(folder / MANIFEST)
    named = entry is not None and (entry.get("path") == str(location.path) or location.path.is_relative_to(folder))
    if entry is None or not named or not folder.resolve().is_relative_to(home.models.resolve()):
        raise ConfigError(
            f"{location.name} was not pulled: it lies at {location.path}", "Delete it there, or uninstall the package that brought it."
        )
    digest = describe(location, home).digest
    with folder_lock(location.name.partition(":")[0], home):
        kept = "path" in entry
        files = [location.path] if kept else _files_of(location, folder, entry)
        caches = [place for path in files if path.is_file() for place in (*cached_sums(path, home), cached_tokenizer(path, home))]
        freed = sum(map(_unlinked, caches))
        if kept:
            _unlinked(folder / MANIFEST)
        else:
            unlist(folder, [path.relative_to(folder).as_posix() for path in files])
            freed += sum(map(_unlinked, files))
            if not (read_json_object(folder / MANIFEST) or {}).get("files"):
                _unlinked(folder / MANIFEST)
        for place in (*(path.parent for path in files if not kept), folder, *folder.parents):
            if place != home.models and place.is_relative_to(home.models):
                with suppress(OSError):  # it is not empty
                    place.rmdir()
    if digest is not None and (part := home.partial / digest).is_dir():
        freed += _freed_with(part)
    return Removed(location, freed, kept)


def _removed_in_part(ref: str, home: Home) -> Removed | None:
    """Delete the incomplete models of that name: layers of other machines' models, and the files of a pull that broke off.

    Returns None if nothing here has that name.
    """
    found: Removed | None = None
    for note in sorted(home.partial.glob(f"*/{PART}")):
        folder = note.parent
        if str((read_json_object(note) or {}).get("name", "")).lower() != ref.lower():
            continue
        with only_one(folder.with_name(f"{folder.name}.lock"), ref):
            freed = _freed_with(folder)
        found = Removed(ModelLocation(ref, folder), freed + (found.freed_bytes if found else 0), kept=False)
    hub_ref = None if is_path(ref) else parse_ref(ref)
    if hub_ref is None or hub_ref.selector:
        return found
    named = (each for each in home.models.glob("*/*") if each.relative_to(home.models).as_posix().lower() == hub_ref.folder.lower())
    folder = next(named, None)
    if folder is None or not folder.resolve().is_relative_to(home.models.resolve()):
        return found
    if folder.is_dir() and not any(folder.rglob(MANIFEST)):
        with folder_lock(folder.relative_to(home.models).as_posix(), home):
            freed = _freed_with(folder)
        with suppress(OSError):  # it is not empty
            folder.parent.rmdir()
        return Removed(ModelLocation(ref, folder), freed + (found.freed_bytes if found else 0), kept=False)
    return found


def _freed_with(folder: Path) -> int:
    """Delete a folder, and return the bytes of the disk that its files took."""
    n_bytes = sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))
    shutil.rmtree(folder, ignore_errors=True)
    return n_bytes


def _files_of(location: ModelLocation, folder: Path, entry: dict[str, object]) -> list[Path]:
    """Return a model's own files among those that were pulled into its folder; all of them if it is the only model there."""
    listed = entry.get("files")
    whole = [str(name) for name in listed] if isinstance(listed, dict) else []
    models = gguf_models(whole)
    parts = {name for names in models.values() for name in names}
    rest = [name for name in whole if name not in parts]
    own = models[location.path.relative_to(folder).as_posix()] if location.path != folder else rest
    others = len(models) > 1 or (bool(models) and any(name.endswith(".safetensors") for name in rest))
    return [folder / name for name in (own if others else whole)]


def _unlinked(path: Path) -> int:
    """Delete a file, and return the bytes of the disk that it took; 0 if it can't be deleted."""
    try:
        n_bytes = path.lstat().st_blocks * 512
        path.unlink()
    except OSError:
        return 0
    return n_bytes
