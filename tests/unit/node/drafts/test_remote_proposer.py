"""A proposer on another node, called as if it were here; and what its node refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.node.drafts.proposers import Breaks, Hangs, Scripted, TooLong
from tests.unit.node.fleet.nodes import in_loop, make_node, running

from paceline.core.errors import InvalidRequest, ModelNotFound, Overloaded, RemoteProposerError
from paceline.engine.drafts import NGRAM, BlockProposal, Proposer
from paceline.node.fleet import FleetNode
from paceline.testing.fleets import TestFleet
from paceline.transport import proposer_desk
from paceline.transport.channels import Purpose
from paceline.transport.proposer_desk import MAX_BLOCK, MAX_STEPS, BlockAsk, ProposerDesk
from paceline.transport.remote_proposer import RemoteProposer

VOCAB = 100


@asynccontextmanager
async def remote(
    root: Path, proposer: Proposer, model_id: str = "m", deadline_s: float = 20.0
) -> AsyncIterator[tuple[RemoteProposer, FleetNode]]:
    fleet = TestFleet()
    a, b = make_node(fleet, root, "a"), make_node(fleet, root, "b")
    async with running(b):
        b.desk.add("m", proposer)

        def channel() -> object:
            return a.pool.get(Purpose.DRAFTS, b.addresses[0], b.identity.member)

        yield RemoteProposer(asyncio.get_running_loop(), channel, "b", model_id, VOCAB, deadline_s=deadline_s), b  # type: ignore[arg-type]
        await a.pool.close()


async def propose(proposer: RemoteProposer, committed: Sequence[int], block_size: int = 3, num_steps: int = 0) -> BlockProposal:
    return await asyncio.to_thread(proposer.propose_block, committed, block_size, num_steps)


@in_loop
async def test_it_drafts_as_if_it_were_here(tmp_path: Path) -> None:
    scripted = Scripted(7, 8, 9, 10)
    async with remote(tmp_path, scripted) as (proposer, b):
        assert await propose(proposer, [1, 2, 3]) == BlockProposal((7, 8, 9), 1, 2, 3)
        assert await propose(proposer, [1, 2, 3, 7, 5], 2) == BlockProposal((7, 8), 1, 2, 3)
        assert b.desk.tokens == 5  # one session, told what was new
        b.desk.end("a", [key[2] for key in b.desk._kept])
        assert (await propose(proposer, [1, 2, 9], 1)).token_ids == (7,)
        assert scripted.texts == [(1, 2, 3), (1, 2, 3, 7, 5), (1, 2, 9)]
        stats = proposer.stats
        assert (stats.blocks, stats.tokens, stats.diffusion_steps, stats.forward_passes, stats.peak_activation_bytes) == (3, 6, 3, 6, 3)
        assert stats.failures == 0


@in_loop
async def test_prompt_lookup_is_on_every_node(tmp_path: Path) -> None:
    async with remote(tmp_path, Scripted(), NGRAM) as (proposer, _):
        assert (await propose(proposer, [1, 2, 3, 4, 1, 2])).token_ids == (3, 4, 1)


@pytest.mark.parametrize(
    ("bad", "model_id", "block_size", "status"),
    [
        (TooLong(), "m", 3, "DATA_LOSS"),
        (Scripted(VOCAB), "m", 3, "DATA_LOSS"),
        (Breaks(), "m", 3, "UNKNOWN"),
        (Scripted(), "gone", 3, "NOT_FOUND"),
        (Scripted(), "m", 0, "INVALID_ARGUMENT"),
        (Scripted(), "m", MAX_BLOCK + 1, "INVALID_ARGUMENT"),
    ],
)
def test_what_is_no_draft_is_an_error_and_the_next_block_may_be_had(
    tmp_path: Path, bad: Proposer, model_id: str, block_size: int, status: str
) -> None:
    @in_loop
    async def test() -> None:
        async with remote(tmp_path, bad, model_id) as (proposer, b):
            with pytest.raises(RemoteProposerError) as failed:
                await propose(proposer, [1, 2], block_size)
            assert failed.value.status == status
            assert proposer.stats.failures == 1
            b.desk.add(model_id, Scripted(5))
            assert (await propose(proposer, [1, 2])).token_ids == (5,)

    test()


@in_loop
async def test_a_deadline_is_kept(tmp_path: Path) -> None:
    hangs = Hangs(5)
    async with remote(tmp_path, hangs, deadline_s=0.1) as (proposer, _):
        with pytest.raises(RemoteProposerError) as failed:
            await propose(proposer, [1, 2])
        assert failed.value.status == "DEADLINE_EXCEEDED"
        hangs.go.set()


@in_loop
async def test_a_node_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    async with remote(tmp_path, Scripted(5)) as (proposer, b):
        await propose(proposer, [1])
        await b.stop()
        with pytest.raises(RemoteProposerError) as failed:
            await propose(proposer, [1, 2])
        assert failed.value.status == "UNAVAILABLE"


def ask(session: int, first: int, *token_ids: int, **changed: int) -> BlockAsk:
    return BlockAsk("m", session, first, token_ids, changed.get("block_size", 3), changed.get("num_steps", 0))


@in_loop
async def test_a_desk_keeps_no_more_than_it_may(tmp_path: Path) -> None:
    scripted = Scripted(5)
    desk = ProposerDesk({"m": scripted}, most_sessions=2, most_tokens=10)
    for session in (1, 2, 3):
        assert await desk.propose("a", ask(session, 0, 1, 2, 3)) is not None
    assert (desk.sessions, desk.tokens) == (2, 6)
    assert await desk.propose("a", ask(1, 3, 4)) is None  # forgotten
    assert await desk.propose("b", ask(2, 3, 4)) is None  # another caller's
    assert await desk.propose("a", ask(2, 4, 4)) is None  # nobody told the fourth
    assert await desk.propose("a", ask(2, 2, *range(9))) is not None
    assert (desk.sessions, desk.tokens) == (1, 11)  # one is kept in any case
    assert await desk.propose("a", ask(0, 0, 1)) is not None  # complete in itself, and not kept
    assert (desk.sessions, desk.tokens) == (1, 11)
    desk.end("a", [2, 77])
    assert (desk.sessions, desk.tokens) == (0, 0)
    desk.close()
    with pytest.raises(ModelNotFound):
        await desk.propose("a", ask(1, 0, 1))


@in_loop
async def test_a_desk_refuses_what_cannot_be_meant(tmp_path: Path) -> None:
    desk = ProposerDesk({"m": Scripted(5)})
    for wrong in (ask(1, 0, 1, block_size=0), ask(1, 0, 1, num_steps=MAX_STEPS + 1), ask(0, 4, 1), ask(1, proposer_desk.MAX_COMMITTED, 1)):
        with pytest.raises(InvalidRequest):
            await desk.propose("a", wrong)
    desk.close()


@in_loop
async def test_a_desk_drops_what_nobody_waits_for_and_refuses_a_crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer_desk, "MOST_WAITING", 3)
    hangs = Hangs(5)
    desk = ProposerDesk({"m": hangs})
    asked = [asyncio.create_task(desk.propose("a", ask(session, 0, session))) for session in (1, 2, 3)]
    await asyncio.to_thread(hangs.begun.wait, 20)
    with pytest.raises(Overloaded):
        await desk.propose("a", ask(4, 0, 4))
    asked[1].cancel()
    await asyncio.gather(asked[1], return_exceptions=True)
    hangs.go.set()
    assert await asked[0] == await asked[2] == BlockProposal((5,), 1, 2, 3)
    assert hangs.texts == [(1,), (3,)]
    desk.close()
