"""Files and folders of this machine. A file is written whole or not at all, and only its owner can read it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Final

WRITABLE_HINT: Final = "Make it yours and writable, or set PACELINE_HOME to a folder that is."
"""The hint for a folder of Paceline's that can't be written."""


class Under:
    """A descriptor: the path `parts` below the `root` of the object that holds it."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, holder: Any, kind: object = None) -> Path:
        root: Path = holder.root
        return root.joinpath(*self._parts)


def nearest_folder(path: Path) -> Path:
    """Return `path` if it exists, else the nearest existing folder above it."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def write_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `data` at `path`, whole or not at all; only the owner can read it.

    Args:
        path: its folder is created if it is missing.
        durable: wait until a power cut can't lose the file. Keys, and promises made to other nodes, need this.

    Raises:
        OSError: the folder can't be created or the file can't be written; no temporary file stays behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # mkstemp makes files of mode 0600.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(name).replace(path)
        if durable:
            _sync_folder(path.parent)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
