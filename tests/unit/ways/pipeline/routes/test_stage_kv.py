"""KV of a pipeline on its stages' disks: what a stage's disk has no room for is the end of a chain, and what it lost of one in memory is offered again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.hosts import DIGEST, Hosting, Net, User, hosting
from tests.unit.ways.pipeline.host.test_session_kv import begun

from paceline.core.clock import SystemClock
from paceline.core.ids import BlockId, Trust
from paceline.core.model import ActivationDtype, LayerRange
from paceline.machine.kv_tier import KvDiskLimits
from paceline.ways.pipeline.executor.route import RouteStage
from paceline.ways.pipeline.host.session_kv import CALLER_SHARE, StageDisk
from paceline.ways.pipeline.routes.opening import FleetRoute
from paceline.ways.pipeline.routes.stage_kv import StagesKv

CHAIN, OTHER = ([secrets.token_bytes(16) for _ in range(8)] for _ in range(2))
BLOCKS = [BlockId(block) for block in range(8)]
STAGE = LayerRange(0, 3)
FILE = 48 + 8 * len(STAGE)


async def over(a: Hosting, user: User, folder: Path, dtype: ActivationDtype) -> StagesKv:
    """A machine without layers of its own, whose model's lie on one stage: a session that has filled its blocks."""
    session, way = await begun(a, user, *BLOCKS, first=STAGE.start, stop=STAGE.stop)
    stage = RouteStage(a.node_id, STAGE, "shard", "counting", holds_identity=True)
    loop = asyncio.get_running_loop()
    executor: Any = SimpleNamespace(
        route=FleetRoute([stage], 16, [session], way.sink, way.source, loop), block_size=16, forget_inputs=lambda _: None
    )
    head: Any = SimpleNamespace(layers=LayerRange(0, 0), block_size=16, numerics_id="counting")
    trust = {a.node_id: Trust.MEMBER}
    return StagesKv(executor, head, DIGEST, dtype, folder, KvDiskLimits(1 << 30), SystemClock(), lambda: trust, loop, lambda: None)


async def keep(kv: StagesKv, chain: Sequence[bytes], first: int = 0) -> None:
    """All from one of its blocks on, and what becomes of them is known."""
    let_go = list[BlockId]()
    for place, key in list(enumerate(chain))[first:]:
        assert kv.keep(key, BLOCKS[place], chain[place - 1] if place else None)
    while len(let_go) < len(chain) - first:
        await until(lambda: bool(let_go.extend(kept := kv.kept()) or kept))


async def found(kv: StagesKv, chain: Sequence[bytes]) -> int:
    fetch = kv.fetch(chain, BLOCKS[: len(chain)])
    await until(lambda: fetch.is_over)
    return fetch.filled


@in_loop
async def test_a_stage_whose_disk_is_full_keeps_beginnings_and_is_offered_again_what_it_lost(tmp_path: Path) -> None:
    net, room = Net(), 5
    for dtype in (ActivationDtype.BF16, ActivationDtype.FP16):  # where the route is part of a block's name, too
        disk = StageDisk(tmp_path / dtype, KvDiskLimits(CALLER_SHARE * room * FILE))
        async with User(net) as user:
            async with hosting(net, "a", disk=disk) as a:
                kv = await over(a, user, tmp_path, dtype)
                await keep(kv, CHAIN)
                assert await found(kv, CHAIN) == room
                assert kv.lacks(CHAIN[-1]), "the stage has no room for all of it"
                assert kv.counts["written"] + kv.counts["failed"] == len(CHAIN)
                await keep(kv, CHAIN[:room])
                assert not kv.lacks(CHAIN[room - 1])
                await keep(kv, OTHER)
                assert (await found(kv, OTHER), await found(kv, CHAIN)) == (room, 0)
                await keep(kv, CHAIN[: room + 1], first=room)
                assert kv.lacks(CHAIN[room]), "none is kept behind one that is gone"
                await keep(kv, CHAIN)
                assert await found(kv, CHAIN) == room
            async with hosting(net, "a", disk=disk) as a:
                assert await found(await over(a, user, tmp_path, dtype), CHAIN) == room
