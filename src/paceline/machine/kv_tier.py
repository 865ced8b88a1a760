"""The KV of one runner, kept on this machine's disk: blocks are written behind the engine's steps, and read into the pool before a sequence begins.

Law: threads of their own copy, write and read; the engine's thread hands over block ids and hears what is done. A block is in one thread's hands, or
the engine's: once a fetch is over, and once `reset` returned, no block is read or written, however long a disk takes. Only copies are ever waited for.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline.core.clock import Clock
from paceline.core.errors import ExecutorLost
from paceline.core.generation import GenerationRequest
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange
from paceline.machine.kv_spans import KvBlocks, KvPart
from paceline.store.kv_folder import BLOCK_COUNTS, KvFolder

READERS: Final = 2
"""Threads that read: while one copies into the pool, another waits for the disk."""
STALL_S: Final = 2.0
"""After which a disk that gives nothing is not waited for. Raising it: a prompt is computed later where its blocks can't be had."""
REST_S: Final = 30.0
"""For which such a disk is not asked again."""
MOST_BYTES: Final = 64 << 20
"""Of blocks that are being kept at a time. Raising it: more of the pool can't be handed out while a burst is written."""


@dataclass(frozen=True, slots=True)
class KvDiskLimits:
    """What the tier may take."""

    budget_bytes: int
    """Of the disk, over all models and processes."""
    ttl_s: float = 7 * 86400.0
    """After which a block that was not used is removed."""
    within: Mapping[str, int] = field(default_factory=dict[str, int])
    """Folders in the folder, one in the other, that these blocks lie in: the bytes that each may take."""


class Wakeup:
    """Wakes the engine's thread when something came of what a source began."""

    def __init__(self) -> None:
        self._came = threading.Event()

    def came(self) -> None:
        """For any thread."""
        self._came.set()

    def wait(self, seconds: float) -> None:
        """Until something came since this was called last, but no longer."""
        self._came.wait(seconds)
        self._came.clear()


class DiskFetch:
    """Implements `engine.kv_source.KvFetch`: `READERS` threads take one block after the other. It is over, with what came, once none came for `STALL_S`."""

    def __init__(self, n_blocks: int, clock: Clock, on_stall: Callable[[], None]) -> None:
        self._on_stall = on_stall
        self.given = None
        self._next, self._readers = 0, READERS
        self._came = [False] * n_blocks
        self._lock = threading.Lock()
        self._clock, self._moved_at = clock, clock.monotonic()
        self._is_cancelled = False
        """Or a block before was missing: what follows is of no use."""

    @property
    def filled(self) -> int:
        return next((place for place, came in enumerate(self._came) if not came), len(self._came))

    @property
    def is_over(self) -> bool:
        if self._readers and self._clock.monotonic() - self._moved_at > STALL_S:
            self.end()
            self._on_stall()
        return not self._readers

    def cancel(self) -> None:
        self._is_cancelled = True

    def end(self) -> None:
        """Nothing is written into its blocks once this returns."""
        with self._lock:
            self._is_cancelled, self._readers = True, 0

    def take(self) -> int | None:
        """The place of a block to read; None: no more are."""
        with self._lock:
            if self._is_cancelled or self._next == len(self._came):
                return None
            self._next += 1
            return self._next - 1

    def fill(self, place: int, fill: Callable[[], None]) -> None:
        """A block is read, and is filled now, if it is still wanted."""
        with self._lock:
            if self._readers:
                fill()
                self._came[place] = True
                self._moved_at = self._clock.monotonic()

    def leave(self) -> bool:
        """A thread reads no more of it. Returns whether it was the last."""
        with self._lock:
            self._readers = max(0, self._readers - 1)
            return not self._readers


class DiskTier:
    """Implements `engine.kv_source.KvSource`. Made on any thread; close it after the engine, and before the runner.

    Args:
        blocks: a runner, or a part of its blocks.
        model_digest: and whatever else tells these blocks from others of the same layers.
        wake: called, in other threads, when a fetch is over or a block was let go.
        may_write: see `KvFolder`.
    """

    def __init__(
        self,
        blocks: KvBlocks,
        model_digest: str,
        folder: Path,
        limits: KvDiskLimits,
        clock: Clock,
        wake: Callable[[], None],
        may_write: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._blocks, self._wake, self._clock = blocks, wake, clock
        self._bytes = blocks.block_bytes
        name = _name(model_digest, blocks.numerics_id, blocks.layers, blocks.kv_layout, blocks.block_size, self._bytes)
        path = "/".join([*list(limits.within)[-1:], name])
        self._folder = KvFolder(folder, path, self._bytes, limits.budget_bytes, limits.ttl_s, clock, limits.within, may_write)
        self._writer = ThreadPoolExecutor(1, "paceline-kv-write")
        self._readers = ThreadPoolExecutor(READERS, "paceline-kv-read")
        self._buffers = threading.local()
        self._most_writing = max(1, MOST_BYTES // self._bytes)
        self._lent = 0
        self._kept: deque[BlockId] = deque()
        self._epoch = 0
        """What was begun before the last reset is void."""
        self._copying = threading.Lock()
        """Held while a block is copied out, and while that is made void."""
        self._fetches: set[DiskFetch] = set()
        self._work: set[Future[None]] = set()
        self._rests_until = -1.0

    @property
    def counts(self) -> Mapping[str, int]:
        return {name: getattr(self._folder.counts, name) for name in BLOCK_COUNTS}

    @property
    def kept_bytes(self) -> int:
        return self._folder.total_bytes

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        del request, n_writing
        return 0 if self._clock.monotonic() < self._rests_until else self._folder.run_of(keys)

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> DiskFetch:
        self._fetches = {fetch for fetch in self._fetches if not fetch.is_over}
        fetch = DiskFetch(len(blocks), self._clock, self._rest)
        self._fetches.add(fetch)
        for _ in range(READERS):
            self._start(self._readers, self._read, fetch, keys, blocks)
        return fetch

    def keep(self, key: bytes, block: BlockId, parent: bytes | None = None) -> bool:
        if key in self._folder:
            self._kept.append(block)
        elif self._lent >= self._most_writing:
            return False
        else:
            self._start(self._writer, self._write, self._epoch, key, block, parent)
        self._lent += 1
        return True

    def lacks(self, key: bytes) -> bool:
        return key not in self._folder

    def kept(self) -> Sequence[BlockId]:
        found = [self._kept.popleft() for _ in range(len(self._kept))]
        self._lent -= len(found)
        return found

    def reset(self) -> None:
        for future in tuple(self._work):
            future.cancel()
        for fetch in self._fetches:
            fetch.end()
        self._fetches.clear()
        with self._copying:
            self._epoch += 1
        self._kept.clear()
        self._lent = 0

    def read(self, key: bytes, data: memoryview) -> bool:
        """Copy a block from the disk, in any thread. Returns whether it was there, whole."""
        return key in self._folder and self._folder.read(key, data)

    def close(self) -> None:
        """End. What was not begun yet is not kept, and a disk that hangs is left: its threads read and write no block any more. Idempotent."""
        for pool in (self._writer, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)
        wait(tuple(self._work), STALL_S)
        self.reset()

    def _rest(self) -> None:
        self._rests_until = self._clock.monotonic() + REST_S

    # ----------------------------------------------------------------------------------------------------------- in other threads

    def _read(self, fetch: DiskFetch, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> None:
        data = self._buffer()
        try:
            while (place := fetch.take()) is not None:
                if self._folder.read(keys[place], data):
                    fetch.fill(place, partial(self._blocks.import_block, blocks[place], data))
                else:
                    fetch.cancel()
        except ExecutorLost:
            fetch.cancel()  # there is nothing to read it into
        finally:
            if fetch.leave():
                self._wake()

    def _write(self, epoch: int, key: bytes, block: BlockId, parent: bytes | None) -> None:
        data, is_wanted = self._buffer(), self._folder.takes(key, parent)
        with self._copying:
            if epoch != self._epoch:
                return
            try:
                if is_wanted:
                    self._blocks.export_block(block, data)
            except ExecutorLost:
                is_wanted = False
            finally:
                self._kept.append(block)
        self._wake()
        if is_wanted:
            self._folder.write(key, data, parent)

    def _buffer(self) -> memoryview:
        """Of this thread."""
        if not hasattr(self._buffers, "data"):
            self._buffers.data = memoryview(bytearray(self._bytes))
        return self._buffers.data

    def _start(self, pool: ThreadPoolExecutor, work: Callable[..., None], *args: Any) -> None:
        future = pool.submit(work, *args)
        self._work.add(future)
        future.add_done_callback(self._work.discard)


def part_of(
    model_digest: str, numerics_id: str, kv_layout: str, block_size: int, layers: LayerRange, layer_bytes: int, n_layers: int
) -> KvPart:
    """What some machine has of a model's blocks: all its layers, or some."""
    whole = LayerRange(0, n_layers)
    layout = bytes.fromhex(_name(model_digest, numerics_id, whole, kv_layout, block_size, n_layers * layer_bytes))
    return KvPart(model_digest, numerics_id, layout, layers, layer_bytes)


def _name(*of: object) -> str:
    """Of all blocks that any runner of these weights, layers and kernels may read."""
    return hashlib.blake2b(" ".join(map(str, of)).encode(), digest_size=16).hexdigest()
