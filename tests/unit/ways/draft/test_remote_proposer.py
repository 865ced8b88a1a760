"""A proposer on another node, called as if it were here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.unit.net.member.nodes import until, until_seen
from tests.unit.ways.draft.fleet import LOOKUP, VOCAB, DraftFleet, on_fleet
from tests.unit.ways.draft.proposers import Breaks, Floods, Hangs, Scripted, TooLong

from paceline import RemoteProposer
from paceline.core.errors import RemoteProposerError
from paceline.engine.drafts import BlockProposal, Proposer
from paceline.net.channels import MAX_BLOCK_BYTES
from paceline.net.wire import propose_pb2
from paceline.ways.draft.connection import read_block
from paceline.ways.draft.finding import FleetConnections
from paceline.ways.draft.pool import MAX_BLOCK


def remote(fleet: DraftFleet, model_id: str, deadline_s: float = 20.0) -> RemoteProposer:
    """That model of node b0, called from node a."""
    node_id, connections = fleet.others[0].node_id, FleetConnections(fleet.a)
    return RemoteProposer(asyncio.get_running_loop(), lambda: connections.channel(node_id), node_id, model_id, VOCAB, deadline_s=deadline_s)


async def propose(proposer: RemoteProposer, committed: Sequence[int], block_size: int = 3, num_steps: int = 0) -> BlockProposal:
    return await asyncio.to_thread(proposer.propose_block, committed, block_size, num_steps)


@on_fleet
async def test_it_drafts_as_if_it_were_here(fleet: DraftFleet) -> None:
    pool, scripted = fleet.others[0].proposers, Scripted(7, 8, 9, 10)
    pool.add("scripted", scripted)
    proposer = remote(fleet, "scripted")
    assert await propose(proposer, [1, 2, 3]) == BlockProposal((7, 8, 9), 1, 2, 3)
    assert await propose(proposer, [1, 2, 3, 7, 5], 2) == BlockProposal((7, 8), 1, 2, 3)
    assert pool.tokens == 5  # one session, told what was new
    pool.end("a", [key[2] for key in pool._kept])
    assert (await propose(proposer, [1, 2, 9], 1)).token_ids == (7,)
    assert scripted.texts == [(1, 2, 3), (1, 2, 3, 7, 5), (1, 2, 9)]
    stats = proposer.stats
    assert (stats.blocks, stats.tokens, stats.diffusion_steps, stats.forward_passes, stats.peak_activation_bytes) == (3, 6, 3, 6, 3)
    assert stats.failures == 0


@on_fleet
async def test_what_it_told_is_forgotten_when_it_is_closed(fleet: DraftFleet) -> None:
    pool, proposer = fleet.others[0].proposers, remote(fleet, LOOKUP)
    for text in ([1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 9, 1, 2]):
        assert (await propose(proposer, text, 2)).token_ids == (3, 4)
        assert any(key[1] == LOOKUP for key in pool._kept)
        await asyncio.to_thread(proposer.close)
        await asyncio.to_thread(proposer.close)
        await until(lambda: not any(key[1] == LOOKUP for key in pool._kept))


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
    pool = fleet.others[0].proposers
    for model_id, bad in (
        ("long", TooLong()),
        ("unknown", Scripted(VOCAB)),
        ("breaks", Breaks()),
        ("drowns", Floods(MAX_BLOCK_BYTES + 1)),  # nobody reads all that to find that it is too much
        ("good", Scripted(5)),
    ):
        pool.add(model_id, bad if model_id == "good" else Once(bad))
    for model_id, block_size, status in (
        ("long", 3, "DATA_LOSS"),
        ("unknown", 3, "DATA_LOSS"),
        ("breaks", 3, "UNKNOWN"),
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
        if model_id not in pool.model_ids:
            pool.add(model_id, Scripted(5))
        assert (await propose(proposer, [1, 2])).token_ids == (5,)
        await asyncio.to_thread(proposer.close)


@on_fleet
async def test_who_does_not_answer_is_told_as_such(fleet: DraftFleet) -> None:
    b, hangs = fleet.others[0], Hangs(5)
    b.proposers.add("hangs", hangs)
    hanging = remote(fleet, "hangs", deadline_s=0.1)
    with pytest.raises(RemoteProposerError) as failed:
        await propose(hanging, [1, 2])
    assert failed.value.status == "DEADLINE_EXCEEDED"
    assert hanging.stats.failures == 1
    hangs.go.set()
    b.proposers.add("there", Scripted(5))
    proposer = remote(fleet, "there")
    await propose(proposer, [1])
    await b.stop()
    await until_seen(fleet.a, "a", "b1")
    with pytest.raises(RemoteProposerError, match="not in this fleet's view") as failed:
        await propose(proposer, [1, 2])
    assert failed.value.status == "UNAVAILABLE"
    await fleet.replace(b)


def test_branches_of_older_nodes_are_not_read() -> None:
    """Fields 7, 8 and 9 of their answers: what follows where a token of the block is another."""
    said = propose_pb2.ProposeBlockResponse(token_ids=[1, 2]).SerializeToString()
    older = said + bytes.fromhex("3a0100 420102 4a020304")
    assert read_block(propose_pb2.ProposeBlockResponse.FromString(older)) == BlockProposal((1, 2))
