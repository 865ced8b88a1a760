"""How much of the disk the layers of other nodes' models may take: the part of `partial/` that no command here asked for has a budget, oldest out first."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from paceline.core.errors import DownloadError, FetchInProgress
from paceline.core.manifest import is_sha256
from paceline.store.catalog import PART
from paceline.store.home import Home
from paceline.store.locks import only_one

SHARE: Final = 0.8
"""Of what would be free without them. Raising it: this machine's own work finds a fuller disk."""
IN_USE_S: Final = 600.0
"""Layers opened within this time stay: they may be being read. Raising it: new layers are refused while old ones keep their room."""


def make_way(name: str, digest: str, more: int, home: Home, now: float) -> None:
    """Remove layers that were used longest ago, until so many bytes more fit the budget.

    Args:
        name: of the model that comes, for errors.
        digest: of it; what is here of it stays.
        now: Unix seconds.

    Raises:
        DownloadError: they don't fit, with nothing left that could go.
    """
    held = {folder: allocated_bytes(folder) for folder in home.partial.glob("*") if is_sha256(folder.name)}
    free = shutil.disk_usage(next(place for place in (home.partial, *home.partial.parents) if place.exists())).free
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
    """Layers in a folder are opened now."""
    try:
        os.utime(folder / PART)
    except OSError:
        return  # they count as old


def last_used(folder: Path) -> float:
    """Unix seconds."""
    try:
        return (folder / PART).stat().st_mtime
    except OSError:
        return folder.stat().st_mtime if folder.exists() else 0.0


def allocated_bytes(folder: Path) -> int:
    """What the files of a folder take on the disk; holes take nothing."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _remove(folder: Path) -> bool:
    """Whether a folder could be removed: not while it is being filled."""
    try:
        with only_one(folder.with_name(f"{folder.name}.lock"), folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    except (FetchInProgress, DownloadError):
        return False
    return not folder.exists()
