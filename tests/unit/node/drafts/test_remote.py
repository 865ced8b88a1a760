"""Drafts between real nodes over mTLS: what a source says of proposers that work, and of those that don't."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.node.drafts.proposers import Breaks, Hangs, Scripted, TooLong
from tests.unit.node.fleet.nodes import in_loop, make_node, running, until, until_seen

from paceline.core.clock import SystemClock
from paceline.core.errors import PlacementError
from paceline.core.ids import SequenceId
from paceline.engine.drafts import DraftAnswer, DraftAsk, Proposer
from paceline.node.drafts.drafter import Drafter, Key
from paceline.node.drafts.fleet_lines import FleetLines
from paceline.node.drafts.meter import DraftMeter
from paceline.node.drafts.remote import RemoteDrafts
from paceline.node.fleet import FleetNode
from paceline.testing.fleets import TestFleet

ONE, TWO = SequenceId(1), SequenceId(2)
VOCAB = 100


class Desk:
    """A source on node a, and the nodes that may draft for it, in the order that the plan would have."""

    def __init__(self, a: FleetNode, others: Sequence[FleetNode], model_id: str, rate: float) -> None:
        self.meter = DraftMeter()
        self.source = RemoteDrafts(model_id, self.meter, SystemClock())
        self.order = [*others]
        self._a, self._model_id, self._rate = a, model_id, rate

    def find(self, left_out: Sequence[Key]) -> list[Drafter]:
        cards = [live.card for node in self.order if (live := self._a.view().get(node.node_id)) is not None]
        found = [Drafter(card.node_id, card.instance, self._model_id, self._rate, 1e6, 0.001) for card in cards]
        if not (left := [one for one in found if one.key not in left_out]):
            raise PlacementError("nobody is left")
        return left

    async def ask(self, first: int, token_ids: Sequence[int], length: int = 4, sequence: SequenceId = ONE) -> DraftAnswer:
        self.source.ask(DraftAsk(sequence, first, token_ids, length))
        answers = await asyncio.to_thread(self.source.answers, 20.0)
        assert len(answers) == 1
        return answers[0]


@asynccontextmanager
async def drafting(
    root: Path, *proposers: Proposer, model_id: str = "m", rate: float = 1e5, own: Proposer | None = None
) -> AsyncIterator[Desk]:
    """Node a and one node for each proposer, seen by it."""
    fleet = TestFleet()
    a = make_node(fleet, root, "a")
    async with running(a):
        others = [make_node(fleet, root, f"b{place}", a) for place in range(len(proposers))]
        for node, proposer in zip(others, proposers, strict=True):
            node.desk.add(model_id, proposer)
        async with running(*others):
            await until_seen(a, "a", *(node.node_id for node in others))
            if own is not None:
                a.desk.add(model_id, own)
            desk = Desk(a, [*others, *([a] if own is not None else [])], model_id, rate)
            desk.source.attach(desk.find, FleetLines(a).open, VOCAB)
            try:
                yield desk
            finally:
                await desk.source.detach()
                for proposer in (*proposers, own):
                    if isinstance(proposer, Hangs):
                        proposer.go.set()


@in_loop
async def test_only_new_tokens_travel_and_wrong_guesses_are_taken_back(tmp_path: Path) -> None:
    proposer = Scripted(7, 8, 9)
    async with drafting(tmp_path, proposer) as desk:
        assert desk.source.expected_s is not None
        assert await desk.ask(0, [1, 2, 3]) == DraftAnswer(ONE, 3, (7, 8, 9))
        assert await desk.ask(3, [7, 8], 2) == DraftAnswer(ONE, 5, (7, 8))
        assert (await desk.ask(4, [5])).position == 5
        assert (await desk.ask(0, [4], sequence=TWO)).position == 1
        assert proposer.texts == [(1, 2, 3), (1, 2, 3, 7, 8), (1, 2, 3, 7, 5), (4,)]
        stats = desk.meter.of("m")
        assert (stats.blocks, stats.tokens, stats.forward_passes, stats.failures) == (4, 11, 8, 0)
        assert desk.meter.hop.buckets()[-1][1] == 4


@in_loop
async def test_what_ended_is_forgotten_on_both_sides(tmp_path: Path) -> None:
    async with drafting(tmp_path, Scripted(7)) as desk:
        b = desk.order[0]
        await desk.ask(0, [1, 2, 3])
        await desk.ask(0, [1, 2], sequence=TWO)
        assert (b.desk.sessions, b.desk.tokens) == (2, 5)
        desk.source.forget(ONE)
        desk.source.forget(SequenceId(99))
        await until(lambda: (b.desk.sessions, b.desk.tokens) == (1, 2))
        await desk.source.detach()
        await until(lambda: (b.desk.sessions, b.desk.tokens) == (0, 0))


@in_loop
async def test_a_session_that_the_other_side_lost_is_told_anew(tmp_path: Path) -> None:
    proposer = Scripted(7)
    async with drafting(tmp_path, proposer) as desk:
        await desk.ask(0, [1, 2, 3])
        b = desk.order[0]
        b.desk.end("a", [key[2] for key in b.desk._kept])
        assert await desk.ask(3, [7]) == DraftAnswer(ONE, 4, (7,))
        assert proposer.texts[-1] == (1, 2, 3, 7)
        assert not desk.meter.failures


@pytest.mark.parametrize(
    ("bad", "status"),
    [(TooLong, "DATA_LOSS"), (lambda: Scripted(VOCAB), "DATA_LOSS"), (Breaks, "UNKNOWN")],
    ids=["too long", "no such token", "breaks"],
)
def test_whoever_drafts_nonsense_is_replaced(tmp_path: Path, bad: Callable[[], Proposer], status: str) -> None:
    @in_loop
    async def test() -> None:
        good = Scripted(7, 8)
        async with drafting(tmp_path, bad(), good) as desk:
            assert await desk.ask(0, [1, 2]) == DraftAnswer(ONE, 2, ())
            assert await desk.ask(2, [3]) == DraftAnswer(ONE, 3, (7, 8))
            assert good.texts == [(1, 2, 3)]
            assert desk.meter.failures == {("b0", status): 1}
            assert desk.meter.of("m").failures == 1

    test()


@in_loop
async def test_whoever_hangs_is_replaced_and_with_nobody_left_nobody_is_asked(tmp_path: Path) -> None:
    hangs, good = Hangs(7), Scripted(8)
    async with drafting(tmp_path, hangs, good) as desk:
        assert await desk.ask(0, [1, 2]) == DraftAnswer(ONE, 2, ())
        assert await desk.ask(2, [3]) == DraftAnswer(ONE, 3, (8,))
        assert desk.meter.failures == {("b0", "DEADLINE_EXCEEDED"): 1}
        good.token_ids = (VOCAB,)
        assert await desk.ask(3, [4]) == DraftAnswer(ONE, 4, ())
        assert desk.source.expected_s is None
        assert await desk.ask(4, [5]) == DraftAnswer(ONE, 5, ())  # asked all the same


@in_loop
async def test_a_node_that_dies_within_a_block_is_replaced(tmp_path: Path) -> None:
    dies, own = Hangs(7), Scripted(8)
    async with drafting(tmp_path, dies, own=own) as desk:
        asked = asyncio.create_task(desk.ask(0, [1, 2]))
        await asyncio.to_thread(dies.begun.wait, 20)
        stopping = asyncio.create_task(desk.order[0].stop())
        assert await asked == DraftAnswer(ONE, 2, ())
        dies.go.set()
        await stopping
        assert await desk.ask(2, [3]) == DraftAnswer(ONE, 3, (8,))
        assert own.texts == [(1, 2, 3)]


@in_loop
async def test_who_failed_is_asked_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.node.drafts.remote.LEFT_OUT_S", 0.05)
    proposer = Scripted(VOCAB)
    async with drafting(tmp_path, proposer) as desk:
        assert await desk.ask(0, [1]) == DraftAnswer(ONE, 1, ())
        proposer.token_ids = (7,)
        await until(lambda: desk.source.expected_s is not None)
        assert await desk.ask(1, [2]) == DraftAnswer(ONE, 2, (7,))
        assert proposer.texts[-1] == (1, 2)


@in_loop
async def test_a_source_nobody_attached_answers_with_nothing_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    desk = Desk.__new__(Desk)
    desk.source = RemoteDrafts("m", DraftMeter(), SystemClock())
    assert desk.source.expected_s is None
    assert await desk.ask(0, [1, 2]) == DraftAnswer(ONE, 2, ())
    assert desk.source.answers() == ()
    with pytest.raises(ValueError, match="position 9"):
        desk.source.ask(DraftAsk(ONE, 9, [1], 1))
    desk.source.forget(ONE)
    with pytest.raises(ValueError, match="position 2"):
        desk.source.ask(DraftAsk(ONE, 2, [1], 1))


@in_loop
async def test_a_later_ask_takes_the_place_of_one_under_way(tmp_path: Path) -> None:
    hangs = Hangs(7, 8)
    async with drafting(tmp_path, hangs, rate=1.0) as desk:
        desk.source.ask(DraftAsk(ONE, 0, [1, 2], 4))
        await asyncio.to_thread(hangs.begun.wait, 20)
        desk.source.ask(DraftAsk(ONE, 2, [7, 8], 4))  # guessed, and then known to be wrong
        desk.source.ask(DraftAsk(ONE, 2, [3], 4))
        await until(lambda: desk.order[0].desk.tokens == 3)
        hangs.go.set()
        answers = list[DraftAnswer]()
        while len(answers) < 3:
            answers += await asyncio.to_thread(desk.source.answers, 20.0)
        assert answers == [DraftAnswer(ONE, 2, (7, 8)), DraftAnswer(ONE, 4, ()), DraftAnswer(ONE, 3, (7, 8))]
        assert not desk.meter.failures
