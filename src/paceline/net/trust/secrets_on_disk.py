"""Keys on disk: files that only their owner can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from paceline.core.errors import IdentityError

MAX_FILE_BYTES = 16 << 20


def read_secret(path: Path) -> bytes:
    """A file that only its owner can read.

    Raises:
        IdentityError: others can read it, it is another user's, or it can't be read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise IdentityError(
                    f"{path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o}), so it is not used",
                    f"Make it yours alone: chmod 600 {path}. If others may have read it, revoke this node and join again",
                )
            if status.st_uid != os.geteuid():
                raise IdentityError(f"{path} belongs to another user, so it is not used", "Run as the user who made it")
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise IdentityError(f"{path} can't be read: {error.strerror}") from error
