"""The KV of a pipeline on disks, and at other nodes: each span's blocks lie where the span runs, and count only as far as all spans have them.

Law: the engine's thread never waits: stages are asked in the event loop. A block is lent until every span has copied or filled its part of it. Where it is
not known what a stage does with one, the stage's route ends: then it does nothing more.
A stage's blocks follow from what stages before it computed, so the blocks of a route whose stages have other numerics than the head are neither kept nor
moved.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from paceline.core.clock import Clock
from paceline.core.errors import FleetError, PipelineStalled
from paceline.core.following import is_same_arithmetic
from paceline.core.generation import GenerationRequest
from paceline.core.ids import BlockId, NodeId, Trust
from paceline.core.model import ActivationDtype, LayerSpan
from paceline.engine.local import LayerRunner
from paceline.machine.kv_spans import KvMove
from paceline.machine.kv_tier import DiskFetch, DiskTier, KvDiskLimits
from paceline.store.kv_folder import BLOCK_COUNTS
from paceline.ways.pipeline.client import RemoteStage
from paceline.ways.pipeline.codec import KEY_BYTES, MAX_KEYS
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.route import BlocksAsked, BlocksDone, BlocksUse, PipelineFault
from paceline.ways.pipeline.executor.stage import StageBlocks
from paceline.ways.pipeline.routes.opening import FleetRoute

FIND_S: Final = 2.0
"""For a stage to say what it has, or whether blocks are alike. Raising it: a prompt is computed later where a stage does not say."""
KEEP_S: Final = 5.0
"""For a stage to copy blocks. Raising it: blocks can't be handed out for longer where a disk takes nothing."""
OPEN_S: Final = 60.0
"""For a stage to look at all its files, before it is first asked for a prompt's."""
RESTORE_S: Final = 5.0
RESTORE_BLOCK_S: Final = 0.02
"""For a stage to restore blocks: in all, and for each."""
MOST_KEEPING: Final = 64
"""Blocks that are being kept at a time. Raising it: more of the pool can't be handed out while they are copied."""


class StagesFetch:
    """Implements `engine.kv_source.KvFetch`: all spans are asked what they have, then each restores what all have. For the engine's thread."""

    def __init__(self, kv: StagesKv, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> None:
        self._kv, self._keys, self._blocks = kv, keys, blocks
        self._found = kv.ask_stages(BlocksAsked(BlocksUse.FIND, keys, (), FIND_S))
        self._own: DiskFetch | None = None
        self._restored: Future[BlocksDone] | None = None
        self._is_cancelled = self._is_over = False
        self._n = self.filled = 0
        self.given = None

    @property
    def is_over(self) -> bool:
        self._is_over = self._is_over or self._go_on()
        return self._is_over

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._own is not None:
            self._own.cancel()

    def _go_on(self) -> bool:
        """The next thing, if what came allows it. Returns whether there is none."""
        if self._restored is None:
            if not self._found.done():
                return False
            self._n = 0 if self._is_cancelled else self._found.result().n_blocks
            if not self._n:
                return True
            keys, blocks = self._keys[: self._n], self._blocks[: self._n]
            if self._kv.own is not None:
                self._own = self._kv.own.fetch(keys, blocks)
            self._kv.executor.forget_inputs(blocks)
            asked = BlocksAsked(BlocksUse.RESTORE, keys, blocks, RESTORE_S + RESTORE_BLOCK_S * len(blocks))
            self._restored = self._kv.ask_stages(asked)
        if self._own is not None and not self._own.is_over:
            return False
        if not self._restored.done():
            # What a route that broke leaves in the blocks is of no use: the next batch finds that it did, before it names them.
            return self._kv.is_broken
        filled = self._restored.result().n_blocks
        self.filled = filled if self._own is None else min(filled, self._own.filled)
        self._kv.everywhere.update(read=self.filled, missed=self._n - self.filled)
        return True


class StagesMove:
    """Implements `machine.kv_spans.MovedBlocks`: all stages fill their parts of blocks with what another node has, or compare them."""

    given = None

    def __init__(self, kv: StagesKv, answers: Future[BlocksDone]) -> None:
        self._kv, self._answers = kv, answers

    @property
    def filled(self) -> int:
        return self._answers.result().n_blocks if self._answers.done() else 0

    @property
    def is_wrong(self) -> bool:
        return self._answers.done() and self._answers.result().is_wrong

    @property
    def is_over(self) -> bool:
        # What a route that broke leaves in the blocks is of no use, as of `StagesFetch`.
        return self._answers.done() or not self._kv.spans

    def cancel(self) -> None:
        """Stages end by themselves: until they say that they did, they may write."""


class StagesKv:
    """Implements `engine.kv_source.KvSource`, and `machine.kv_spans.KvSpread`.

    Args:
        head: runs this machine's own layers, maybe none.
        limits: of what is kept on disks; None: nothing is.
        trust: of the fleet's nodes: a guest is told no names, by which it could check a guess of what was asked.
        wake: called, in other threads, when something came of what was asked.
    """

    def __init__(
        self,
        executor: PipelineExecutor,
        head: LayerRunner[Any],
        digest: str,
        dtype: ActivationDtype,
        folder: Path,
        limits: KvDiskLimits | None,
        clock: Clock,
        trust: Callable[[], Mapping[NodeId, Trust]],
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
    ) -> None:
        self.executor, self._head, self._digest, self._dtype = executor, head, digest, dtype
        self._folder, self._limits, self._clock = folder, limits, clock
        self._trust, self._loop, self._wake = trust, loop, wake
        self.own: DiskTier | None = None
        self._own_size = 0
        self._route = None
        """That what stands here is of."""
        self._asked: FleetRoute | None = None
        """The same, where all its stages keep blocks."""
        self._moving: FleetRoute | None = None
        """The same, where all its stages move blocks, and have those of any machine."""
        self.everywhere: Counter[str] = Counter()
        """Blocks, by what became of them on all machines."""
        self._users: Counter[BlockId] = Counter()
        """Of blocks that are being kept: the spans' machines that have not copied them, this one and the others."""
        self._free: deque[BlockId] = deque()
        """Those that are not to be copied at all."""
        self._batch: list[tuple[bytes, BlockId, bytes | None]] = []
        """To be told the stages."""
        self._sent: tuple[Future[BlocksDone], list[BlockId]] | None = None
        self._is_refused = False
        """Some of what stages were told last: they may lack what it stands behind."""
        self._look_at_route()

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        del request, n_writing
        self._look_at_route()
        if self._asked is None:
            return 0
        return min(MAX_KEYS, len(keys) if self.own is None else self.own.run_of(keys))

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> StagesFetch:
        return StagesFetch(self, keys, blocks)

    def keep(self, key: bytes, block: BlockId, parent: bytes | None = None) -> bool:
        self._look_at_route()
        if self._asked is None:
            self._free.append(block)
            return True
        if len(self._users) >= MOST_KEEPING or (self.own is not None and not self.own.keep(key, block, parent)):
            return False
        self._users[block] = 1 + (self.own is not None)
        self._batch.append((key, block, parent))
        return True

    def lacks(self, key: bytes) -> bool:
        return self._asked is not None and (self._is_refused or (self.own is not None and self.own.lacks(key)))

    def kept(self) -> Sequence[BlockId]:
        found = list(self._free)
        self._free.clear()
        copied = [] if self.own is None else list(self.own.kept())
        if self._sent is not None and self._sent[0].done():
            answer, blocks = self._sent
            copied += blocks
            failed = len(blocks) - answer.result().n_blocks
            self.everywhere.update(written=len(blocks) - failed, failed=failed)
            self._sent, self._is_refused = None, failed > 0
        for block in copied:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                found.append(block)
        if self._sent is None and self._batch:
            blocks, parents = [block for _, block, _ in self._batch], [parent for _, _, parent in self._batch]
            asked = BlocksAsked(BlocksUse.KEEP, [name for name, _, _ in self._batch], blocks, KEEP_S, parents=parents)
            self._sent = self.ask_stages(asked), blocks
            self._batch = []
        return found

    # ------------------------------------------------------------------------------------------------------- between nodes

    @property
    def spans(self) -> Sequence[LayerSpan]:
        """See `machine.kv_spans.KvSpread`."""
        route = self._moving
        return route.stages if route is not None and route is self.executor.route and route.fault() is None else ()

    @property
    def takes_prompts(self) -> bool:
        """See `machine.kv_spans.KvSpread`."""
        route = self._moving
        return route is not None and all(stage.opened.kv_under_way for stage in route.sessions)

    def fetch_parts(self, move: KvMove, keys: Sequence[bytes], blocks: Sequence[BlockId], within_s: float) -> StagesMove:
        """See `machine.kv_spans.KvSpread`."""
        self.executor.forget_inputs(blocks)
        return StagesMove(self, self.ask_stages(BlocksAsked(BlocksUse.FETCH, keys, blocks, within_s, move)))

    def compare_parts(self, blocks: Sequence[BlockId]) -> StagesMove:
        """See `machine.kv_spans.KvSpread`."""
        return StagesMove(self, self.ask_stages(BlocksAsked(BlocksUse.COMPARE, [bytes(KEY_BYTES)] * len(blocks), blocks, FIND_S)))

    def give_part(self, move: KvMove, keys: Sequence[bytes], blocks: Sequence[BlockId], within_s: float) -> Future[int]:
        """See `machine.kv_spans.KvSpread`."""

        async def give() -> int:
            route, layers, asked = self._moving, move.layers, BlocksAsked(BlocksUse.GIVE, keys, blocks, within_s, move)
            for session in () if route is None else route.sessions:
                span = session.request.layers
                if route is not None and span.start <= layers.start and layers.stop <= span.stop:
                    return (await self._answer(route, session, asked)).n_blocks
            return 0

        return asyncio.run_coroutine_threadsafe(give(), self._loop)

    @property
    def is_broken(self) -> bool:
        """The route that was asked is of no use any more."""
        return self._asked is None or self._asked.fault() is not None

    @property
    def counts(self) -> Mapping[str, int]:
        """Of this machine's part; where it has none, of those that all others have. None where nothing is kept."""
        if self.own is not None:
            return self.own.counts
        return {} if self._limits is None else {what: self.everywhere[what] for what in BLOCK_COUNTS}

    @property
    def kept_bytes(self) -> int:
        return 0 if self.own is None else self.own.kept_bytes

    def reset(self) -> None:
        # The route is closed: no stage reads or writes blocks that the next one leases.
        if self.own is not None:
            self.own.reset()
        self._users.clear()
        self._free.clear()
        self._batch, self._sent = [], None

    def close(self) -> None:
        """End. Idempotent."""
        if self.own is not None:
            self.own.close()

    def ask_stages(self, asked: BlocksAsked) -> Future[BlocksDone]:
        """Have every stage of the route do something; what all of them did."""
        route = self._moving if asked.use in (BlocksUse.FETCH, BlocksUse.COMPARE) else self._asked

        async def answers() -> BlocksDone:
            sessions = () if route is None else route.sessions
            return BlocksDone.of_all(await asyncio.gather(*(self._answer(route, each, asked) for each in sessions)))

        future = asyncio.run_coroutine_threadsafe(answers(), self._loop)
        future.add_done_callback(lambda _: self._wake())
        return future

    async def _answer(self, route: FleetRoute | None, session: RemoteStage, asked: BlocksAsked) -> BlocksDone:
        try:
            return await session.use_blocks(asked)
        except FleetError as error:
            if route is not None and asked.use not in (BlocksUse.FIND, BlocksUse.COMPARE):
                said = f"{session.node_id} does not say what it did with blocks: {error.message}"
                route.accuse(PipelineFault(session.node_id, PipelineStalled.code, said))
            return BlocksDone(0)

    def _look_at_route(self) -> None:
        """Go with the route that is in use."""
        route = self.executor.route
        if route is self._route:
            return
        self._route = route
        self._asked = self._moving = None
        if not isinstance(route, FleetRoute) or not self._is_alike(route):
            return
        trust = self._trust()
        if any(trust.get(stage.node_id, Trust.GUEST) is Trust.GUEST for stage in route.sessions):
            return
        size = self.executor.block_size
        moves = all(stage.opened.kv_moves and stage.opened.block_size == size for stage in route.sessions)
        if moves and size == self._head.block_size:
            self._moving = route
        if self._limits is None or not all(stage.opened.kv_blocks for stage in route.sessions):
            return
        self._asked = route
        own = self._head.layers
        if own and size != self._own_size:
            self.close()
            blocks = StageBlocks(self._head, own, 0, size // self._head.block_size)
            self.own = DiskTier(blocks, self._digest, self._folder, self._limits, self._clock, self._wake)
            self._own_size = size
        self.ask_stages(BlocksAsked(BlocksUse.FIND, [bytes(KEY_BYTES)], (), OPEN_S))

    def _is_alike(self, route: FleetRoute) -> bool:
        """Whether its blocks are those that one machine computes."""
        return self._dtype is ActivationDtype.BF16 and all(
            is_same_arithmetic(self._head.numerics_id, stage.numerics_id) for stage in route.stages
        )
