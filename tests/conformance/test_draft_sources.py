"""Every source of drafts of this repository under the one suite: over the wire, of this process's own proposers, with none to draft; and what breaks its
laws is found.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.conformance.suites.draft_source import BOUND_S, DraftSourceCase, DraftSourceSuite
from tests.fakes.loops import on_a_loop
from tests.unit.net.member.nodes import until
from tests.unit.ways.draft.cards import SMALL
from tests.unit.ways.draft.fleet import VOCAB, DraftFleet

from paceline.core.clock import SystemClock
from paceline.core.errors import PlacementError
from paceline.core.ids import SequenceId
from paceline.engine.drafts import BlockProposal, DraftAnswer, DraftAsk, DraftSource
from paceline.ways.draft.finding import Drafter, Key, OwnProposers
from paceline.ways.draft.pool import ProposerPool
from paceline.ways.draft.remote import DraftMeter, RemoteDrafts


def drafted(text: Sequence[int], length: int) -> list[int]:
    """Other tokens for any other text."""
    return [(sum(place * token for place, token in enumerate(text, 1)) + ahead) % VOCAB for ahead in range(length)]


class Digests:
    """A proposer whose drafts tell what it was told."""

    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        return BlockProposal(tuple(drafted(committed, block_size)))


@asynccontextmanager
async def of_this_process() -> AsyncGenerator[RemoteDrafts]:
    pool, source = ProposerPool({"small": Digests()}), RemoteDrafts("small", DraftMeter(), SystemClock())
    own = OwnProposers(pool, {"small": SMALL})
    source.attach(lambda left_out: own.find("small", left_out), own.open, VOCAB)
    try:
        yield source
    finally:
        await source.detach()
        pool.close()


@asynccontextmanager
async def with_no_drafter() -> AsyncGenerator[RemoteDrafts]:
    source = RemoteDrafts("small", DraftMeter(), SystemClock())

    def find(left_out: Collection[Key]) -> Sequence[Drafter]:
        raise PlacementError("there is none")

    pool = ProposerPool({})
    source.attach(find, OwnProposers(pool, {}).open, VOCAB)
    try:
        yield source
    finally:
        await source.detach()
        pool.close()


@pytest.fixture(scope="module")
def over_the_wire(tmp_path_factory: pytest.TempPathFactory) -> Generator[DraftSource]:
    """From another node of a fleet, over mutual TLS."""

    @asynccontextmanager
    async def made() -> AsyncGenerator[RemoteDrafts]:
        fleet = DraftFleet(tmp_path_factory.mktemp("fleet"))
        await fleet.start()
        try:
            await fleet.seen()
            async with fleet.drafting(Digests()) as drafting:
                await until(lambda: drafting.source.expected_s is not None)
                yield drafting.source
        finally:
            await fleet.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.ways.draft.client.LATE_S", BOUND_S)  # nobody here is late, whatever else the machine does
        with on_a_loop(made) as source:
            yield source


class TestOverTheWire(DraftSourceSuite):
    @pytest.fixture
    def case(self, over_the_wire: DraftSource) -> DraftSourceCase:
        return DraftSourceCase(over_the_wire, drafted)


class TestOfThisProcess(DraftSourceSuite):
    @pytest.fixture
    def case(self) -> Generator[DraftSourceCase]:
        with on_a_loop(of_this_process) as source:
            yield DraftSourceCase(source, drafted)


class TestWithNoDrafter(DraftSourceSuite):
    @pytest.fixture
    def case(self) -> Generator[DraftSourceCase]:
        with on_a_loop(with_no_drafter) as source:
            yield DraftSourceCase(source, None)


class Knowing:
    """Drafts at once. What is derived of it breaks a law."""

    expected_s = 0.0
    block = 4

    def __init__(self) -> None:
        self._texts: dict[SequenceId, list[int]] = {}
        self._answers: list[DraftAnswer] = []

    def ask(self, ask: DraftAsk) -> None:
        text = self._texts.setdefault(ask.sequence, [])
        text[ask.first_position :] = ask.token_ids
        self._answers.append(DraftAnswer(ask.sequence, len(text), drafted(text, ask.length)))

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        taken, self._answers = self._answers, []
        return taken

    def forget(self, sequence: SequenceId) -> None:
        self._texts.pop(sequence, None)


class TestKnowing(DraftSourceSuite):
    """What the breaches below are measured against."""

    @pytest.fixture
    def case(self) -> DraftSourceCase:
        return DraftSourceCase(Knowing(), drafted)


class Remembers(Knowing):
    """What stood behind a first position."""

    def ask(self, ask: DraftAsk) -> None:
        text = self._texts.setdefault(ask.sequence, [])
        text.extend(ask.token_ids)
        self._answers.append(DraftAnswer(ask.sequence, ask.first_position + len(ask.token_ids), drafted(text, ask.length)))


class Generous(Knowing):
    """More than was asked for."""

    def ask(self, ask: DraftAsk) -> None:
        super().ask(replace(ask, length=ask.length + 1))


class Keeps(Knowing):
    """Texts of sequences that are over."""

    def ask(self, ask: DraftAsk) -> None:
        if ask.first_position == 0 and ask.sequence in self._texts:
            ask = replace(ask, token_ids=[*self._texts[ask.sequence], *ask.token_ids])
        super().ask(ask)

    def forget(self, sequence: SequenceId) -> None: ...


class Mixes(Knowing):
    """All sequences are one."""

    def ask(self, ask: DraftAsk) -> None:
        super().ask(ask)
        self._answers[-1] = replace(self._answers[-1], token_ids=drafted(next(iter(self._texts.values())), ask.length))


class Unready(Knowing):
    """Says that it has a drafter, of nothing."""

    block = 0


@pytest.mark.parametrize(
    ("source", "law"),
    [
        (Remembers, DraftSourceSuite.test_a_first_position_takes_back_what_stood_behind_it),
        (Generous, DraftSourceSuite.test_only_what_is_new_of_a_text_need_be_said),
        (Keeps, DraftSourceSuite.test_a_sequence_that_is_over_begins_anew_under_its_name),
        (Mixes, DraftSourceSuite.test_sequences_are_apart_and_each_is_answered),
        (Unready, DraftSourceSuite.test_what_it_says_of_itself_can_be_meant),
    ],
)
def test_a_source_that_breaks_a_law_is_found(source: type[Knowing], law: Callable[[DraftSourceSuite, DraftSourceCase], None]) -> None:
    with pytest.raises(AssertionError):
        law(DraftSourceSuite(), DraftSourceCase(source(), drafted))
