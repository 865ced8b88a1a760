"""The KV of one session on a disk of the machine that runs its layers, in a folder of its caller's own: found, restored and kept as the caller asks; and
between the session and other nodes: fetched and given.

Law: what is found or fetched comes whole or not at all, and the caller hears how far. Once an answer is given, or `fence` returned, no block of the session is
read or written. Blocks are named by their caller; another caller's are not to be found.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.core.background import came_within, tell_loop
from paceline.core.clock import Clock
from paceline.core.errors import BadPipelineRequest
from paceline.core.ids import BlockId, NodeId
from paceline.engine.kv_fetch import KvFetch
from paceline.machine.kv_spans import KvBlocks, KvMove, KvMover, n_alike
from paceline.machine.kv_tier import DiskTier, KvDiskLimits, part_of
from paceline.ways.pipeline.executor.route import BlocksAsked, BlocksDone, BlocksUse
from paceline.ways.pipeline.executor.stage import Stage

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Between two looks at a disk from which nothing is heard."""


CALLERS_SHARE, CALLER_SHARE = 2, 4
"""All callers together may take one part in so many of the disk's budget, and each of them one in so many. Raising them: prompts of other machines are
computed again more often; lowering them: other machines drive out more of the owner's KV."""
BUDGETS_A_DAY = 4
"""Times its part that a caller may write in a day. Raising it: a caller wears the disk more; lowering it: a busy caller keeps less."""
_DAY_S = 86400


class StageDisk:
    """Where a node keeps the KV of layers that it runs for others, and how much of it. For any thread."""

    def __init__(self, folder: Path, limits: KvDiskLimits) -> None:
        self._folder, self._limits = folder, limits
        self._lock = threading.Lock()
        self._day, self._written = 0, Counter[NodeId]()
        """Bytes that each caller had written on that day."""

    def open(self, blocks: KvBlocks, name: str, caller: NodeId, clock: Clock, wake: Callable[[], None]) -> DiskTier:
        """Open a caller's part. Blocks: it looks at all files.

        Args:
            name: see `DiskTier`.
        """
        own, budget = f"callers/{hashlib.blake2b(caller.encode(), digest_size=16).hexdigest()}", self._limits.budget_bytes
        limits = replace(self._limits, within={"callers": budget // CALLERS_SHARE, own: budget // CALLER_SHARE})
        return DiskTier(blocks, name, self._folder, limits, clock, wake, partial(self._may_write, caller, clock))

    def _may_write(self, caller: NodeId, clock: Clock, n_bytes: int) -> bool:
        """Count bytes against what a caller may write today."""
        day = int(clock.wall() // _DAY_S)
        with self._lock:
            if day != self._day:
                self._day, self._written = day, Counter()
            if self._written[caller] + n_bytes > BUDGETS_A_DAY * self._limits.budget_bytes // CALLER_SHARE:
                return False
            self._written[caller] += n_bytes
            return True


class SessionKv:
    """For the event loop, but for `fence` and `close`.

    Args:
        n_layers: of the whole model.
        disk: None: nothing is kept.
        mover: None: nothing is moved.
        counted: is told what became of blocks, once the session is closed.
    """

    def __init__(
        self,
        stage: Stage,
        digest: str,
        n_layers: int,
        caller: NodeId,
        disk: StageDisk | None,
        mover: KvMover | None,
        clock: Clock,
        counted: Callable[[Counter[str]], None],
    ) -> None:
        self._stage, self._caller, self._disk, self._clock, self._counted = stage, caller, disk, clock, counted
        self._digest, self._n_layers, self._mover = digest, n_layers, mover
        self._fetches: set[KvFetch] = set()
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._making: asyncio.Task[DiskTier] | None = None
        self._tier: DiskTier | None = None
        self._lock = threading.Lock()
        """Held while the tier is told to begin something, and while it is fenced."""
        self._is_fenced = False
        self._keeping = asyncio.Lock()

    @property
    def counts(self) -> Counter[str]:
        """Blocks of this session, by what became of them."""
        return Counter() if self._tier is None else Counter(self._tier.counts)

    async def use(self, asked: BlocksAsked) -> BlocksDone:
        """Do what is asked, of a session that is connected.

        Raises:
            BadPipelineRequest: of blocks, or layers, that the session has not.
        """
        keys, blocks = asked.keys, [BlockId(block) for block in asked.blocks]
        self._stage.check_blocks(blocks, full=asked.use in (BlocksUse.KEEP, BlocksUse.GIVE, BlocksUse.COMPARE))
        until = self._loop.time() + asked.within_s
        if asked.move is not None:
            return await self._move(asked.use, asked.move, keys, blocks, until)
        if asked.use is BlocksUse.COMPARE:
            return BlocksDone(await asyncio.to_thread(self._alike, blocks))
        tier = await self._opened(until)
        if tier is None:
            return BlocksDone(0)
        match asked.use:
            case BlocksUse.FIND:
                return BlocksDone(tier.run_of(keys))
            case BlocksUse.RESTORE:
                return BlocksDone(await self._restore(tier, keys, blocks, until))
            case _:
                async with self._keeping:
                    return BlocksDone(await self._keep(tier, asked, blocks, until))

    def fence(self) -> None:
        """Nothing is read or written any more once this returns. In any thread; does not wait for a disk. Idempotent."""
        with self._lock:
            self._is_fenced = True
            for fetch in self._fetches:
                fetch.cancel()
            if self._tier is not None:
                self._tier.reset()

    def close(self) -> None:
        """Behind `fence`, in a thread: may wait for a disk."""
        if self._tier is not None:
            self._tier.close()
            self._counted(self.counts)

    async def _opened(self, until: float) -> DiskTier | None:
        """The tier, which is made at the first call, in a thread: it looks at all files."""
        if (disk := self._disk) is None:
            return None
        if self._making is None:
            make = partial(disk.open, self._stage.blocks, f"{self._digest} {self._caller}", self._caller, self._clock, self._wake)
            self._making = asyncio.create_task(asyncio.to_thread(make))
        await asyncio.wait({self._making}, timeout=until - self._loop.time())
        if not self._making.done():
            return None
        if (error := self._making.exception()) is not None:
            logger.warning("KV on the disk is of no use: %s", error)
            return None
        with self._lock:
            if self._is_fenced:
                return None
            self._tier = self._making.result()
        return self._tier

    async def _restore(self, tier: DiskTier, keys: Sequence[bytes], blocks: Sequence[BlockId], until: float) -> int:
        with self._lock:
            if self._is_fenced:
                return 0
            fetch = tier.fetch(keys, blocks)
        await self._until(lambda: fetch.is_over, until)
        fetch.end()
        self._stage.note_filled(blocks[: fetch.filled])
        return fetch.filled

    async def _keep(self, tier: DiskTier, asked: BlocksAsked, blocks: Sequence[BlockId], until: float) -> int:
        left, failed = set(blocks), tier.counts["failed"]

        def began(key: bytes, block: BlockId, parent: bytes | None) -> bool:
            with self._lock:
                return self._is_fenced or tier.keep(key, block, parent)

        def copied() -> bool:
            with self._lock:
                left.difference_update(tier.kept())
            return not left or self._is_fenced

        for one in zip(asked.keys, blocks, asked.parents or [None] * len(blocks), strict=True):
            if not await self._until(lambda: copied() or began(*one), until):  # noqa: B023  called before the next
                break
        if not await self._until(copied, until):
            # A disk that takes nothing. What waits for it is given up, so that its blocks are the caller's again.
            with self._lock:
                tier.reset()
        return max(0, len(blocks) - len(left) - (tier.counts["failed"] - failed))

    async def _move(self, use: BlocksUse, move: KvMove, keys: Sequence[bytes], blocks: Sequence[BlockId], until: float) -> BlocksDone:
        held, within_s = self._stage.blocks, until - self._loop.time()
        part = part_of(self._digest, held.numerics_id, held.kv_layout, held.block_size, held.layers, held.layer_bytes, self._n_layers)
        if self._mover is None or not held.are_whole or part.layout != move.layout:
            return BlocksDone(0)
        if use is BlocksUse.FETCH:
            with self._lock:
                if self._is_fenced:
                    return BlocksDone(0)
                fetch = self._mover.fetch(part, held, move, keys, blocks, within_s, self._wake)
                self._fetches.add(fetch)
            try:
                await self._until(lambda: fetch.is_over, until)
            finally:
                fetch.cancel()
                with self._lock:
                    self._fetches.discard(fetch)
            self._stage.note_filled(blocks[: fetch.filled])
            return BlocksDone(fetch.filled, fetch.is_wrong)
        if not (part.layers.start <= move.layers.start < move.layers.stop <= part.layers.stop):
            raise BadPipelineRequest("Layers are to be given that this session has not")

        def read(place: int, into: memoryview) -> bool:
            with self._lock:
                if not self._is_fenced:
                    held.export_block(blocks[place], into, move.layers)
                return not self._is_fenced

        return BlocksDone(await self._mover.give(replace(part, layers=move.layers), move, keys, read, within_s))

    def _alike(self, blocks: Sequence[BlockId]) -> int:
        with self._lock:
            return 0 if self._is_fenced else n_alike(self._stage.blocks, blocks)

    def _wake(self) -> None:
        """In any thread: something came of what was begun."""
        tell_loop(self._loop, self._came.set)

    async def _until(self, condition: Callable[[], bool], until: float) -> bool:
        """Wait for a condition, which is looked at whenever something came. Returns whether it holds."""
        while not condition():
            if self._is_fenced or (left := until - self._loop.time()) <= 0:
                return False
            self._came.clear()
            await came_within(self._came, min(left, LOOK_S))
        return True
