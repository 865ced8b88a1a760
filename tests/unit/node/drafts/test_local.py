"""Drafts by a proposer of this process."""

from __future__ import annotations

from tests.unit.node.drafts.proposers import Breaks, Hangs, Scripted

from paceline.core.clock import SystemClock
from paceline.core.ids import SequenceId
from paceline.engine.drafts import DraftAnswer, DraftAsk
from paceline.node.drafts.local import LocalDrafts

ONE, TWO = SequenceId(1), SequenceId(2)


def test_it_answers_every_ask_and_drafts_only_for_the_last_of_a_sequence() -> None:
    hangs = Hangs(7, 8)
    source = LocalDrafts(hangs, SystemClock(), block=5)
    assert (source.expected_s, source.block, source.answers()) == (0.0, 5, ())
    source.ask(DraftAsk(ONE, 0, [1, 2], 4))
    assert hangs.begun.wait(20)
    source.ask(DraftAsk(ONE, 2, [7, 8], 4))
    source.ask(DraftAsk(TWO, 0, [5], 1))
    source.ask(DraftAsk(ONE, 2, [3], 4))
    hangs.go.set()
    answers = list[DraftAnswer]()
    while len(answers) < 4:
        answers += source.answers(20.0)
    assert answers == [DraftAnswer(ONE, 2, (7, 8)), DraftAnswer(ONE, 4, ()), DraftAnswer(TWO, 1, (7,)), DraftAnswer(ONE, 3, (7, 8))]
    assert hangs.texts == [(1, 2), (1, 2, 7, 8), (5,), (1, 2, 3)]
    source.forget(ONE)
    source.forget(SequenceId(9))
    source.close()
    source.close()
    assert source.expected_s is None


def test_a_proposer_that_raised_is_asked_no_more() -> None:
    source = LocalDrafts(Breaks(), SystemClock())
    source.ask(DraftAsk(ONE, 0, [1, 2], 4))
    assert source.answers(20.0) == [DraftAnswer(ONE, 2, ())]
    assert source.expected_s is None
    assert isinstance(source.error, MemoryError)
    source.ask(DraftAsk(ONE, 2, [3], 4))
    assert source.answers(20.0) == [DraftAnswer(ONE, 3, ())]
    source.close()


def test_drafts_wait_no_longer_than_they_are_told() -> None:
    source = LocalDrafts(Scripted(7), SystemClock())
    assert source.answers(0.001) == []
    source.close()
