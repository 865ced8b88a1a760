"""What a source makes of a proposer's line, whatever comes over it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.unit.node.fleet.nodes import in_loop

from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId, SequenceId
from paceline.engine.drafts import BlockProposal, DraftAnswer, DraftAsk
from paceline.node.drafts.drafter import Drafter, OnEnd
from paceline.node.drafts.meter import DraftMeter
from paceline.node.drafts.remote import LATE_TIMES, MOST_ASKED, RemoteDrafts
from paceline.transport.draft_blocks import OnBlock
from paceline.transport.proposer_desk import BlockAsk

DRAFTER = Drafter(NodeId("b"), b"1", "m", 10.0, 100.0, 0.0)


class Line:
    """A proposer that a test speaks for."""

    def __init__(self) -> None:
        self.asks: list[BlockAsk] = []
        self.ended: list[int] = []
        self.on_block: OnBlock
        self.meter = DraftMeter()
        self.source = RemoteDrafts("m", self.meter, SystemClock())
        self.source.attach(lambda left_out: [one for one in (DRAFTER,) if one.key not in left_out], self._open, 100)

    def _open(self, drafter: Drafter, on_block: OnBlock, on_end: OnEnd) -> Line:
        del drafter, on_end
        self.on_block = on_block
        return self

    def send(self, ask: BlockAsk | None, ended: Sequence[int] = ()) -> None:
        self.asks += [] if ask is None else [ask]
        self.ended += ended

    async def close(self) -> None:
        pass

    async def ask(self, sequence: int, first: int, *token_ids: int) -> None:
        self.source.ask(DraftAsk(SequenceId(sequence), first, token_ids, 2))
        await asyncio.sleep(0)


@in_loop
async def test_a_crowd_of_sequences_is_served_in_part_and_costs_no_proposer() -> None:
    line = Line()
    for sequence in range(3 * MOST_ASKED):
        await line.ask(sequence, 0, 1, 2)
    assert len(line.asks) == MOST_ASKED
    assert len(line.source.answers()) == 2 * MOST_ASKED
    await line.ask(0, 2, 3)  # of one that is asked for already
    assert line.ended == [line.asks[0].session]
    for ask in line.asks:
        line.on_block(ask.session, None if ask.session in line.ended else BlockProposal((7,)))
    answers = {answer.sequence: answer for answer in line.source.answers()}
    assert len(answers) == MOST_ASKED
    await line.ask(0, 3, 4)
    assert (line.asks[-1].first_position, line.asks[-1].token_ids) == (0, [1, 2, 3, 4])
    assert not line.meter.failures
    await line.source.detach()


@in_loop
async def test_whoever_waits_in_line_is_not_late() -> None:
    line = Line()
    for sequence in range(4):
        await line.ask(sequence, 0, *range(50))
    waiting = [asks[0] for asks in line.source._waiting.values()]
    takes_s = DRAFTER.takes_s(50, 2)
    due_s = [each.late.when() - waiting[0].late.when() for each in waiting]
    assert all(due >= 0.99 * LATE_TIMES * takes_s * place for place, due in enumerate(due_s))
    await line.source.detach()


@in_loop
async def test_blocks_that_nobody_asked_for_are_a_fault() -> None:
    line = Line()
    await line.ask(1, 0, 1, 2)
    line.on_block(line.asks[0].session, BlockProposal((7,)))
    line.on_block(line.asks[0].session, BlockProposal((8,)))
    assert line.meter.failures == {("b", "DATA_LOSS"): 1}
    assert line.source.answers() == [DraftAnswer(SequenceId(1), 2, (7,))]
    assert line.source.expected_s is None
    await line.source.detach()


@in_loop
async def test_a_sequence_that_ended_may_be_lost() -> None:
    line = Line()
    await line.ask(1, 0, 1, 2)
    line.source.forget(SequenceId(1))
    await asyncio.sleep(0)
    line.on_block(line.asks[0].session, None)
    assert not line.meter.failures
    await line.source.detach()
