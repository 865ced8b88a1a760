"""What a source makes of a proposer's connection, whatever comes over it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.unit.net.member.nodes import in_loop

from paceline.core.clock import SystemClock
from paceline.core.errors import NodeUnreachable, RemoteProposerError
from paceline.core.ids import NodeId, SequenceId
from paceline.engine.drafts import BlockProposal, DraftAnswer, DraftAsk
from paceline.ways.draft import connection
from paceline.ways.draft.client import LATE_S, LATE_TIMES, LATEST_S, MOST_ASKED
from paceline.ways.draft.connection import OnBlock, RemoteProposer
from paceline.ways.draft.finding import Drafter, OnEnd
from paceline.ways.draft.pool import BlockAsk
from paceline.ways.draft.remote import FORGIVEN, LEFT_OUT_S, DraftMeter, RemoteDrafts

ONE = SequenceId(1)
DRAFTER = Drafter(NodeId("b"), b"1", "m", 10.0, 100.0, 0.0)


class PassingLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes when a test says so."""

    passed_s = 0.0

    def time(self) -> float:
        return self.passed_s


def in_passing_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=PassingLoop) as runner:
            runner.run(test(**fixtures))

    return run


class Connection:
    """A proposer that a test speaks for."""

    def __init__(self, *drafters: Drafter) -> None:
        self.asks: list[BlockAsk] = []
        self.ended: list[int] = []
        self.opened: list[str] = []
        self.unreachable = False
        self.on_block: OnBlock
        self.clock = FakeClock()
        self.meter = DraftMeter()
        self.source = RemoteDrafts("m", self.meter, self.clock)
        order = drafters or (DRAFTER,)
        self.source.attach(lambda left_out: [one for one in order if one.key not in left_out], self._open, 100)

    def _open(self, drafter: Drafter, on_block: OnBlock, on_end: OnEnd) -> Connection:
        del on_end
        if self.unreachable:
            raise NodeUnreachable(f"{drafter.node_id} is gone")
        self.on_block = on_block
        self.opened.append(drafter.node_id)
        return self

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None:
        self.asks += [] if ask is None else [ask]
        self.ended += ended

    async def close(self) -> None:
        pass

    async def ask(self, sequence: int, first: int, *token_ids: int) -> None:
        self.source.ask(DraftAsk(SequenceId(sequence), first, token_ids, 2))
        await asyncio.sleep(0)

    async def drafted(self, *token_ids: int) -> Sequence[int]:
        """What the engine hears when the last ask is answered so."""
        self.on_block(self.asks[-1].session, BlockProposal(token_ids))
        (answer,) = self.source.answers()
        return answer.token_ids

    async def passes(self, seconds: float) -> None:
        """Everything sees that time."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PassingLoop)
        loop.passed_s += seconds
        self.clock.advance(seconds)
        for _ in range(3):  # what is due then is done in the rounds after
            await asyncio.sleep(0)


@in_loop
async def test_a_crowd_of_sequences_is_served_in_part_and_costs_no_proposer() -> None:
    connection = Connection()
    for sequence in range(3 * MOST_ASKED):
        await connection.ask(sequence, 0, 1, 2)
    assert len(connection.asks) == MOST_ASKED
    assert len(connection.source.answers()) == 2 * MOST_ASKED
    await connection.ask(0, 2, 3)  # of one that is asked for already
    assert connection.ended == [connection.asks[0].session]
    for ask in connection.asks:
        connection.on_block(ask.session, None if ask.session in connection.ended else BlockProposal((7,)))
    answers = {answer.sequence: answer for answer in connection.source.answers()}
    assert len(answers) == MOST_ASKED
    await connection.ask(0, 3, 4)
    assert (connection.asks[-1].first_position, connection.asks[-1].token_ids) == (0, [1, 2, 3, 4])
    assert not connection.meter.failures
    await connection.source.detach()


@in_passing_loop
async def test_whoever_hangs_is_replaced_once_it_is_late() -> None:
    connection = Connection(DRAFTER, replace(DRAFTER, node_id=NodeId("c")))
    await connection.ask(1, 0, *range(50))
    late_s = LATE_S + LATE_TIMES * DRAFTER.takes_s(50, 2)
    await connection.passes(0.9 * late_s)
    assert connection.source.answers() == ()
    await connection.passes(0.11 * late_s)
    assert connection.source.answers() == [DraftAnswer(SequenceId(1), 50, ())]
    assert connection.meter.failures == {("b", "DEADLINE_EXCEEDED"): 1}
    assert connection.opened == ["b", "c"]
    await connection.ask(1, 50, 7)
    assert (connection.asks[-1].first_position, connection.asks[-1].token_ids) == (0, [*range(50), 7])
    assert await connection.drafted(8, 9) == (8, 9)
    await connection.source.detach()


@in_passing_loop
async def test_whoever_waits_in_line_is_not_late() -> None:
    connection = Connection()
    takes_s = LATE_TIMES * DRAFTER.takes_s(50, 2)
    for sequence in range(4):
        await connection.ask(sequence, 0, *range(50))
    for ask in connection.asks:
        await connection.passes(0.9 * (takes_s + LATE_S / 4))
        connection.on_block(ask.session, BlockProposal((7,)))
    assert len(connection.source.answers()) == 4
    assert not connection.meter.failures
    await connection.ask(9, 0, *range(10_000))
    await connection.passes(LATEST_S + 0.1)  # but for this long nobody is waited for
    assert connection.meter.failures == {("b", "DEADLINE_EXCEEDED"): 1}
    await connection.source.detach()


@in_passing_loop
async def test_who_is_slower_than_promised_is_given_more_time() -> None:
    connection = Connection()
    promised_s = DRAFTER.takes_s(50, 2)
    for slower in (2, 6):  # the latter would have been late at first
        await connection.ask(1, 0, *range(50))
        await connection.passes(slower * promised_s)
        assert await connection.drafted(7) == (7,)
    await connection.ask(1, 0, *range(50))
    await connection.passes(LATE_S + LATE_TIMES * 6 * promised_s + 0.1)
    assert connection.meter.failures == {("b", "DEADLINE_EXCEEDED"): 1}
    await connection.source.detach()


@in_passing_loop
async def test_who_failed_is_asked_again_after_a_while_that_grows_until_it_is_forgiven() -> None:
    connection = Connection()
    for times in range(3):
        await connection.ask(times, 0, 1)
        assert await connection.drafted(100) == ()
        assert connection.source.expected_s is None
        await connection.passes(0.9 * LEFT_OUT_S * 2**times)
        assert connection.source.drafter is None
        await connection.passes(0.2 * LEFT_OUT_S * 2**times)
        assert connection.source.drafter == DRAFTER
    for place in range(FORGIVEN):
        await connection.ask(9, place, 1)
        assert await connection.drafted(7) == (7,)
    await connection.ask(9, FORGIVEN, 1)
    connection.unreachable = True
    assert await connection.drafted(100) == ()
    await connection.passes(1.1 * LEFT_OUT_S)  # as if for the first time; and now it is not even reached
    assert connection.source.drafter is None
    assert connection.meter.failures == {("b", "DATA_LOSS"): 4, ("b", "UNAVAILABLE"): 1}
    await connection.ask(9, FORGIVEN + 1, 1)
    assert connection.source.answers() == [DraftAnswer(SequenceId(9), FORGIVEN + 2, ())]
    connection.unreachable = False
    await connection.passes(2.1 * LEFT_OUT_S)
    await connection.ask(9, FORGIVEN + 2, 1)
    assert await connection.drafted(7) == (7,)
    assert connection.asks[-1].token_ids == [1] * (FORGIVEN + 3)
    await connection.source.detach()


@in_loop
async def test_a_source_nobody_attached_answers_with_nothing_and_keeps_what_it_was_told() -> None:
    source = RemoteDrafts("m", DraftMeter(), SystemClock())
    assert source.expected_s is None
    source.ask(DraftAsk(ONE, 0, [1, 2], 4))
    assert source.answers(20.0) == [DraftAnswer(ONE, 2, ())]
    assert not source.answers()
    assert not source.answers(0.001)
    with pytest.raises(ValueError, match="position 9"):
        source.ask(DraftAsk(ONE, 9, [1], 1))
    assert not source.idle
    source.forget(ONE)
    assert source.idle
    with pytest.raises(ValueError, match="position 2"):
        source.ask(DraftAsk(ONE, 2, [1], 1))


def test_mail_to_a_loop_that_ended_comes_back() -> None:
    async def begin() -> RemoteDrafts:
        return Connection().source

    source = asyncio.run(begin())
    source.ask(DraftAsk(ONE, 0, [1, 2], 4))
    assert source.answers(20.0) == [DraftAnswer(ONE, 2, ())]


@in_loop
async def test_blocks_that_nobody_asked_for_are_a_fault() -> None:
    connection = Connection()
    await connection.ask(1, 0, 1, 2)
    connection.on_block(connection.asks[0].session, BlockProposal((7,)))
    connection.on_block(connection.asks[0].session, BlockProposal((8,)))
    assert connection.meter.failures == {("b", "DATA_LOSS"): 1}
    assert connection.source.answers() == [DraftAnswer(SequenceId(1), 2, (7,))]
    assert connection.source.expected_s is None
    await connection.source.detach()


@in_loop
async def test_a_sequence_that_ended_may_be_lost() -> None:
    connection = Connection()
    await connection.ask(1, 0, 1, 2)
    connection.source.forget(SequenceId(1))
    await asyncio.sleep(0)
    connection.on_block(connection.asks[0].session, None)
    assert not connection.meter.failures
    await connection.source.detach()


class Line:
    """Stands for a call; a test answers what was asked over it."""

    def __init__(self, asks: list[tuple[BlockAsk, OnBlock]], on_block: OnBlock) -> None:
        self._asks, self._on_block = asks, on_block

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None:
        del ended
        assert ask is not None
        self._asks.append((ask, self._on_block))

    async def close(self) -> None:
        pass


@in_passing_loop
async def test_a_block_is_there_within_its_bound_or_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bound for a block, however often its session has to be told anew. Time is counted, and none of it passes by itself."""
    loop, asks = asyncio.get_running_loop(), list[tuple[BlockAsk, OnBlock]]()
    assert isinstance(loop, PassingLoop)
    monkeypatch.setattr(connection, "RemoteConnection", lambda _channel, _peer, on_block, _on_end: Line(asks, on_block))
    channel: Any = None
    proposer = RemoteProposer(loop, lambda: channel, "b", "m", 100, deadline_s=1000.0)

    async def asked(times: int) -> None:
        while len(asks) < times:  # noqa: ASYNC110 - another thread asks
            await asyncio.sleep(0)

    async def passes(seconds: float) -> None:
        loop.passed_s += seconds
        for _ in range(5):  # what is due then is done in the rounds after
            await asyncio.sleep(0)

    def answer(block: BlockProposal | None) -> None:
        ask, on_block = asks[-1]
        on_block(ask.session, block)

    first = asyncio.create_task(asyncio.to_thread(proposer.propose_block, [1, 2], 2, 0))
    await asked(1)
    await passes(999.0)
    answer(BlockProposal((7,)))
    assert (await first).token_ids == (7,)

    second = asyncio.create_task(asyncio.to_thread(proposer.propose_block, [1, 2, 7], 2, 0))
    await asked(2)
    assert asks[-1][0].first_position == 2
    await passes(600.0)
    answer(None)
    await asked(3)
    assert asks[-1][0].first_position == 0
    await passes(399.0)
    assert proposer.stats.failures == 0
    await passes(2.0)
    with pytest.raises(RemoteProposerError, match="b drafted nothing in 1000 s") as late:
        await second
    assert (late.value.status, proposer.stats.failures) == ("DEADLINE_EXCEEDED", 1)
