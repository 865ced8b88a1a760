"""KV of a session on its node's disk: kept and restored as the caller asks, found by no other caller, and untouched once the session has ended."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host.hosts import Hosting, Net, Route, User, batch_of, hosting, rows_of, wanted

from paceline.core.errors import BadPipelineRequest, FleetError, NotTrusted
from paceline.core.ids import NodeId
from paceline.machine.kv_tier import KvDiskLimits
from paceline.ways.pipeline.client import RemoteStage
from paceline.ways.pipeline.executor.route import BlocksAsked, BlocksUse
from paceline.ways.pipeline.host.session_kv import BUDGETS_A_DAY, CALLER_SHARE, StageDisk

KEYS = tuple(secrets.token_bytes(16) for _ in range(3))
WITHIN_S = 60.0


def disk(tmp_path: Path) -> StageDisk:
    return StageDisk(tmp_path / "kv", KvDiskLimits(1 << 30))


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def begun(a: Hosting, user: User, *filled: int, first: int = 0, stop: int = 3) -> tuple[RemoteStage, Route]:
    """A session that has filled blocks, and the way through it."""
    stage = await user.open(a, wanted(first, stop))
    route = await user.route((a, stage))
    for number, block in enumerate(filled or (0,)):
        await route.run(batch_of(number, rows=16, blocks=(block,), sequence=number), rows_of(16))
    return stage, route


async def used(
    stage: RemoteStage, use: BlocksUse, keys: Sequence[bytes], blocks: Sequence[int] = (), parents: Sequence[bytes | None] = ()
) -> int:
    """How many blocks came of it."""
    return (await stage.use_blocks(BlocksAsked(use, keys, blocks, WITHIN_S, parents=parents))).n_blocks


@in_loop
async def test_blocks_that_a_session_filled_are_kept_and_restored_by_the_callers_next(tmp_path: Path) -> None:
    net = Net()
    async with hosting(net, "a", disk=disk(tmp_path)) as a, User(net) as user, User(net, "other") as other:
        stage, _ = await begun(a, user, 2, 5)
        assert stage.opened.kv_blocks
        assert await used(stage, BlocksUse.FIND, KEYS) == 0
        assert await used(stage, BlocksUse.KEEP, KEYS[:2], (2, 5)) == 2
        runner = a.loads.runners[0]
        was = [bytearray(runner.block_bytes) for _ in range(2)]
        for data, block in zip(was, (2, 5), strict=True):
            runner.export_block(block, memoryview(data))
        await stage.close()
        await until(lambda: a.host.sessions == 0 and a.host.kept_blocks.get("written") == 2)

        stage, route = await begun(a, user, 0)
        assert await used(stage, BlocksUse.FIND, KEYS) == 2
        assert await used(stage, BlocksUse.RESTORE, KEYS[:2], (6, 1)) == 2
        assert [runner.kv[6], runner.kv[1]] == was
        # Alike are those that hold the same bytes, whatever their names.
        assert await used(stage, BlocksUse.COMPARE, KEYS[:2], (6, 1)) == 1
        runner.kv[1] = runner.kv[6]
        assert await used(stage, BlocksUse.COMPARE, KEYS[:2], (6, 1)) == 2
        runner.kv[1] = bytes(was[1])
        # A sequence may begin with them, and only with them.
        await route.run(batch_of(1, rows=1, first=32, blocks=(6, 1, 3), sequence=7), rows_of(1))
        with pytest.raises(FleetError):
            await route.run(batch_of(2, rows=1, first=16, blocks=(4, 3), sequence=8), rows_of(1))
        # Nothing of it for other callers, or other layers.
        for stranger, first in ((other, 0), (user, 1)):
            stage, _ = await begun(a, stranger, first=first)
            assert await used(stage, BlocksUse.FIND, KEYS) == 0


@in_loop
async def test_a_chain_that_has_no_room_is_kept_from_its_beginning_and_found_so_after_a_restart(tmp_path: Path) -> None:
    chain, other = ([secrets.token_bytes(16) for _ in range(8)] for _ in range(2))
    net, room = Net(), 5
    kept = StageDisk(tmp_path / "kv", KvDiskLimits(CALLER_SHARE * room * (48 + 8 * 3)))
    async with User(net) as user:
        async with hosting(net, "a", disk=kept) as a:
            stage, _ = await begun(a, user, *range(8))
            took = await used(stage, BlocksUse.KEEP, other, range(8), [None, *other[:-1]])
            assert await used(stage, BlocksUse.FIND, other) == room
            assert took < len(other)
            for first in (0, 2, 4, 6):  # what was used longer ago makes way from its end
                await used(stage, BlocksUse.KEEP, chain[first : first + 2], (first, first + 1), [None, *chain][first : first + 2])
            await stage.close()
            await until(lambda: a.host.sessions == 0)
        async with hosting(net, "b", disk=kept) as b:
            stage, _ = await begun(b, user, *range(8))
            assert await used(stage, BlocksUse.FIND, chain) == room
            # What was found is not lost to what follows it.
            await used(stage, BlocksUse.KEEP, chain[room:], range(room, 8), chain[room - 1 : -1])
            assert await used(stage, BlocksUse.FIND, chain) == room
            assert await used(stage, BlocksUse.RESTORE, chain[:room], range(room)) == room
    assert len(files_in(tmp_path)) == room


@in_loop
async def test_a_caller_has_its_share_of_a_disk_and_of_a_day(tmp_path: Path) -> None:
    net, room = Net(), 2
    kept = StageDisk(tmp_path / "kv", KvDiskLimits(CALLER_SHARE * room * (48 + 8 * 3)))
    chains = [[secrets.token_bytes(16) for _ in range(room)] for _ in range(BUDGETS_A_DAY + 2)]
    written: list[int] = []
    async with hosting(net, "a", disk=kept) as a, User(net) as user, User(net, "other") as other:
        theirs, _ = await begun(a, other, *range(room))
        assert await used(theirs, BlocksUse.KEEP, chains[0], range(room)) == room
        mine, _ = await begun(a, user, *range(room))
        for chain in chains:
            await used(mine, BlocksUse.KEEP, chain, range(room))
            done = room * (len(written) + 2)
            await until(lambda done=done: a.host.kept_blocks["written"] + a.host.kept_blocks["failed"] == done)
            written.append(await used(mine, BlocksUse.FIND, chain))
        assert written == [*[room] * BUDGETS_A_DAY, 0, 0]
        assert await used(theirs, BlocksUse.FIND, chains[0]) == room


def test_what_a_caller_may_write_begins_again_each_day(tmp_path: Path) -> None:
    clock, kept = FakeClock(), StageDisk(tmp_path, KvDiskLimits(CALLER_SHARE * 100))
    for _ in range(2):
        assert [kept._may_write(NodeId("a"), clock, 100) for _ in range(BUDGETS_A_DAY + 1)] == [*[True] * BUDGETS_A_DAY, False]
        assert kept._may_write(NodeId("b"), clock, 100)
        clock.advance(86400)


@in_loop
async def test_what_a_session_has_not_filled_is_not_kept_and_what_it_has_not_leased_is_not_touched(tmp_path: Path) -> None:
    net = Net()
    async with hosting(net, "a", disk=disk(tmp_path)) as a, User(net) as user:
        stage, _ = await begun(a, user, 2)
        for use, keys, blocks in (
            (BlocksUse.KEEP, KEYS[:1], (3,)),
            (BlocksUse.KEEP, KEYS[:2], (2, 2)),
            (BlocksUse.RESTORE, KEYS[:1], (8,)),
            (BlocksUse.COMPARE, KEYS[:2], (0, 3)),
            (BlocksUse.RESTORE, KEYS[:2], (1,)),
            (BlocksUse.FIND, (b"short",), ()),
        ):
            with pytest.raises(BadPipelineRequest):
                await used(stage, use, keys, blocks)
        with pytest.raises(BadPipelineRequest):
            await used(stage, BlocksUse.KEEP, KEYS[:1], (2,), parents=(None, KEYS[0]))
        assert not files_in(tmp_path)
        waiting = await user.open(a)  # not connected
        with pytest.raises(BadPipelineRequest):
            await used(waiting, BlocksUse.FIND, KEYS)


@in_loop
async def test_a_node_without_a_disk_says_so(tmp_path: Path) -> None:
    net = Net()
    async with hosting(net, "a", disk=None) as a, User(net, "user") as user:
        stage, _ = await begun(a, user)
        assert not stage.opened.kv_blocks
        for use, blocks in ((BlocksUse.FIND, ()), (BlocksUse.KEEP, (0,))):
            with pytest.raises(BadPipelineRequest):
                await used(stage, use, KEYS[:1], blocks)


@in_loop
async def test_a_guest_has_no_layers_run_and_leaves_no_blocks(tmp_path: Path) -> None:
    net = Net()
    async with hosting(net, "a", disk=disk(tmp_path)) as a, User(net, "guest") as guest:
        with pytest.raises(NotTrusted):
            await begun(a, guest)
    assert not files_in(tmp_path)
