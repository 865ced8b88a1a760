"""Folders for the sockets of engines that this node starts: one for each start, which only this user can search.

The node holds a lock on a file in each folder. A folder with a free lock was left by a node that was killed together with its engine's guard, and is removed
when the next engine starts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

MAX_SOCKET_PATH: Final = 100
"""Longest path of a Unix socket, in bytes. macOS allows 103, Linux 107."""
PREFIX: Final = "paceline-"
OWNER: Final = "owner.lock"
"""File in the folder that its node locks."""


class EngineFolder:
    """A new folder, held until it is removed. Its path is short enough for a socket, if any place has a short path.

    Raises:
        OSError: no folder can be made.
    """

    def __init__(self) -> None:
        places = _places()
        for place in places:
            _remove_left(place)
        self.path = _made_in(places)
        # Locked before it has its name: a lock that is free under this name was left.
        handle, name = tempfile.mkstemp(dir=self.path)
        fcntl.flock(handle, fcntl.LOCK_EX)
        Path(name).rename(self.path / OWNER)
        self._lock: int | None = handle

    def remove(self) -> None:
        """Remove the folder, and let go of it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def _places() -> list[Path]:
    named = (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")  # noqa: S108 - mkdtemp makes a new folder of mode 0700
    return list(dict.fromkeys(Path(place) for place in named if place))


def _made_in(places: list[Path]) -> Path:
    for place in places:
        if len(os.fsencode(place)) < MAX_SOCKET_PATH - 40:
            with suppress(OSError):
                return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def _remove_left(place: Path) -> None:
    """Remove the folders in a place that nodes of this user made, and that no running node holds."""
    with suppress(OSError):
        for folder in place.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if _is_ours(folder) and not _is_held(folder / OWNER):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Return whether it is a folder, and not a link, of this user alone."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _is_held(owner: Path) -> bool:
    """Return whether a node holds the lock. Raises OSError if there is none: then Paceline did not make the folder."""
    handle = os.open(owner, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
