"""The KV of one runner, kept on this machine's disk: blocks are written behind the engine's steps, and read into the pool before a sequence begins.

Law: threads of their own copy, write and read; the engine's thread hands over block ids and hears what is done. A block is in one thread's hands, or
the engine's. Reading pays where it is expected to take less time than computing the tokens, by rates that were both measured.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.clock import Clock
from paceline.core.ids import BlockId
from paceline.engine.local import LayerRunner
from paceline.store.kv_folder import BLOCK_COUNTS, KvFolder

READERS: Final = 2
"""Threads that read: while one copies into the pool, another waits for the disk."""
MOST_BYTES: Final = 64 << 20
"""Of blocks that are being kept at a time. Raising it: more of the pool can't be handed out while a burst is written."""


@dataclass(frozen=True, slots=True)
class KvDiskLimits:
    """What the tier may take."""

    budget_bytes: int
    """Of the disk, over all models and processes."""
    ttl_s: float = 7 * 86400.0
    """After which a block that was not used is removed."""


class DiskFetch:
    """Implements `engine.kv_source.KvFetch`."""

    def __init__(self, n_blocks: int) -> None:
        self._left = n_blocks
        self._came = [False] * n_blocks
        self._lock = threading.Lock()
        self.is_cancelled = False
        """Or a block before was missing: what follows is of no use."""

    @property
    def filled(self) -> int:
        return next((place for place, came in enumerate(self._came) if not came), len(self._came))

    @property
    def is_over(self) -> bool:
        return not self._left

    def cancel(self) -> None:
        self.is_cancelled = True

    def done(self, place: int, *, came: bool) -> bool:
        """A block stands, or does not. Returns whether it was the last."""
        with self._lock:
            self._came[place] = came
            self.is_cancelled |= not came
            self._left -= 1
            return not self._left


class DiskTier:
    """Implements `engine.kv_source.KvSource`. Made on any thread; close it after the engine, and before the runner.

    Args:
        wake: called, in other threads, when a fetch is over or a block was let go.
    """

    def __init__(
        self, runner: LayerRunner[Any], model_digest: str, folder: Path, limits: KvDiskLimits, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._runner, self._wake = runner, wake
        self._bytes = runner.block_bytes
        name = _name(runner, model_digest)
        self._folder = KvFolder(folder, name, self._bytes, limits.budget_bytes, limits.ttl_s, clock)
        self._writer = ThreadPoolExecutor(1, "paceline-kv-write")
        self._readers = ThreadPoolExecutor(READERS, "paceline-kv-read")
        self._buffers = threading.local()
        self._most_writing = max(1, MOST_BYTES // self._bytes)
        self._lent = 0
        self._kept: deque[BlockId] = deque()
        self._work: set[Future[None]] = set()

    @property
    def counts(self) -> Mapping[str, int]:
        return {name: getattr(self._folder.counts, name) for name in BLOCK_COUNTS}

    @property
    def kept_bytes(self) -> int:
        return self._folder.total_bytes

    def run_of(self, keys: Sequence[bytes]) -> int:
        return self._folder.run_of(keys)

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> DiskFetch:
        fetch = DiskFetch(len(blocks))
        for place, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            self._start(self._readers, self._read, fetch, place, key, block)
        return fetch

    def keep(self, key: bytes, block: BlockId) -> bool:
        if self._folder.run_of([key]):
            self._lent += 1
            self._kept.append(block)
            return True
        if self._lent >= self._most_writing:
            return False
        self._lent += 1
        self._start(self._writer, self._write, key, block)
        return True

    def kept(self) -> Sequence[BlockId]:
        found: list[BlockId] = []
        while self._kept:
            found.append(self._kept.popleft())
        self._lent -= len(found)
        return found

    def reset(self) -> None:
        work = tuple(self._work)
        for future in work:
            future.cancel()
        wait(work)
        self._kept.clear()
        self._lent = 0

    def close(self) -> None:
        """End. What was not written yet is not kept. Idempotent."""
        for pool in (self._writer, self._readers):
            pool.shutdown(cancel_futures=True)

    # ----------------------------------------------------------------------------------------------------------- in other threads

    def _read(self, fetch: DiskFetch, place: int, key: bytes, block: BlockId) -> None:
        came = False
        if not fetch.is_cancelled:
            data = self._buffer()
            if came := self._folder.read(key, data):
                self._runner.import_block(block, data)
        if fetch.done(place, came=came):
            self._wake()

    def _write(self, key: bytes, block: BlockId) -> None:
        data = self._buffer()
        self._runner.export_block(block, data)
        self._let_go(block)
        self._folder.write(key, data)

    def _let_go(self, block: BlockId) -> None:
        self._kept.append(block)
        self._wake()

    def _buffer(self) -> memoryview:
        """Of this thread."""
        if not hasattr(self._buffers, "data"):
            self._buffers.data = memoryview(bytearray(self._bytes))
        return self._buffers.data

    def _start(self, pool: ThreadPoolExecutor, work: Callable[..., None], *args: Any) -> None:
        future = pool.submit(work, *args)
        self._work.add(future)
        future.add_done_callback(self._work.discard)


def _name(runner: LayerRunner[Any], model_digest: str) -> str:
    """Of a folder for blocks that any runner of these weights, layers and kernels may read."""
    said = f"{model_digest} {runner.numerics_id} {runner.layers} {runner.kv_layout} {runner.block_size} {runner.block_bytes}"
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
