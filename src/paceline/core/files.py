"""Files and folders of this machine: a file is written whole or not at all, and only its owner can read it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Final

WRITABLE_HINT: Final = "Make it yours and writable, or set PACELINE_HOME to a folder that is."
"""Of a folder of Paceline's that can't be written."""


class Under:
    """A path under the `root` of the object that has it."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, holder: Any, kind: object = None) -> Path:
        root: Path = holder.root
        return root.joinpath(*self._parts)


def nearest_folder(path: Path) -> Path:
    """`path` where it is there, else the nearest folder above it that is."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def write_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `data` at `path`, whole or not at all; readable by its owner alone.

    Args:
        path: its folder is made where it is missing.
        durable: wait until a power cut can't lose it, as a key or a promise made to others must not be.

    Raises:
        OSError: the folder can't be made or the file not written; no temporary file stays behind.
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
