"""SHA-256 of files, remembered by path, size and modification time: a start must not cost seconds for a file that did not change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.manifest import combined_digest
from paceline.store.faults import unreadable
from paceline.store.home import Home, identity_key, read_json_object, write_cache


@dataclass(frozen=True, slots=True)
class DigestCache:
    """Digests of files, kept under a home."""

    home: Home

    def sha256(self, path: Path) -> str:
        """Hex SHA-256 of a file, read only if it changed since the last time.

        Raises:
            ModelFileError: the file can't be read.
        """
        known = self.known(path)
        if known is not None:
            return known
        try:
            with path.open("rb", buffering=0) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        except OSError as error:
            raise unreadable(path, error) from error
        self.remember(path, digest)
        return digest

    def known(self, path: Path) -> str | None:
        """The digest if it is remembered and the file did not change since.

        Raises:
            ModelFileError: the file can't be examined.
        """
        entry = read_json_object(self._entry(path))
        digest = entry.get("sha256") if entry is not None else None
        return digest if isinstance(digest, str) and len(digest) == 64 else None

    def remember(self, path: Path, digest: str) -> None:
        """Keep a digest that the caller has just computed (a pull hashes what it fetches)."""
        write_cache(self._entry(path), json.dumps({"path": str(path), "sha256": digest}).encode())

    def _entry(self, path: Path) -> Path:
        try:
            return self.home.digests / f"{identity_key(path, 'digest')}.json"
        except OSError as error:
            raise unreadable(path, error) from error


def digest_of_files(cache: DigestCache, files: Iterable[Path]) -> str:
    """One digest for a model of several files: equal when names and bytes are. A single file's own digest stands for it."""
    return combined_digest([(path.name, cache.sha256(path)) for path in files])
