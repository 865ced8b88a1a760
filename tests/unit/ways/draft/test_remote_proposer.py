"""A proposer on another node, called as if it were here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.unit.net.member.nodes import until, until_seen
from tests.unit.ways.draft.fleet import VOCAB, DraftFleet, on_fleet
from tests.unit.ways.draft.proposers import Breaks, Floods, Hangs, Scripted, TooLong

from paceline.core.errors import RemoteProposerError
from paceline.engine.drafts import NGRAM, BlockProposal, Proposer
from paceline.net.channels import MAX_BLOCK_BYTES
from paceline.net.wire import propose_pb2
from paceline.ways.draft.desk import MAX_BLOCK
from paceline.ways.draft.finding import FleetLines
from paceline.ways.draft.line import MOST_BRANCHES, RemoteProposer, read_block


def remote(fleet: DraftFleet, model_id: str, deadline_s: float = 20.0) -> RemoteProposer:
    """That model of node b0, called from node a."""
    node_id, lines = fleet.others[0].node_id, FleetLines(fleet.a)
    return RemoteProposer(asyncio.get_running_loop(), lambda: lines.channel(node_id), node_id, model_id, VOCAB, deadline_s=deadline_s)


async def propose(proposer: RemoteProposer, committed: Sequence[int], block_size: int = 3, num_steps: int = 0) -> BlockProposal:
    return await asyncio.to_thread(proposer.propose_block, committed, block_size, num_steps)


@on_fleet
async def test_it_drafts_as_if_it_were_here(fleet: DraftFleet) -> None:
    desk, scripted = fleet.others[0].desk, Scripted(7, 8, 9, 10)
    desk.add("scripted", scripted)
    proposer = remote(fleet, "scripted")
    assert await propose(proposer, [1, 2, 3]) == BlockProposal((7, 8, 9), 1, 2, 3)
    assert await propose(proposer, [1, 2, 3, 7, 5], 2) == BlockProposal((7, 8), 1, 2, 3)
    assert desk.tokens == 5  # one session, told what was new
    desk.end("a", [key[2] for key in desk._kept])
    assert (await propose(proposer, [1, 2, 9], 1)).token_ids == (7,)
    assert scripted.texts == [(1, 2, 3), (1, 2, 3, 7, 5), (1, 2, 9)]
    stats = proposer.stats
    assert (stats.blocks, stats.tokens, stats.diffusion_steps, stats.forward_passes, stats.peak_activation_bytes) == (3, 6, 3, 6, 3)
    assert stats.failures == 0


@on_fleet
async def test_what_it_told_is_forgotten_when_it_is_closed(fleet: DraftFleet) -> None:
    desk, proposer = fleet.others[0].desk, remote(fleet, NGRAM)  # which is on every node
    for text in ([1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 9, 1, 2]):
        assert (await propose(proposer, text, 2)).token_ids == (3, 4)
        assert any(key[1] == NGRAM for key in desk._kept)
        await asyncio.to_thread(proposer.close)
        await asyncio.to_thread(proposer.close)
        await until(lambda: not any(key[1] == NGRAM for key in desk._kept))


class Once(Scripted):
    """Drafts as another does, and well from then on."""

    def __init__(self, bad: Proposer) -> None:
        super().__init__(5)
        self._bad = [bad]

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        proposer = self._bad.pop() if self._bad else super()
        return proposer.propose_block(committed, block_size, num_steps)


@on_fleet
async def test_what_is_no_draft_is_an_error_and_the_next_block_may_be_had(fleet: DraftFleet) -> None:
    desk = fleet.others[0].desk
    for model_id, bad in (
        ("long", TooLong()),
        ("unknown", Scripted(VOCAB)),
        ("breaks", Breaks()),
        ("floods", Floods(MOST_BRANCHES + 1)),
        ("drowns", Floods(MAX_BLOCK_BYTES // 3)),  # nobody reads all that to find that it is too much
        ("good", Scripted(5)),
    ):
        desk.add(model_id, bad if model_id == "good" else Once(bad))
    for model_id, block_size, status in (
        ("long", 3, "DATA_LOSS"),
        ("unknown", 3, "DATA_LOSS"),
        ("breaks", 3, "UNKNOWN"),
        ("floods", 3, "DATA_LOSS"),
        ("drowns", 3, "RESOURCE_EXHAUSTED"),
        ("good", 0, "INVALID_ARGUMENT"),
        ("good", MAX_BLOCK + 1, "INVALID_ARGUMENT"),
        ("later", 3, "NOT_FOUND"),
    ):
        proposer = remote(fleet, model_id)
        with pytest.raises(RemoteProposerError) as failed:
            await propose(proposer, [1, 2], block_size)
        assert failed.value.status == status
        assert proposer.stats.failures == 1
        if model_id not in desk.model_ids:
            desk.add(model_id, Scripted(5))
        assert (await propose(proposer, [1, 2])).token_ids == (5,)
        await asyncio.to_thread(proposer.close)


@on_fleet
async def test_who_does_not_answer_is_told_as_such(fleet: DraftFleet) -> None:
    b, hangs = fleet.others[0], Hangs(5)
    b.desk.add("hangs", hangs)
    hanging = remote(fleet, "hangs", deadline_s=0.1)
    with pytest.raises(RemoteProposerError) as failed:
        await propose(hanging, [1, 2])
    assert failed.value.status == "DEADLINE_EXCEEDED"
    assert hanging.stats.failures == 1
    hangs.go.set()
    b.desk.add("there", Scripted(5))
    proposer = remote(fleet, "there")
    await propose(proposer, [1])
    await b.stop()
    await until_seen(fleet.a, "a", "b1")
    with pytest.raises(RemoteProposerError, match="not in this fleet's view") as failed:
        await propose(proposer, [1, 2])
    assert failed.value.status == "UNAVAILABLE"
    await fleet.replace(b)


def test_no_more_branches_are_read_than_make_a_block_none() -> None:
    n = MOST_BRANCHES * 100
    said = propose_pb2.ProposeBlockResponse(token_ids=[1], branch_offsets=[0] * n, branch_lengths=[2] * n, branch_token_ids=[3] * 2 * n)
    block = read_block(said)
    assert block is not None
    assert len(block.branches) == MOST_BRANCHES + 1
