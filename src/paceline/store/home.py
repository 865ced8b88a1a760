"""PACELINE_HOME: where models, caches and identity live (default `~/.paceline`).

    config.toml                  what a person set: see `node.pipeline_settings`
    models/<org>/<name>/         files of a pulled model, and `paceline.json`, its manifest
    partial/<digest>/            files of a model on its way here, or of which only some layers are wanted; they have holes
    cache/digests/               SHA-256 of files and of their pieces, by path, size and modification time
    cache/tokenizers/            tokenizers built from GGUF metadata, and those of other nodes' models, by SHA-256
    cache/kernels/               compiled kernels, by version and processor
    cache/speeds/                tokens a second that models were measured at here
    cache/memory_rate.json       the memory's bandwidth, as measured since the machine last started
    fleet/                       identity, and what belongs to it: see `transport.trust.folder`

Files are written to a temporary name and renamed, so a reader never sees half of one. A cache that can't be written costs time
at the next start and nothing else, so that is logged and not raised.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.files import write_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under one PACELINE_HOME. Nothing is created before it is written to."""

    root: Path

    @classmethod
    def from_environment(cls) -> Home:
        """The folder `PACELINE_HOME` names, else `~/.paceline`.

        Raises:
            ConfigError: it names the home of a user the system does not know.
        """
        return cls(expanded(Path(os.environ.get("PACELINE_HOME") or "~/.paceline")).absolute())

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def partial(self) -> Path:
        return self.root / "partial"

    @property
    def digests(self) -> Path:
        return self.root / "cache" / "digests"

    @property
    def tokenizers(self) -> Path:
        return self.root / "cache" / "tokenizers"

    @property
    def kernels(self) -> Path:
        return self.root / "cache" / "kernels"

    @property
    def speeds(self) -> Path:
        return self.root / "cache" / "speeds"

    @property
    def memory_rate(self) -> Path:
        return self.root / "cache" / "memory_rate.json"

    @property
    def fleet(self) -> Path:
        return self.root / "fleet"


def expanded(path: Path) -> Path:
    """A path with the `~` or `~user` it begins with resolved.

    Raises:
        ConfigError: the system knows no such home.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: this system knows no home folder by that name", "Write the whole path, or set HOME") from error


def write_cache(path: Path, data: bytes) -> None:
    """`write_file` for what can be made again: a failure is logged, not raised."""
    try:
        write_file(path, data)
    except OSError as error:
        logger.warning("could not keep %s for the next start: %s", path, error)


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file of ours; None where the file is missing or damaged, which are the same to a cache."""
    try:
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def identity_key(path: Path, purpose: str) -> str:
    """A short name for a file as it is now: another path, size or modification time gives another key.

    Raises:
        OSError: the file can't be examined.
    """
    status = path.stat()
    facts = f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0{purpose}"
    return hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()[:40]
