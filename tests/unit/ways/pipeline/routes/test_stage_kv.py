"""KV of a pipeline on its stages' disks: what a stage's disk has no room for is the end of a chain, and what it lost of one in memory is offered again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
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


async def over(a: Hosting, user: User, folder: Path, dtype: ActivationDtype = ActivationDtype.BF16, own: str = "counting") -> StagesKv:
    """A machine without layers of its own, whose model's lie on one stage: a session that has filled its blocks."""
    session, way = await begun(a, user, *BLOCKS, first=STAGE.start, stop=STAGE.stop)
    stage = RouteStage(a.node_id, STAGE, "shard", "counting", holds_identity=True)
    loop = asyncio.get_running_loop()
    executor: Any = SimpleNamespace(
        route=FleetRoute([stage], 16, [session], way.sink, way.source, loop), block_size=16, forget_inputs=lambda _: None
    )
    head: Any = SimpleNamespace(layers=LayerRange(0, 0), block_size=16, numerics_id=own)
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
    disk = StageDisk(tmp_path / "disk", KvDiskLimits(CALLER_SHARE * room * FILE))
    async with User(net) as user:
        async with hosting(net, "a", disk=disk) as a:
            kv = await over(a, user, tmp_path)
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
            assert await found(await over(a, user, tmp_path), CHAIN) == room


@pytest.mark.parametrize(
    ("dtype", "own"), [(ActivationDtype.FP16, "counting"), (ActivationDtype.BF16, "other"), (ActivationDtype.BF16, "")]
)
@in_loop
async def test_blocks_that_no_one_machine_computes_alike_are_not_kept(tmp_path: Path, dtype: ActivationDtype, own: str) -> None:
    """An unlike stage has blocks on its disk under exact keys, which another pipeline kept there."""
    net, disk = Net(), StageDisk(tmp_path / "disk", KvDiskLimits(CALLER_SHARE * 5 * FILE))
    async with User(net) as user, hosting(net, "a", disk=disk) as a:
        kv = await over(a, user, tmp_path)
        await keep(kv, CHAIN[:3])
        assert await found(kv, CHAIN[:3]) == 3
        unlike = await over(a, user, tmp_path, dtype, own)
        await keep(unlike, OTHER[:3])
        assert await found(unlike, CHAIN[:3]) == 0
        assert await found(kv, OTHER[:3]) == 0
