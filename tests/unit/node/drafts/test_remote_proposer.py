"""A proposer on another node, called as if it were here; and what its node refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.node.drafts.proposers import Breaks, Hangs, Scripted, TooLong
from tests.unit.node.fleet.nodes import in_loop, make_node, running, until

from paceline.core.errors import InvalidRequest, ModelNotFound, Overloaded, RemoteProposerError
from paceline.engine.drafts import NGRAM, BlockProposal, Proposer
from paceline.engine.proposers.ngram import NGramProposer
from paceline.node.drafts.lines import DeskLine
from paceline.node.fleet import FleetNode
from paceline.testing.fleets import TestFleet
from paceline.transport import proposer_desk
from paceline.transport.channels import Purpose
from paceline.transport.proposer_desk import MAX_BLOCK, MAX_STEPS, BlockAsk, ProposerDesk
from paceline.transport.proposer_service import ProposerServicer
from paceline.transport.remote_proposer import RemoteProposer
from paceline.transport.wire import propose_pb2 as wire

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


@in_loop
async def test_asks_of_a_session_that_ended_are_answered_as_lost(tmp_path: Path) -> None:
    hangs = Hangs(5)
    desk = ProposerDesk({"m": hangs})
    first = asyncio.create_task(desk.propose("a", ask(1, 0, 1, 2)))
    await asyncio.to_thread(hangs.begun.wait, 20)
    second = asyncio.create_task(desk.propose("a", ask(1, 2, 3)))
    await asyncio.sleep(0)
    desk.end("a", [1])
    hangs.go.set()
    assert await first is not None
    assert await second is None
    assert (desk.sessions, desk.tokens) == (0, 0)
    desk.close()


@in_loop
async def test_a_crowd_of_sessions_takes_nothing_from_one_that_is_being_answered(tmp_path: Path) -> None:
    hangs = Hangs(5)
    desk = ProposerDesk({"m": hangs, "other": Scripted(6)}, most_sessions=2)
    asked = [asyncio.create_task(desk.propose("a", ask(1, 0, 1, 2)))]
    await asyncio.to_thread(hangs.begun.wait, 20)
    asked.append(asyncio.create_task(desk.propose("a", ask(1, 2, 3))))
    await asyncio.sleep(0)
    for session in range(2, 9):
        assert await desk.propose("b", BlockAsk("other", session, 0, (1,), 3)) is not None
    assert desk.sessions == 2
    hangs.go.set()
    assert None not in await asyncio.gather(*asked)
    desk.close()


class Unread:
    """A call whose caller reads no answers."""

    def __init__(self) -> None:
        self.taken = 0

    async def write(self, message: object) -> None:
        del message
        await asyncio.Event().wait()

    async def asks(self) -> AsyncIterator[wire.ProposeBlocksRequest]:
        for session in range(1, 10_000):
            self.taken += 1
            yield wire.ProposeBlocksRequest(block=wire.ProposeBlockRequest(model_id="m", session=session, block_size=3))


@in_loop
async def test_who_does_not_read_answers_is_not_read_either(tmp_path: Path) -> None:
    desk, call = ProposerDesk({"m": Scripted(5)}), Unread()
    servicer = ProposerServicer(desk, lambda _: make_node(TestFleet(), tmp_path, "a").identity.member)
    serving = asyncio.create_task(servicer.ProposeBlocks(call.asks(), call))  # type: ignore[arg-type]
    stats = desk.stats["m"]
    await until(lambda: stats.blocks == proposer_desk.MOST_WAITING or serving.done())
    for _ in range(100):
        await asyncio.sleep(0)
    assert (stats.blocks, call.taken) == (proposer_desk.MOST_WAITING, proposer_desk.MOST_WAITING + 1)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert desk.sessions == 0
    desk.close()


@in_loop
async def test_a_long_call_remembers_no_session_that_ended(tmp_path: Path) -> None:
    ended: list[int] = []

    class Noting(ProposerDesk):
        def end(self, caller: str, sessions: Sequence[int], model_id: str | None = None) -> None:
            ended.extend(sessions if model_id is None else ())
            super().end(caller, sessions, model_id)

    desk = Noting({"m": Scripted(5)})

    class Read(Unread):
        async def write(self, message: object) -> None:
            del message

    async def asks() -> AsyncIterator[wire.ProposeBlocksRequest]:
        for session in range(1, 400):
            block = wire.ProposeBlockRequest(model_id="m", session=session, block_size=3, committed_token_ids=[1])
            yield wire.ProposeBlocksRequest(block=block, ended_sessions=[session - 1])

    servicer = ProposerServicer(desk, lambda _: make_node(TestFleet(), tmp_path, "a").identity.member)
    await servicer.ProposeBlocks(asks(), Read())  # type: ignore[arg-type]
    assert ended == [*range(400)]  # each once
    assert (desk.sessions, desk.tokens) == (0, 0)
    desk.close()


@in_loop
async def test_what_takes_long_is_not_looked_up_on_the_loop(tmp_path: Path) -> None:
    desk = ProposerDesk({"m": NGramProposer()})
    text = list(range(2000))
    assert not desk.is_quick("a", BlockAsk("m", 1, 0, text, 3))
    await desk.propose("a", BlockAsk("m", 1, 0, text, 3))
    assert desk.is_quick("a", ask(1, 1990, 7))
    assert not desk.is_quick("a", ask(1, 1000, 7))
    for _ in range(9):  # what is taken back again and again is remembered no longer
        if quick := desk.is_quick("a", ask(1, desk.tokens - 50, 7)):
            await desk.propose("a", ask(1, desk.tokens - 50, 7))
    assert not quick
    desk.close()


@in_loop
async def test_what_is_quick_overtakes_nothing_of_its_session(tmp_path: Path) -> None:
    desk = ProposerDesk({"m": NGramProposer()})
    await desk.propose("a", ask(1, 0, 5))
    kept = desk._kept["a", "m", 1]
    await kept.turn.acquire()
    asked = [asyncio.create_task(desk.propose("a", BlockAsk("m", 1, 1, range(2000), 3)))]
    await asyncio.sleep(0)
    kept.turn.release()  # it is its turn, and it has not begun
    assert await desk.propose("a", ask(1, 2001, 7)) is not None
    assert None not in await asyncio.gather(*asked)
    assert list(kept.session.told) == [5, *range(2000), 7]
    desk.close()


@in_loop
async def test_a_session_of_this_process_that_ends_at_once_is_forgotten(tmp_path: Path) -> None:
    desk = ProposerDesk({"m": Scripted(5)})
    blocks = list[object]()
    line = DeskLine(desk, "a", lambda _, block: blocks.append(block), blocks.append)
    line.send(ask(1, 0, 1, 2))
    line.send(None, (1,))
    await until(lambda: len(blocks) == 1)
    assert (desk.sessions, desk.tokens) == (0, 0)
    await line.close()
    desk.close()
