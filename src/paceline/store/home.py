"""PACELINE_HOME: where models, caches and identity live (default `~/.paceline`).

    layout                       version of all this, and the Paceline that wrote it
    config.toml                  settings that a person made: see `machine.config_file`
    models/<org>/<name>/         files of a pulled model, and `paceline.json`, its manifest
    partial/<digest>/            files, with holes, of a model that is being fetched or of which only some layers are needed here
    cache/digests/               SHA-256 of files and of their pieces, by path, size and modification time
    cache/tokenizers/            tokenizers built from GGUF metadata, and those of other nodes' models, by SHA-256
    cache/kernels/               compiled kernels, by version and processor
    cache/speeds/                measured speeds of models here, in tokens per second
    cache/kv/                    KV of prompts and answers, if `--kv-disk` is given: see `store.kv_folder`
    cache/memory_rate.json       the memory's bandwidth, as measured since the machine last started
    api/                         the API's own certificate and its key
    running/                     a note of each endpoint that runs now: see `cli.running`
    engines.json                 engines of other makers that this machine offers, and their keys: see `machine.foreign.shares`
    chat_history                 lines typed in chats, for the arrow keys
    fleet/                       identity, and what belongs to it: see `net.trust.folder`

Files are written to a temporary name and renamed, so a reader never sees half of one. A cache that can't be written costs only time
at the next start, so this is logged and not raised.

`only_one` admits one thread of one process at a time. The system releases a lock when its process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import ConfigError, FetchInProgress
from paceline.core.files import Under, write_file
from paceline.core.text import printable
from paceline.store.faults import can_not_write

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under one PACELINE_HOME. Nothing is created before it is written to."""

    root: Path

    @classmethod
    def from_environment(cls) -> Home:
        """Return the folder that `PACELINE_HOME` names; `~/.paceline` if it is not set.

        Raises:
            ConfigError: it names the home of a user that the system does not know; or another user owns it or may write to it. Compiled kernels in
                it are programs that run here, and its keys are this machine's identity. Or it has another layout.
        """
        root = expanded(Path(os.environ.get("PACELINE_HOME") or "~/.paceline")).absolute()
        check_own(root)
        check_layout(root)
        return cls(root)

    layout = Under("layout")
    models = Under("models")
    partial = Under("partial")
    digests = Under("cache", "digests")
    tokenizers = Under("cache", "tokenizers")
    kernels = Under("cache", "kernels")
    speeds = Under("cache", "speeds")
    memory_rate = Under("cache", "memory_rate.json")
    kv = Under("cache", "kv")
    api = Under("api")
    running = Under("running")
    engines = Under("engines.json")
    chat_history = Under("chat_history")
    engine_logs = Under("logs", "engines")
    fleet = Under("fleet")

    @property
    def is_in_fleet(self) -> bool:
        """True if this machine belongs to a fleet. Looks for one file, so it is cheap."""
        return (self.fleet / "identity.pem").exists()

    def keep_layout(self, software: str) -> None:
        """Write which layout this home has, unless that is written already.

        Args:
            software: the Paceline that writes it, as a person knows it.
        """
        if not self.layout.exists():
            # A home that can't be written is reported by what needs it.
            with contextlib.suppress(OSError):
                write_file(self.layout, f"{LAYOUT} paceline {software}\n".encode())


LAYOUT: Final = 1
"""Version of the files in a home. Raising it: homes from before are refused, by `check_layout`, until the user moves them away. What is only a cache and
is computed again does not count. A home without the file `layout` has layout 1: the file came later."""


def check_layout(folder: Path) -> None:
    """Refuse a home that has another layout. Nothing in it is changed.

    Raises:
        ConfigError: another version of Paceline wrote it.
    """
    try:
        found, _, software = (folder / "layout").read_text(errors="replace")[:200].strip().partition(" ")
    except OSError:
        return
    if found == str(LAYOUT):
        return
    by = printable(software) or "another version of Paceline"
    raise ConfigError(
        f"The home {folder} was written by {by}, in layout {printable(found) or 'unknown'}; this version uses layout {LAYOUT}",
        "Move it away, or set PACELINE_HOME to another folder. Nothing in it was changed.",
    )


def check_own(folder: Path) -> None:
    """Refuse a folder that other users may write to. A folder that does not exist yet is accepted, because Paceline will create it.

    Raises:
        ConfigError: another user owns the folder or may write to it, or it is not a folder.
    """
    try:
        status = folder.stat()
    except OSError:
        return  # the code that opens or creates it reports why it can't
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"PACELINE_HOME is {folder}, which is no folder", "Set it to a folder; one that is not there yet is made.")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to another user, who could change what runs here", "Set PACELINE_HOME to a folder of your own."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"Others may write to {folder} (mode {stat.S_IMODE(status.st_mode):04o}), and so change what runs here",
            f"Run: chmod go-w {folder}",
        )


def expanded(path: Path) -> Path:
    """Return a path with a `~` or `~user` at its beginning resolved.

    Raises:
        ConfigError: the system knows no such home.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: this system knows no home folder by that name", "Write the whole path, or set HOME") from error


def write_cache(path: Path, data: bytes) -> None:
    """Write a cache file. A failure is logged and not raised, because a cache can be made again."""
    try:
        write_file(path, data)
    except OSError as error:
        _warn(path.parent.parent, error.strerror or str(error))


@cache
def _warn(folder: Path, reason: str) -> None:
    """Log that a cache can't be written, once in a process for each folder and reason: one full disk would fail many writes."""
    logger.warning("could not keep anything in %s for the next start: %s", folder, reason)


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file that Paceline wrote; None if the file is missing or damaged, which a cache treats alike."""
    try:
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def identity_key(path: Path, purpose: str) -> str:
    """Return a short name for a file as it is now: another path, size, modification time or `purpose` gives another key.

    Raises:
        OSError: the file can't be examined.
    """
    status = path.stat()
    facts = f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0{purpose}"
    return hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()[:40]


@contextlib.contextmanager
def only_one(path: Path, what: str) -> Generator[None]:
    """Hold the lock file at `path` during the block, and remove it afterwards.

    Raises:
        FetchInProgress: another process or thread holds it.
        DownloadError: the file can't be created.
    """
    handle = _locked(path, what)
    try:
        yield
    finally:
        # Removed while the lock is held: a process that has opened this file already sees that `path` is another file or none.
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
