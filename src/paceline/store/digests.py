"""SHA-256 of files, remembered by path, size and modification time: a start must not cost seconds for a file that did not change.

The checksums of a file's pieces are remembered in the same way. Several threads hash pieces; one hashes the whole file at the same time, if its
digest is not known.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from paceline.core.manifest import PIECE, SHA256_BYTES, combined_digest
from paceline.store.faults import damaged, reading
from paceline.store.home import Home, identity_key, read_json_object, write_cache


@dataclass(frozen=True, slots=True)
class DigestCache:
    """Digests of files, kept under a home."""

    home: Home

    def sha256(self, path: Path) -> str:
        """Return the hex SHA-256 of a file. The file is read only if it changed since the last time.

        Raises:
            ModelFileError: the file can't be read.
        """
        known = self.known(path)
        if known is not None:
            return known
        with reading(path), path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        self.remember(path, digest)
        return digest

    def known(self, path: Path) -> str | None:
        """Return the digest if it is remembered and the file did not change since; otherwise None.

        Raises:
            ModelFileError: the file can't be examined.
        """
        entry = read_json_object(self._entry(path))
        digest = entry.get("sha256") if entry is not None else None
        return digest if isinstance(digest, str) and len(digest) == 64 else None

    def remember(self, path: Path, digest: str) -> None:
        """Store a digest that the caller has just computed (a pull hashes the bytes it fetches)."""
        write_cache(self._entry(path), json.dumps({"path": str(path), "sha256": digest}).encode())

    def _entry(self, path: Path) -> Path:
        with reading(path):
            return self.home.digests / f"{identity_key(path, 'digest')}.json"


def digest_of_files(cache: DigestCache, files: Iterable[Path]) -> str:
    """Return one digest for a model of several files: equal if the names and the bytes are equal. For a single file it is the file's own digest."""
    return combined_digest([(path.name, cache.sha256(path)) for path in files])


logger = logging.getLogger(__name__)

_MOST_THREADS = 8
"""Most threads that hash one file. Raising it: more threads wait for the disk, and answers get less of the processor."""
_SAY_S = 0.5
"""Seconds between two progress reports on the whole file, once all pieces are hashed."""


@dataclass(frozen=True, slots=True)
class FileSums:
    size: int
    sha256: str
    pieces: bytes
    """SHA-256 digests of the pieces in order, 32 bytes each."""


def file_sums(path: Path, home: Home, examined: Callable[[int], None]) -> FileSums:
    """Return a file's checksums. The file is read only if it changed since the last time.

    Args:
        examined: called with the bytes of the file that were read so far.

    Raises:
        ModelFileError: the file can't be read, or changes while it is read.
    """
    with reading(path):
        size, entry = path.stat().st_size, _entry(path, home)
        known = _remembered(entry, size)
        if known is not None:
            examined(size)
            return known
        sums = _computed(path, size, DigestCache(home).known(path), examined)
        if entry != _entry(path, home):
            raise damaged(path, "it changed while it was read")
    remember_sums(path, sums, home)
    return sums


def remember_sums(path: Path, sums: FileSums, home: Home) -> None:
    """Store the checksums of a file that the caller has just computed."""
    with reading(path):
        write_cache(_entry(path, home), bytes.fromhex(sums.sha256) + sums.pieces)
    DigestCache(home).remember(path, sums.sha256)


def cached_sums(path: Path, home: Home) -> tuple[Path, Path]:
    """Return the two cache files for a file: its checksums, and its digest."""
    return _entry(path, home), home.digests / f"{identity_key(path, 'digest')}.json"


def _entry(path: Path, home: Home) -> Path:
    return home.digests / f"{identity_key(path, 'pieces')}.sums"


def _remembered(entry: Path, size: int) -> FileSums | None:
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    if len(data) != SHA256_BYTES * (1 + -(-size // PIECE)):
        logger.warning("%s is damaged and will be made again", entry)
        return None
    return FileSums(size, data[:SHA256_BYTES].hex(), data[SHA256_BYTES:])


class _Whole:
    """The digest of a whole file: known already, or computed in a thread while others hash pieces."""

    def __init__(self, path: Path, known: str | None) -> None:
        self._path, self._known = path, known
        self.read = 0 if known is None else path.stat().st_size
        """Bytes hashed so far."""
        self.given_up = False

    def digest(self) -> str:
        """Return the hex SHA-256. Blocks, so it runs in a thread of its own; setting `given_up` ends it early with a wrong digest."""
        if self._known is not None:
            return self._known
        digest = hashlib.sha256()
        with self._path.open("rb", buffering=0) as file:
            while not self.given_up and (data := file.read(PIECE)):
                digest.update(data)
                self.read += len(data)
        return digest.hexdigest()


def _computed(path: Path, size: int, known: str | None, examined: Callable[[int], None]) -> FileSums:
    whole, pieces = _Whole(path, known), bytearray()
    threads = max(2, min(_MOST_THREADS, os.cpu_count() or 1))
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(threads, "sums") as pool:

        def piece(at: int) -> bytes:
            return hashlib.sha256(os.pread(file.fileno(), PIECE, at)).digest()

        digest = pool.submit(whole.digest)
        try:
            for sum_ in pool.map(piece, range(0, size, PIECE)):
                pieces += sum_
                examined(min(size, len(pieces) // SHA256_BYTES * PIECE, whole.read))
            while wait((digest,), _SAY_S).not_done:
                examined(whole.read)
        except BaseException:
            whole.given_up = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        examined(size)
        return FileSums(size, digest.result(), bytes(pieces))
