"""Models leave this machine's disk: their files under the home, and all that caches keep of them. What lies outside the home stays.

Law: a model leaves the list before its files go, so that an end in between leaves no half of one in it.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.store.catalog import MANIFEST, ModelLocation, describe, resolve
from paceline.store.digests import cached_sums
from paceline.store.gguf_tokenizer import cached_tokenizer
from paceline.store.home import Home, read_json_object
from paceline.store.pull import folder_lock, unlist
from paceline.store.selection import gguf_models


@dataclass(frozen=True, slots=True)
class Removed:
    """What is gone."""

    location: ModelLocation
    freed_bytes: int
    kept: bool
    """The files lie outside the home: the model was taken from the list, and they stay."""


def remove_model(ref: str, home: Home) -> Removed:
    """Delete a pulled model.

    Raises:
        ModelNotFound: there is none of that name.
        ConfigError: it is no model of this home's list.
        FetchInProgress: it is being fetched.
    """
    location = resolve(ref, home)
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
                with suppress(OSError):  # others lie there
                    place.rmdir()
    if digest is not None and (part := home.partial / digest).is_dir():
        freed += sum(file.lstat().st_blocks * 512 for file in part.rglob("*"))
        shutil.rmtree(part, ignore_errors=True)
    return Removed(location, freed, kept)


def _files_of(location: ModelLocation, folder: Path, entry: dict[str, object]) -> list[Path]:
    """Its own, of those that were pulled into the folder; with the last model, all."""
    listed = entry.get("files")
    whole = [str(name) for name in listed] if isinstance(listed, dict) else []
    models = gguf_models(whole)
    parts = {name for names in models.values() for name in names}
    rest = [name for name in whole if name not in parts]
    own = models[location.path.relative_to(folder).as_posix()] if location.path != folder else rest
    others = len(models) > 1 or (bool(models) and any(name.endswith(".safetensors") for name in rest))
    return [folder / name for name in (own if others else whole)]


def _unlinked(path: Path) -> int:
    """Bytes that came free."""
    try:
        n_bytes = path.lstat().st_blocks * 512
        path.unlink()
    except OSError:
        return 0
    return n_bytes
