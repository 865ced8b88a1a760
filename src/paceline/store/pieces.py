"""Checksums of a file's pieces, and of all of it, in one reading; remembered like digests."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.manifest import PIECE, SHA256_BYTES
from paceline.store.digests import DigestCache
from paceline.store.faults import damaged, unreadable
from paceline.store.home import Home, identity_key, write_cache

logger = logging.getLogger(__name__)


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
        sums = _computed(path, examined)
        if sums.size != size or entry != _entry(path, home):
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


def _computed(path: Path, examined: Callable[[int], None]) -> FileSums:
    whole, pieces, size = hashlib.sha256(), bytearray(), 0
    with path.open("rb") as file:
        while data := file.read(PIECE):
            whole.update(data)
            pieces += hashlib.sha256(data).digest()
            size += len(data)
            examined(size)
    return FileSums(size, whole.hexdigest(), bytes(pieces))
