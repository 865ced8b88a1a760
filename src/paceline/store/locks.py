"""One process, and one thread of it, at a time. The system lets go of a lock when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from paceline.core.errors import FetchInProgress
from paceline.store.faults import can_not_write


@contextlib.contextmanager
def only_one(path: Path, what: str) -> Generator[None]:
    """Hold the lock file at `path`, which is gone afterwards.

    Raises:
        FetchInProgress: another process or thread holds it.
        DownloadError: it can't be made.
    """
    handle = _locked(path, what)
    try:
        yield
    finally:
        # While it is held: a process that opened this file already will see that it is not the one at `path` any more.
        path.unlink(missing_ok=True)
        os.close(handle)


def _locked(path: Path, what: str) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise can_not_write(what, path.parent, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise FetchInProgress(f"{what} is being fetched already on this machine", "Wait for it to end, or stop it") from error
        try:
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except FileNotFoundError:
            pass  # the last holder removed it between our opening and locking it
        os.close(handle)
