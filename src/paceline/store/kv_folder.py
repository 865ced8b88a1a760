"""KV blocks on disk, found by the key that names their tokens: one file for each block, in a separate folder for each model, format, kernels and layers.

Law: a read returns the bytes that were written under that key, or it is a miss. A file appears complete (written under another name, then renamed) and
carries a checksum; a damaged file is removed and counted. Writes do not wait for the disk: a power cut may lose a block, but never falsify one.

Several processes may use one folder, and the budget counts the files of all. The least recently used file is removed first, and a file that was not
used for `ttl_s` is removed in any case. A full disk evicts too, whatever the budget. The modification time of a file is the time of its last use, so
the folder needs no index, which could be damaged.

A block is useful only together with all blocks before it in its chain. So it is evicted before them, it is not written if the one before it is absent,
and no block is evicted to make room for one that follows it.

    <home>/cache/kv/<name>/<first two digits of the key>/<key in hex>        a header of 48 bytes, then the block's bytes

Several names may share a folder inside that folder, and such a folder may have its own bound: when it is full, only blocks in it are evicted.

Every method may be called from any thread.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

from paceline.core.clock import Clock

try:
    from isal.isal_zlib import crc32  # same sums as zlib's, many times as fast: zlib's took a fifth of the time to move a block
except ImportError:  # some machines have no wheel of it
    from zlib import crc32

logger = logging.getLogger(__name__)

_HEADER: Final = struct.Struct("<8s16sQIIQ")
"""Header of a file: magic and version, key, number of the block's bytes, their CRC-32, CRC-32 of the header's fields so far, zero."""
_MAGIC: Final = b"PACEKV\x00\x01"
_SWEEP_SHARE: Final = 0.95
"""Share that a sweep leaves: of the budget, or of the stored bytes if the disk is full."""
_SWEEP_BYTES: Final = 64 << 20
"""Most bytes that this process writes between two sweeps, which count the files of all processes. Raising it: the budget is exceeded by more."""
_STALE_S: Final = 600.0
"""Seconds after which a file that was never renamed is taken for the rest of a killed process."""
_REST_S: Final = 30.0
"""Seconds without writes after a disk stayed full although blocks were evicted, or refused a write. Raising it: the blocks of that time are lost, and
computed again."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class KvFolderCounts:
    """Numbers of blocks since the folder was opened, by what happened to them."""

    read: int = 0
    missed: int = 0
    """Blocks that a read did not find, or found damaged."""
    damaged: int = 0
    written: int = 0
    evicted: int = 0
    """Blocks that were removed for the budget, for their age, or for a full disk."""
    failed: int = 0
    """Blocks that could not be written."""


BLOCK_COUNTS: Final = tuple(field.name for field in fields(KvFolderCounts))


class KvFolder:
    """Blocks of one size under one name.

    Args:
        folder: the folder that all names share; the budget covers all of it.
        name: a path in `folder`. It names everything but the tokens that determines a block's bytes.
        block_bytes: size of each block.
        budget_bytes: most bytes of all files in `folder`.
        ttl_s: seconds without use after which a block is removed.
        bounds: most bytes of all files in a folder that `name` begins with, by folder, the outermost first.
        may_write: called with the bytes of each file before it is written; False refuses the write.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        block_bytes: int,
        budget_bytes: int,
        ttl_s: float,
        clock: Clock,
        bounds: Mapping[str, int] = MappingProxyType({}),
        may_write: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.counts = KvFolderCounts()
        self._folder, self._own = folder, folder / name
        self._block_bytes, self._ttl_s, self._may_write = block_bytes, ttl_s, may_write
        self._bounds = [(f"{folder}/", budget_bytes), *((f"{folder / part}/", bound) for part, bound in bounds.items())]
        self._totals = [0] * len(self._bounds)
        """Bytes in each folder of `_bounds`: the result of the last sweep, plus this process's writes since."""
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: set[bytes] = set()
        """Keys of the blocks that the last sweep found, plus this process's writes. Another process may have removed or added files since."""
        self._parents: dict[bytes, bytes] = {}
        """For some of these keys, the key of the block before it in its chain."""
        self._unswept_bytes = 0
        self._full_until = -1.0
        self._owed_bytes = 0.0
        """Half of the bytes that were evicted for a full disk, minus the bytes written since. Above 0, another program may have taken the space."""
        self._spared_until = -1.0
        """Monotonic time from which a full disk may evict blocks again while `_owed_bytes` is above 0. The wait, `_spared_s`, doubles each time."""
        self._spared_s = _REST_S
        self.sweep()

    @property
    def total_bytes(self) -> int:
        """Bytes of all names in the folder, as far as this process knows."""
        return self._totals[0]

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def run_of(self, keys: Sequence[bytes]) -> int:
        """Return how many of a chain's blocks are here, counted from the first one up to the first gap."""
        n = next((place for place, key in enumerate(keys) if key not in self._keys), len(keys))
        with self._lock:
            self._parents.update(zip(keys[1:n], keys, strict=False))
        return n

    def takes(self, key: bytes, parent: bytes | None = None) -> bool:
        """Return whether `write` would try to store a block: it is absent, its parent is here, and no disk error was too recent.

        An absent block that would be refused is counted as failed.
        """
        if key in self._keys:
            return False
        if self._clock.monotonic() >= self._full_until and (parent is None or parent in self._keys):
            return True
        return self._refused()

    def _refused(self) -> bool:
        with self._lock:
            self.counts.failed += 1
        return False

    def write(self, key: bytes, block: memoryview, parent: bytes | None = None) -> bool:
        """Store a block, unless it is here already.

        Args:
            parent: the key of the block before it in its chain; None: it is not known to follow one.

        Returns:
            True if the block is here now. A lack of room or a failing disk is counted and raises nothing, because the block can be computed again.
        """
        assert block.nbytes == self._block_bytes
        if not self.takes(key, parent):
            return key in self._keys
        n_bytes = _HEADER.size + block.nbytes
        if self._is_full(n_bytes) or self._unswept_bytes > _SWEEP_BYTES:
            self.sweep(n_bytes, parent)
            # The sweep may have found that another process removed the parent.
            if self._is_full(n_bytes) or not (parent is None or parent in self._keys):
                return self._refused()
        if not self._may_write(n_bytes):
            return self._refused()
        header = _header(key, block)
        error = self._put(key, header, block)
        if error is not None and error.errno in _FULL and self._make_way(n_bytes, parent):
            error = self._put(key, header, block)
        if error is not None:
            self._failed(error)
            return False
        with self._lock:
            self._keys.add(key)
            if parent is not None:
                self._parents[key] = parent
            self.counts.written += 1
            self._totals = [total + n_bytes for total in self._totals]
            self._unswept_bytes += n_bytes
            self._owed_bytes -= n_bytes
        return True

    def _is_full(self, n_bytes: int) -> bool:
        return any(total + n_bytes > bound for total, (_, bound) in zip(self._totals, self._bounds, strict=True))

    def read(self, key: bytes, block: memoryview) -> bool:
        """Fill `block` with the block of that key, and record its use.

        Returns:
            True if the block was here and undamaged. Otherwise the content of `block` is undefined.
        """
        assert block.nbytes == self._block_bytes
        path = self._path(key)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            self._missed(key)
            return False
        read = 0
        try:
            header = bytearray(_HEADER.size)
            read = os.readv(handle, [header, block])
            # A file system may return fewer bytes than a read asks for.
            while read >= len(header) and (more := os.readv(handle, [block[read - len(header) :]])) > 0:
                read += more
            is_whole = read == len(header) + block.nbytes and bytes(header) == _header(key, block) and not os.read(handle, 1)
            if is_whole:
                with suppress(OSError):  # the disk may have become read-only
                    self._use(handle)
        except OSError:
            is_whole = False
        finally:
            os.close(handle)
        if not is_whole:
            is_gone = _remove(path)
            self._missed(key)
            with self._lock:
                self.counts.damaged += 1
            logger.warning("a block of KV in %s was damaged, and %s", path.parent, "is removed" if is_gone else "can't be removed")
            return False
        with self._lock:
            self.counts.read += 1
        return True

    def sweep(self, room_bytes: int = 0, parent: bytes | None = None, *, is_full: bool = False) -> int:
        """Examine the files of all processes, and remove old ones, those over the budget, and those that a killed process left half-written.

        Args:
            room_bytes: bytes to leave free, of the budget, of other bounds and on the disk.
            parent: key of a block that is kept, like all blocks before it.
            is_full: the disk is full. A twentieth of the stored bytes is removed, or `room_bytes` if that is more; nothing if `room_bytes` is over half.

        Returns:
            Bytes that were removed.
        """
        now_s = self._clock.wall()
        files: list[tuple[float, int, Path, bytes | None]] = []
        for used_s, n_bytes, path in _files(self._folder):
            if not path.name.startswith("."):
                # A clock that jumped ahead and back leaves times in the future: those count as now.
                files.append((min(used_s, now_s), n_bytes, path, _key_of(path) if path.parent.parent == self._own else None))
            elif now_s - used_s > _STALE_S:
                files.append((-math.inf, n_bytes, path, None))
        totals = [sum(n_bytes for _, n_bytes, path, _ in files if str(path).startswith(within)) for within, _ in self._bounds]
        before = totals[0]
        used: dict[bytes | None, float] = {key: used_s for used_s, _, _, key in files if key is not None}
        self._use_before(used, parent)
        files.sort(key=lambda file: used.get(file[3], file[0]))
        for level, (within, bound) in reversed([*enumerate(self._bounds)]):  # the narrowest bound first
            total = totals[level]
            most = bound * _SWEEP_SHARE - room_bytes if total + room_bytes > bound else total
            if is_full and not level and total >= 2 * room_bytes:
                most = min(most, total * _SWEEP_SHARE, total - room_bytes)
            kept: list[tuple[float, int, Path, bytes | None]] = []
            for used_s, n_bytes, path, key in files:
                is_old = now_s - used.get(key, used_s) > self._ttl_s
                is_over = totals[level] > most and used.get(key) != math.inf and str(path).startswith(within)
                if not is_old and not is_over:
                    kept.append((used_s, n_bytes, path, key))
                    continue
                if is_gone := _remove(path):
                    totals = [total - n_bytes * str(path).startswith(at) for total, (at, _) in zip(totals, self._bounds, strict=True)]
                    self.counts.evicted += not path.name.startswith(".")
                if is_gone or is_old:
                    used.pop(key, None)
            files = kept
        with self._lock:
            self._keys = {key for key in used if key is not None}
            self._parents = {key: parent for key, parent in self._parents.items() if key in used}
            self._totals, self._unswept_bytes = totals, 0
        return before - totals[0]

    def _use_before(self, used: dict[bytes | None, float], parent: bytes | None) -> None:
        """Raise each block's time of use in `used` to just after the latest use of a block that follows it, so that chains are evicted from their end.

        `parent`, and so all blocks before it, gets an infinite time and is never removed.
        """
        with self._lock:
            parents: dict[bytes | None, bytes | None] = {**self._parents}
        if parent in used:
            used[parent] = math.inf
        depths = _depths([key for key in (*reversed(parents), *used) if key in used], parents)
        for key in sorted(depths, key=depths.__getitem__, reverse=True):
            before = parents.get(key)
            if before in depths and depths[before] < depths[key]:
                used[before] = max(used[before], math.nextafter(used[key], math.inf))

    def _make_way(self, n_bytes: int, parent: bytes | None) -> bool:
        """Evict blocks because the disk is full. Returns whether any were removed: not while an earlier eviction did not help."""
        now_s = self._clock.monotonic()
        if self._owed_bytes <= 0:
            self._spared_s = _REST_S
        elif now_s < self._spared_until:
            return False
        if gone := self.sweep(n_bytes, parent, is_full=True):
            self._owed_bytes, self._spared_until, self._spared_s = gone / 2, now_s + self._spared_s, 2 * self._spared_s
        return gone > 0

    def _put(self, key: bytes, header: bytes, block: memoryview) -> OSError | None:
        """Write a block's file. Returns the error that prevented it, or None."""
        path = self._path(key)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            handle = self._create(unfinished)
            try:
                _write_all(handle, header, block)
                self._use(handle)
            finally:
                os.close(handle)
            unfinished.rename(path)
        except OSError as error:
            _remove(unfinished)
            return error
        return None

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            for folder in reversed([at for at in path.parents if at.is_relative_to(self._folder)]):
                folder.mkdir(mode=0o700, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _use(self, handle: int) -> None:
        now_s = self._clock.wall()
        os.utime(handle, (now_s, now_s))

    def _path(self, key: bytes) -> Path:
        digits = key.hex()
        return self._own / digits[:2] / digits

    def _missed(self, key: bytes) -> None:
        with self._lock:
            self._keys.discard(key)
            self.counts.missed += 1

    def _failed(self, error: OSError) -> None:
        with self._lock:
            self.counts.failed += 1
            if error.errno in _FULL | {errno.EROFS, errno.EACCES, errno.EFBIG}:
                self._full_until = self._clock.monotonic() + _REST_S
        logger.warning("a block of KV could not be kept in %s: %s", self._own, error.strerror or error)


def _depths(keys: Iterable[bytes | None], parents: Mapping[bytes | None, bytes | None]) -> dict[bytes | None, int]:
    """Return the number of blocks before each block in its chain, in one pass. Other nodes supply the parents, which may form
    circles: a circle is cut where the walk closes it.
    """
    known, depths = dict.fromkeys(keys), dict[bytes | None, int]()
    for key in known:
        path = list[bytes | None]()
        at: bytes | None = key
        while at in known and at not in depths:
            depths[at] = -1
            path.append(at)
            at = parents.get(at)
        depth = depths.get(at, -1)
        for each in reversed(path):
            depth += 1
            depths[each] = depth
    return depths


def _header(key: bytes, block: memoryview) -> bytes:
    fields = (_MAGIC, key, block.nbytes, crc32(block))
    return _HEADER.pack(*fields, crc32(_HEADER.pack(*fields, 0, 0)), 0)


def _write_all(handle: int, header: bytes, block: memoryview) -> None:
    written = os.writev(handle, [header, block])
    while written < len(header) + block.nbytes:
        more = os.write(handle, block[max(0, written - len(header)) :]) if written >= len(header) else 0
        if not more:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += more


def _remove(path: Path) -> bool:
    """Remove a file. Returns whether it is gone: a disk that became read-only keeps it."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the files under a folder: Unix time of last use, bytes, path. Files that disappear meanwhile are left out."""
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base, name)
            try:
                status = path.lstat()
            except OSError:
                continue
            yield status.st_mtime, status.st_size, path


def _key_of(path: Path) -> bytes | None:
    try:
        key = bytes.fromhex(path.name)
    except ValueError:
        return None
    return key if len(key) == 16 and path.parent.name == path.name[:2] else None
