"""What a node's proposers are asked: bounded, in turn, and answered whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.fakes.fleets import TestFleet
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.draft.proposers import Hangs, Scripted

from paceline.core.errors import InvalidRequest, ModelNotFound, Overloaded
from paceline.engine.drafts import BlockProposal
from paceline.net.wire import propose_pb2 as wire
from paceline.ways.draft import pool as proposer_desk
from paceline.ways.draft.finding import LocalConnection
from paceline.ways.draft.pool import MAX_STEPS, BlockAsk, ProposerPool, ProposerServicer


def ask(session: int, first: int, *token_ids: int, **changed: int) -> BlockAsk:
    return BlockAsk("m", session, first, token_ids, changed.get("block_size", 3), changed.get("num_steps", 0))


@in_loop
async def test_a_desk_keeps_no_more_than_it_may() -> None:
    scripted = Scripted(5)
    pool = ProposerPool({"m": scripted}, most_sessions=2, most_tokens=10)
    for session in (1, 2, 3):
        assert await pool.propose("a", ask(session, 0, 1, 2, 3)) is not None
    assert (pool.sessions, pool.tokens) == (2, 6)
    assert await pool.propose("a", ask(1, 3, 4)) is None  # forgotten
    assert await pool.propose("b", ask(2, 3, 4)) is None  # another caller's
    assert await pool.propose("a", ask(2, 4, 4)) is None  # nobody told the fourth
    assert await pool.propose("a", ask(2, 2, *range(9))) is not None
    assert (pool.sessions, pool.tokens) == (1, 11)  # one is kept in any case
    assert await pool.propose("a", ask(0, 0, 1)) is not None  # complete in itself, and not kept
    assert (pool.sessions, pool.tokens) == (1, 11)
    pool.end("a", [2, 77])
    assert (pool.sessions, pool.tokens) == (0, 0)
    pool.close()
    with pytest.raises(ModelNotFound, match="this machine stops"):
        await pool.propose("a", ask(1, 0, 1))


@in_loop
async def test_a_desk_refuses_what_cannot_be_meant() -> None:
    pool = ProposerPool({"m": Scripted(5)})
    for wrong in (ask(1, 0, 1, block_size=0), ask(1, 0, 1, num_steps=MAX_STEPS + 1), ask(0, 4, 1), ask(1, proposer_desk.MAX_COMMITTED, 1)):
        with pytest.raises(InvalidRequest):
            await pool.propose("a", wrong)
    pool.close()


@in_loop
async def test_a_desk_drops_what_nobody_waits_for_and_refuses_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposer_desk, "MOST_WAITING", 3)
    hangs = Hangs(5)
    pool = ProposerPool({"m": hangs})
    asked = [asyncio.create_task(pool.propose("a", ask(session, 0, session))) for session in (1, 2, 3)]
    await asyncio.to_thread(hangs.begun.wait, 20)
    with pytest.raises(Overloaded):
        await pool.propose("a", ask(4, 0, 4))
    asked[1].cancel()
    await asyncio.gather(asked[1], return_exceptions=True)
    hangs.go.set()
    assert await asked[0] == await asked[2] == BlockProposal((5,), 1, 2, 3)
    assert hangs.texts == [(1,), (3,)]
    pool.close()


@in_loop
async def test_who_waits_is_answered_when_a_desk_closes() -> None:
    hangs = Hangs(5)
    pool = ProposerPool({"m": hangs})
    asks = (ask(1, 0, 1), ask(1, 1, 2), ask(2, 0, 3), ask(0, 0, 4))
    asked = [asyncio.create_task(pool.propose("a", each)) for each in asks]
    await asyncio.to_thread(hangs.begun.wait, 20)
    assert (pool.sessions, pool.tokens) == (2, 3)
    pool.close()
    pool.close()
    assert (pool.sessions, pool.tokens) == (0, 0)
    assert await asyncio.gather(*asked) == [None] * 4
    assert not await asyncio.to_thread(pool.drained, 0.0)
    hangs.go.set()
    assert await asyncio.to_thread(pool.drained, 20.0)
    assert hangs.texts == [(1,)]


def test_a_name_is_given_once() -> None:
    pool = ProposerPool({"m": Scripted(5)})
    with pytest.raises(ValueError, match="m drafts here already"):
        pool.add("m", Scripted(6))
    pool.close()


@in_loop
async def test_asks_of_a_session_that_ended_are_answered_as_lost() -> None:
    hangs = Hangs(5)
    pool = ProposerPool({"m": hangs})
    first = asyncio.create_task(pool.propose("a", ask(1, 0, 1, 2)))
    await asyncio.to_thread(hangs.begun.wait, 20)
    second = asyncio.create_task(pool.propose("a", ask(1, 2, 3)))
    await asyncio.sleep(0)
    pool.end("a", [1])
    hangs.go.set()
    assert await first is not None
    assert await second is None
    assert (pool.sessions, pool.tokens) == (0, 0)
    pool.close()


@in_loop
async def test_a_crowd_of_sessions_takes_nothing_from_one_that_is_being_answered() -> None:
    hangs = Hangs(5)
    pool = ProposerPool({"m": hangs, "other": Scripted(6)}, most_sessions=2)
    asked = [asyncio.create_task(pool.propose("a", ask(1, 0, 1, 2)))]
    await asyncio.to_thread(hangs.begun.wait, 20)
    asked.append(asyncio.create_task(pool.propose("a", ask(1, 2, 3))))
    await asyncio.sleep(0)
    for session in range(2, 9):
        assert await pool.propose("b", BlockAsk("other", session, 0, (1,), 3)) is not None
    assert pool.sessions == 2
    hangs.go.set()
    assert None not in await asyncio.gather(*asked)
    pool.close()


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
async def test_who_does_not_read_answers_is_not_read_either() -> None:
    pool, call = ProposerPool({"m": Scripted(5)}), Unread()
    servicer = ProposerServicer(pool, lambda _: TestFleet().member("a").member)
    serving = asyncio.create_task(servicer.ProposeBlocks(call.asks(), call))  # type: ignore[arg-type]
    stats = pool.stats["m"]
    await until(lambda: stats.blocks == proposer_desk.MOST_WAITING or serving.done())
    for _ in range(100):
        await asyncio.sleep(0)
    assert (stats.blocks, call.taken) == (proposer_desk.MOST_WAITING, proposer_desk.MOST_WAITING + 1)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert pool.sessions == 0
    pool.close()


@in_loop
async def test_a_long_call_remembers_no_session_that_ended() -> None:
    ended: list[int] = []

    class Noting(ProposerPool):
        def end(self, caller: str, sessions: Sequence[int], model_id: str | None = None) -> None:
            ended.extend(sessions if model_id is None else ())
            super().end(caller, sessions, model_id)

    pool = Noting({"m": Scripted(5)})

    class Read(Unread):
        async def write(self, message: object) -> None:
            del message

    async def asks() -> AsyncIterator[wire.ProposeBlocksRequest]:
        for session in range(1, 400):
            block = wire.ProposeBlockRequest(model_id="m", session=session, block_size=3, committed_token_ids=[1])
            yield wire.ProposeBlocksRequest(block=block, ended_sessions=[session - 1])

    servicer = ProposerServicer(pool, lambda _: TestFleet().member("a").member)
    await servicer.ProposeBlocks(asks(), Read())  # type: ignore[arg-type]
    assert ended == [*range(400)]  # each once
    assert (pool.sessions, pool.tokens) == (0, 0)
    pool.close()


@in_loop
async def test_a_session_of_this_process_that_ends_at_once_is_forgotten() -> None:
    pool = ProposerPool({"m": Scripted(5)})
    blocks = list[object]()
    connection = LocalConnection(pool, "a", lambda _, block: blocks.append(block), blocks.append)
    connection.send(ask(1, 0, 1, 2))
    connection.send(None, (1,))
    await until(lambda: len(blocks) == 1)
    assert (pool.sessions, pool.tokens) == (0, 0)
    await connection.close()
    pool.close()
