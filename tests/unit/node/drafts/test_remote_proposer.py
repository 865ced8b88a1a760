"""A proposer on another node, called as if it were here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.node.drafts.proposers import Breaks, Hangs, Scripted, TooLong
from tests.unit.node.fleet.nodes import in_loop, make_node, running, until

from paceline.core.errors import NodeUnreachable, RemoteProposerError
from paceline.engine.drafts import NGRAM, BlockProposal, Proposer
from paceline.node.fleet import FleetNode
from paceline.testing.fleets import TestFleet
from paceline.transport.channels import Purpose
from paceline.transport.proposer_desk import MAX_BLOCK
from paceline.transport.remote_proposer import RemoteProposer

VOCAB = 100


class Remote:
    """Node b, and proposers on it for node a."""

    def __init__(self, a: FleetNode, b: FleetNode) -> None:
        self.b = b
        self.reachable = True
        self._a = a

    def proposer(self, model_id: str = "m", deadline_s: float = 20.0) -> RemoteProposer:
        return RemoteProposer(asyncio.get_running_loop(), self._channel, "b", model_id, VOCAB, deadline_s=deadline_s)  # type: ignore[arg-type]

    def _channel(self) -> object:
        if not self.reachable:
            raise NodeUnreachable("b is not in this fleet's view")
        return self._a.pool.get(Purpose.DRAFTS, self.b.addresses[0], self.b.identity.member)


@asynccontextmanager
async def remote(root: Path, **proposers: Proposer) -> AsyncIterator[Remote]:
    fleet = TestFleet()
    a, b = make_node(fleet, root, "a"), make_node(fleet, root, "b")
    async with running(b):
        for model_id, proposer in proposers.items():
            b.desk.add(model_id, proposer)
        yield Remote(a, b)
        await a.pool.close()


async def propose(proposer: RemoteProposer, committed: Sequence[int], block_size: int = 3, num_steps: int = 0) -> BlockProposal:
    return await asyncio.to_thread(proposer.propose_block, committed, block_size, num_steps)


@in_loop
async def test_it_drafts_as_if_it_were_here(tmp_path: Path) -> None:
    scripted = Scripted(7, 8, 9, 10)
    async with remote(tmp_path, m=scripted) as there:
        proposer, desk = there.proposer(), there.b.desk
        assert await propose(proposer, [1, 2, 3]) == BlockProposal((7, 8, 9), 1, 2, 3)
        assert await propose(proposer, [1, 2, 3, 7, 5], 2) == BlockProposal((7, 8), 1, 2, 3)
        assert desk.tokens == 5  # one session, told what was new
        desk.end("a", [key[2] for key in desk._kept])
        assert (await propose(proposer, [1, 2, 9], 1)).token_ids == (7,)
        assert scripted.texts == [(1, 2, 3), (1, 2, 3, 7, 5), (1, 2, 9)]
        stats = proposer.stats
        assert (stats.blocks, stats.tokens, stats.diffusion_steps, stats.forward_passes, stats.peak_activation_bytes) == (3, 6, 3, 6, 3)
        assert stats.failures == 0
        # What it told is forgotten with it, and it may be called again.
        await asyncio.to_thread(proposer.close)
        await asyncio.to_thread(proposer.close)
        await until(lambda: (desk.sessions, desk.tokens) == (0, 0))
        assert (await propose(proposer, [1, 2, 9, 4], 1)).token_ids == (7,)
        assert scripted.texts[-1] == (1, 2, 9, 4)
        assert (await propose(there.proposer(NGRAM), [1, 2, 3, 4, 1, 2])).token_ids == (3, 4, 1)  # which is on every node


class Once(Scripted):
    """Drafts as another does, and well from then on."""

    def __init__(self, bad: Proposer) -> None:
        super().__init__(5)
        self._bad = [bad]

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        proposer = self._bad.pop() if self._bad else super()
        return proposer.propose_block(committed, block_size, num_steps)


@in_loop
async def test_what_is_no_draft_is_an_error_and_the_next_block_may_be_had(tmp_path: Path) -> None:
    async with remote(tmp_path, long=Once(TooLong()), unknown=Once(Scripted(VOCAB)), breaks=Once(Breaks()), good=Scripted(5)) as there:
        desk = there.b.desk
        for model_id, block_size, status in (
            ("long", 3, "DATA_LOSS"),
            ("unknown", 3, "DATA_LOSS"),
            ("breaks", 3, "UNKNOWN"),
            ("good", 0, "INVALID_ARGUMENT"),
            ("good", MAX_BLOCK + 1, "INVALID_ARGUMENT"),
            ("later", 3, "NOT_FOUND"),
        ):
            proposer = there.proposer(model_id)
            with pytest.raises(RemoteProposerError) as failed:
                await propose(proposer, [1, 2], block_size)
            assert failed.value.status == status
            assert proposer.stats.failures == 1
            await until(lambda: desk.sessions == 0)
            if model_id not in desk.model_ids:
                desk.add(model_id, Scripted(5))
            assert (await propose(proposer, [1, 2])).token_ids == (5,)
            await asyncio.to_thread(proposer.close)
            await until(lambda: desk.sessions == 0)


@in_loop
async def test_who_does_not_answer_is_told_as_such(tmp_path: Path) -> None:
    hangs = Hangs(5)
    async with remote(tmp_path, m=Scripted(5), hangs=hangs) as there:
        with pytest.raises(RemoteProposerError) as failed:
            await propose(there.proposer("hangs", deadline_s=0.1), [1, 2])
        assert failed.value.status == "DEADLINE_EXCEEDED"
        hangs.go.set()
        proposer = there.proposer()
        await propose(proposer, [1])
        await there.b.stop()
        with pytest.raises(RemoteProposerError) as failed:
            await propose(proposer, [1, 2])
        assert failed.value.status == "UNAVAILABLE"
        there.reachable = False
        with pytest.raises(RemoteProposerError, match="not in this fleet's view"):
            await propose(proposer, [1, 2])
