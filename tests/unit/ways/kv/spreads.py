"""Nodes that share KV of a model whose layers lie on several of them: a layer is a token's place in a block, so that each cut of a block is a part of it,
and whatever part is missing, another's or damaged changes the answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.fleets import TestFleet
from tests.fakes.null_backend import NullRunner
from tests.unit.net.member.nodes import until
from tests.unit.ways.kv.sharers import DIGEST, SLOW, Sharer

from paceline.core.clock import SystemClock
from paceline.core.errors import FleetError
from paceline.core.generation import GenerationRequest
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange, LayerSpan
from paceline.engine.kv_fetch import KvFetch
from paceline.machine.kv_spans import KvMove
from paceline.machine.kv_tier import part_of
from paceline.ways.kv.source import PeerKv
from paceline.ways.pipeline.executor.route import BlocksAsked, BlocksDone, BlocksUse
from paceline.ways.pipeline.host.session_kv import SessionKv
from paceline.ways.pipeline.routes.stage_kv import StagesMove

WHOLE = LayerRange(0, 4)
SLOT_BYTES = 8


@dataclass
class Held:
    """What some layers have of a runner's blocks: implements what is used of a `LayerRunner`, and of a `Stage` and its blocks."""

    runner: NullRunner
    layers: LayerRange
    written: list[BlockId] = field(default_factory=list[BlockId])

    numerics_id, kv_layout, block_size, are_whole, layer_bytes = "null", "null", 4, True, SLOT_BYTES

    @property
    def n_blocks(self) -> int:
        return self.runner.n_blocks

    @property
    def block_bytes(self) -> int:
        return SLOT_BYTES * len(self.layers)

    @property
    def blocks(self) -> Held:
        return self

    def check_blocks(self, blocks: Sequence[int], *, full: bool) -> None:
        """All are its."""

    def note_filled(self, blocks: Sequence[int]) -> None:
        """Nothing is made of it."""

    def _of(self, block: BlockId, part: LayerRange | None) -> memoryview:
        """Where that part of a block lies: other parts are written meanwhile, by other threads."""
        part = part or self.layers
        assert self.layers.start <= part.start < part.stop <= self.layers.stop, f"{part} of {self.layers}"
        return memoryview(self.runner._kv[block, part.start : part.stop]).cast("B")  # pyright: ignore[reportPrivateUsage]

    def export_block(self, block: BlockId, into: memoryview, part: LayerRange | None = None) -> None:
        into[:] = self._of(block, part)

    def import_block(self, block: BlockId, data: memoryview, part: LayerRange | None = None) -> None:
        self._of(block, part)[:] = data
        self.written.append(block)


class Stage:
    """One span at a host."""

    def __init__(self, host: Sharer, first: Sharer, layers: LayerRange) -> None:
        self.host, self.held = host, Held(first.bench.runner, layers)
        self.kv = SessionKv(
            self.held, DIGEST, len(WHOLE), first.node_id, None, host.sharing.moves, SystemClock(), lambda _: None  # type: ignore[arg-type]
        )  # fmt: skip
        self._lost = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    async def use(self, asked: BlocksAsked) -> BlocksDone:
        """As `StagesKv` asks one of its route's."""
        done, lost = asyncio.create_task(self.kv.use(asked)), asyncio.create_task(self._lost.wait())
        await asyncio.wait({done, lost}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if self.is_lost:  # before it was asked, or meanwhile: its answer does not come
            raise FleetError("the session is over")
        return done.result()

    def lose(self) -> None:
        """Its machine is gone, or its session over: it touches no block any more."""
        self._lost.set()
        self.kv.fence()


class Route:
    """Implements `machine.kv_spans.KvSpread`: stages that others hold."""

    counts: Mapping[str, int] = {}
    kept_bytes = 0
    takes_prompts = True

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self.stages, self.let_go = list(stages), list[BlockId]()
        self.loop = asyncio.get_running_loop()

    @property
    def spans(self) -> Sequence[LayerSpan]:
        lost = any(stage.is_lost for stage in self.stages)
        return () if lost else [LayerSpan(stage.host.node_id, stage.held.layers) for stage in self.stages]

    def fetch_parts(self, move: KvMove, keys: Sequence[bytes], blocks: Sequence[BlockId], within_s: float) -> StagesMove:
        async def ask(stage: Stage) -> BlocksDone:
            try:
                return await stage.use(BlocksAsked(BlocksUse.FETCH, keys, blocks, within_s, move))
            except FleetError:
                return BlocksDone(0)

        async def answers() -> BlocksDone:
            return BlocksDone.of_all(await asyncio.gather(*map(ask, self.stages)))

        asked = asyncio.run_coroutine_threadsafe(answers(), self.loop)
        asked.add_done_callback(lambda _: self.wake())
        return StagesMove(self, asked)  # type: ignore[arg-type]

    def compare_parts(self, blocks: Sequence[BlockId]) -> KvFetch:
        async def answers() -> BlocksDone:
            keys = [bytes(16)] * len(blocks)
            asked = BlocksAsked(BlocksUse.COMPARE, keys, tuple(blocks), 5.0)
            return BlocksDone.of_all([await stage.kv.use(asked) for stage in self.stages])

        asked = asyncio.run_coroutine_threadsafe(answers(), self.loop)
        asked.add_done_callback(lambda _: self.wake())
        return StagesMove(self, asked)  # type: ignore[arg-type]

    def give_part(self, move: KvMove, keys: Sequence[bytes], blocks: Sequence[BlockId], within_s: float) -> Future[int]:
        async def give() -> int:
            for stage in self.stages:
                span = stage.held.layers
                if not stage.is_lost and span.start <= move.layers.start and move.layers.stop <= span.stop:
                    try:
                        return (await stage.use(BlocksAsked(BlocksUse.GIVE, keys, blocks, within_s, move))).n_blocks
                    except FleetError:
                        return 0
            return 0

        return asyncio.run_coroutine_threadsafe(give(), self.loop)

    def wake(self) -> None:
        """Set by the engine's."""

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        return 0

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> KvFetch:
        raise AssertionError("disks have nothing")

    def keep(self, key: bytes, block: BlockId, parent: bytes | None = None) -> bool:
        self.let_go.append(block)
        return True

    def lacks(self, key: bytes) -> bool:
        return False

    def kept(self) -> Sequence[BlockId]:
        let_go, self.let_go = self.let_go, []
        return let_go

    def reset(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        for stage in self.stages:
            stage.lose()


class Spread(Sharer):
    """A node with an engine, of which it holds the first layers: all, or as many as are left by its stages."""

    def __init__(self, *of: Any, own: LayerRange = WHOLE, **how: Any) -> None:
        self._own, self.route = own, Route()
        super().__init__(*of, **how)

    def _made(self, runner: NullRunner) -> PeerKv:
        held: Any = Held(runner, self._own)
        alone = self._own == WHOLE
        whole = part_of(DIGEST, "null", "null", 4, WHOLE, SLOT_BYTES, len(WHOLE))
        self.kv = PeerKv(held, DIGEST, None if alone else self.route, self.loans, self._came.set, None if alone else whole)
        self.route.wake = self._came.set  # type: ignore[method-assign]
        return self.kv

    def stages_at(self, *stages: tuple[Sharer, LayerRange]) -> None:
        """Where the other layers lie from now on."""
        for stage in self.route.stages:
            stage.lose()
        self.route.stages = [Stage(host, self, layers) for host, layers in stages]

    @property
    def is_at_rest(self) -> bool:
        """Nothing is lent, asked for, served or moved."""
        inside: Any = self.sharing
        moving = Counter(bool(stage.kv._fetches) for stage in self.route.stages)  # pyright: ignore[reportPrivateUsage]
        return not (self.loans.out or inside._asking or inside._servicer._served.total() or inside._servicer._senders or moving[True])


@asynccontextmanager
async def spreads(
    root: Path, check_every: int = 512, speeds: Mapping[str, float] | None = None, **own: LayerRange
) -> AsyncGenerator[list[Spread]]:
    """Nodes of one fleet, and which layers each holds of the model that it answers with.

    Args:
        speeds: tokens of prompts a second, as cards say, where that is not slow.
    """
    fleet, found = TestFleet(), list[Spread]()
    try:
        for name, layers in own.items():
            found.append(
                Spread(
                    fleet,
                    root,
                    name,
                    *(one.node for one in found),
                    own=layers,
                    check_every=check_every,
                    speed=(speeds or {}).get(name, SLOW),
                )
            )
            await found[-1].start()
        for one in found:
            await until(lambda one=one: len(one.node.view().ids) == len(found))
        yield found
    finally:
        await asyncio.gather(*(one.stop() for one in found))
