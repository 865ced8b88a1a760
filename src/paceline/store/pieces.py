"""Checksums of a file's pieces, and of all of it; remembered like digests. Pieces are hashed on several threads, beside the whole where it is not known."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from paceline.core.manifest import PIECE, SHA256_BYTES
from paceline.store.digests import DigestCache
from paceline.store.faults import damaged, unreadable
from paceline.store.home import Home, identity_key, write_cache

logger = logging.getLogger(__name__)

_MOST_THREADS = 8
"""That hash; more would wait for the disk, and leave less to answers."""
_SAY_S = 0.5
"""How often it is told how far the whole is, once all pieces are hashed."""


@dataclass(frozen=True, slots=True)
class FileSums:
    """What a file's bytes hash to."""

    size: int
    sha256: str
    pieces: bytes
    """32 bytes a piece."""


def file_sums(path: Path, home: Home, examined: Callable[[int], None]) -> FileSums:
    """A file's checksums, read only if it changed since the last time.

    Args:
        examined: told the bytes of the file that were read so far.

    Raises:
        ModelFileError: the file can't be read, or changes meanwhile.
    """
    try:
        size, entry = path.stat().st_size, _entry(path, home)
        known = _remembered(entry, size)
        if known is not None:
            examined(size)
            return known
        sums = _computed(path, size, DigestCache(home).known(path), examined)
        if entry != _entry(path, home):
            raise damaged(path, "it changed while it was read")
    except OSError as error:
        raise unreadable(path, error) from error
    remember_sums(path, sums, home)
    return sums


def remember_sums(path: Path, sums: FileSums, home: Home) -> None:
    """Keep checksums that the caller has just computed of a file."""
    try:
        write_cache(_entry(path, home), bytes.fromhex(sums.sha256) + sums.pieces)
    except OSError as error:
        raise unreadable(path, error) from error
    DigestCache(home).remember(path, sums.sha256)


def _entry(path: Path, home: Home) -> Path:
    return home.digests / f"{identity_key(path, 'pieces')}.sums"


def _remembered(entry: Path, size: int) -> FileSums | None:
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    if len(data) != SHA256_BYTES * (1 + -(-size // PIECE)):
        logger.warning("%s is damaged and made anew", entry)
        return None
    return FileSums(size, data[:SHA256_BYTES].hex(), data[SHA256_BYTES:])


class _Whole:
    """Hashes all of a file, unless its digest is known."""

    def __init__(self, path: Path, known: str | None) -> None:
        self._path, self._known = path, known
        self.read = 0 if known is None else path.stat().st_size
        """Bytes so far."""
        self.given_up = False

    def digest(self) -> str:
        """Hex. For a thread."""
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
