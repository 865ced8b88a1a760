"""Drafts save steps where they are right, cost next to nothing where they are wrong, and never change a byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.engines import EngineBench, answer_alone

from paceline.core.errors import ConfigError, InvalidRequest
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId, SequenceId
from paceline.engine.drafting import Drafting, DraftingConfig
from paceline.engine.drafts import DraftAnswer, DraftAsk
from paceline.engine.local import blocks_for
from paceline.engine.sequence import SequenceState

KNOWING = "knowing"


class Knowing:
    """A `DraftSource` that answers at once what it is told to: the truth, or something else."""

    def __init__(self) -> None:
        self.truth: dict[SequenceId, Sequence[int]] = {}
        self.wrong = range(0)
        """Positions at which it says something else."""
        self.expected_s: float | None = 0.001
        self.block = 16
        self.told: dict[SequenceId, list[int]] = {}
        self.forgotten: list[SequenceId] = []
        self.asks = 0
        self._answers: list[DraftAnswer] = []

    def ask(self, ask: DraftAsk) -> None:
        self.asks += 1
        told = self.told.setdefault(ask.sequence, [])
        told[ask.first_position :] = ask.token_ids
        start = len(told)
        truth = self.truth.get(ask.sequence, ())[start : start + ask.length]
        ids = [(token + 1) % 32 if start + i in self.wrong else token for i, token in enumerate(truth)]
        self._answers.append(DraftAnswer(ask.sequence, start, ids))

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        del wait_s
        answers, self._answers = self._answers, []
        return answers

    def forget(self, sequence: SequenceId) -> None:
        self.forgotten.append(sequence)


def bench_with(source: Knowing, **config: Any) -> EngineBench:
    return EngineBench(max_context=256, n_blocks=80, drafting=DraftingConfig(KNOWING, {KNOWING: source}), **config)


def ask_for(n: int, source: Knowing, index: int = 0, **fields: Any) -> GenerationRequest:
    sampling = fields.pop("sampling", SamplingParams(temperature=0.0, seed=1))
    prompt = tuple(1 + (index * 5 + i) % 31 for i in range(6))
    request = GenerationRequest(RequestId(f"r{index}"), prompt, n, sampling, ignore_eos=True, **fields)
    source.truth[SequenceId(index)] = [*request.prompt_ids, *answer_alone(request).token_ids]
    return request


@pytest.mark.parametrize(("depth", "n_blocks"), [(1, 80), (2, 80), (1, 9), (2, 9)])
def test_what_is_planned_is_run(depth: int, n_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is planned behind a prompt's last row, behind the end of the answer, or where there are no blocks."""
    planned: list[int] = []

    class Watched(Drafting):
        def plan(self, sequences: Sequence[SequenceState], rooms: Sequence[int], most: int) -> Sequence[Sequence[int]]:
            drafts = super().plan(sequences, rooms, most)
            planned.extend(map(len, drafts))
            return drafts

        def plan_ahead(self, seq: SequenceState, room: int) -> Sequence[int]:
            draft = super().plan_ahead(seq, room)
            planned.append(len(draft))
            return draft

    monkeypatch.setattr("paceline.engine.engine.Drafting", Watched)
    source = Knowing()
    source.wrong = range(9, 256, 5)
    request = ask_for(29, source)
    bench = EngineBench(max_context=256, depth=depth, n_blocks=n_blocks, drafting=DraftingConfig(KNOWING, {KNOWING: source}))
    bench.run(request)
    assert sum(planned) == bench.engine.stats().drafted_tokens[KNOWING] > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_right_drafts_save_steps(depth: int) -> None:
    source = Knowing()
    request = ask_for(100, source)
    bench = bench_with(source, depth=depth)
    answer = bench.run(request)[request.request_id, 0]
    assert answer.token_ids == answer_alone(request).token_ids
    stats = bench.engine.stats()
    accepted, drafted = stats.accepted_tokens[KNOWING], stats.drafted_tokens[KNOWING]
    assert accepted > 80
    assert drafted <= accepted + 16  # no more than what was guessed behind the end
    assert answer.chunks < 30
    assert source.forgotten == [SequenceId(0)]


def test_one_sequence_keeps_a_pipeline_full_with_guesses_on_guesses() -> None:
    source = Knowing()
    request = ask_for(60, source)
    bench = bench_with(source, depth=2)
    bench.add(request)
    abreast = 0
    while bench.engine.has_work:
        bench.engine.submit()
        abreast += bench.engine.stats().steps_in_flight == 2
        bench.read(bench.engine.collect())
        bench.engine.check_invariants()
    assert bench.answers[request.request_id, 0].token_ids == answer_alone(request).token_ids
    assert abreast > 2


def test_wrong_drafts_are_soon_verified_no_more_and_right_ones_again() -> None:
    source = Knowing()
    request = ask_for(200, source)
    source.wrong = range(100)
    bench = bench_with(source)
    bench.add(request)
    while len(source.told.get(SequenceId(0), ())) < 90:
        bench.step()
    assert bench.engine.stats().drafted_tokens.get(KNOWING, 0) < 30
    answer = bench.run()[request.request_id, 0]
    assert answer.token_ids == answer_alone(request).token_ids
    assert bench.engine.stats().accepted_tokens[KNOWING] > 50


def test_who_never_helps_is_asked_ever_less() -> None:
    source = Knowing()
    request = ask_for(200, source)
    source.wrong = range(300)
    bench = bench_with(source)
    bench.run(request)
    assert bench.engine.stats().drafted_tokens.get(KNOWING, 0) < 30
    assert 8 < source.asks < 40


@pytest.mark.parametrize("depth", [1, 2])
def test_rejected_positions_give_their_blocks_back(depth: int) -> None:
    source = Knowing()
    request = ask_for(80, source)
    source.wrong = range(0, 200, 5)
    bench = bench_with(source, depth=depth)
    bench.add(request)
    rejected = 0
    while bench.engine.has_work:
        bench.step()
        stats = bench.engine.stats()
        rejected = stats.drafted_tokens.get(KNOWING, 0) - stats.accepted_tokens.get(KNOWING, 0)
        if not stats.steps_in_flight and stats.running:
            tokens = 6 + len(bench.answers[request.request_id, 0].token_ids)
            assert stats.blocks_in_use <= blocks_for(tokens, 4)
    assert rejected > 5


@pytest.mark.parametrize("stop", [("ab",), ("b", "é")])
def test_a_stop_string_inside_an_accepted_block_ends_it_there(stop: tuple[str, ...]) -> None:
    source = Knowing()
    request = ask_for(200, source)
    whole = answer_alone(request).text
    source.truth[SequenceId(0)] = [*request.prompt_ids, *answer_alone(request).token_ids]
    stopping = replace(request, stop=stop)
    bench = bench_with(source)
    answer = bench.run(stopping)[request.request_id, 0]
    assert answer.finish is FinishReason.STOP
    assert answer.text == whole[: min(at for one in stop if (at := whole.find(one)) >= 0)]


def test_a_draft_takes_no_block_from_anybody() -> None:
    """Room for the sequences, and none beyond: drafts are cut short, and nobody is preempted for them."""
    source = Knowing()
    requests = [ask_for(20, source, index) for index in range(3)]
    bench = EngineBench(n_blocks=3 * blocks_for(25, 4), max_context=64, drafting=DraftingConfig(KNOWING, {KNOWING: source}))
    answers = bench.run(*requests)
    assert all(answers[request.request_id, 0].token_ids == answer_alone(request).token_ids for request in requests)
    assert bench.engine.stats().preemptions == 0


def test_an_answer_of_one_token_asks_nobody() -> None:
    source = Knowing()
    bench = bench_with(source)
    bench.run(ask_for(1, source))
    assert source.told == {}


def test_a_source_that_has_nothing_to_give_is_not_asked() -> None:
    source = Knowing()
    source.expected_s = None
    bench = bench_with(source)
    bench.run(ask_for(20, source))
    assert source.told == {}


def test_who_is_not_there_cannot_be_asked_for() -> None:
    source = Knowing()
    with pytest.raises(InvalidRequest, match="o node drafts with 'absent'"):
        bench_with(source).add(ask_for(5, source, draft="absent"))
    with pytest.raises(ConfigError, match="o node drafts with 'absent'"):
        DraftingConfig("absent")


@pytest.mark.parametrize("draft", [None, "auto", "ngram"])
def test_an_engine_that_must_not_draft_never_does(draft: str | None) -> None:
    request = GenerationRequest(RequestId("r"), (1, 2, 3, 1, 2, 3, 1, 2), 40, SamplingParams(temperature=0.0), ignore_eos=True, draft=draft)
    bench = EngineBench()
    bench.run(request)
    assert bench.engine.stats().drafted_tokens == {}


def test_a_request_may_say_so() -> None:
    source = Knowing()
    bench = bench_with(source)
    bench.run(ask_for(40, source, draft="off"))
    assert bench.engine.stats().drafted_tokens == {}


def test_no_model_drafts_for_a_request_whose_ways_are_without() -> None:
    source = Knowing()
    bench = bench_with(source)
    request = replace(ask_for(40, source), ways=frozenset({"alone"}))
    assert bench.run(request)[request.request_id, 0].token_ids == answer_alone(request).token_ids
    assert source.told == {}
    assert bench.run(replace(request, request_id=RequestId("with"), ways=frozenset({"alone", "draft"})))
    assert source.told


class Silent(Knowing):
    """Answers soon, with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.expected_s = 0.002
        self.waits = 0

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        self.waits += wait_s > 0
        return super().answers()


@pytest.mark.parametrize("ids", [(), (-1,), (1 << 40,)])
def test_who_has_nothing_to_say_is_soon_waited_for_no_more(ids: tuple[int, ...]) -> None:
    source, clock = Silent(), FakeClock()
    bench = EngineBench(max_context=256, n_blocks=80, drafting=DraftingConfig(KNOWING, {KNOWING: source}), clock=clock)
    bench.add(ask_for(100, source))
    source.truth[SequenceId(0)] = [*range(6), *(100 * ids)]
    while bench.engine.has_work:
        bench.engine.submit()
        clock.advance(0.01)
        bench.read(bench.engine.collect())
    assert 0 < source.waits < 8


def test_nobody_is_waited_for_where_no_draft_can_be_run() -> None:
    """Behind a prompt's last row, and behind an answer's last token but one."""

    source, clock = Silent(), FakeClock()
    source.wrong = range(9, 256, 5)  # whoever was wrong is asked at once, and waited for
    bench = EngineBench(max_context=256, n_blocks=80, drafting=DraftingConfig(KNOWING, {KNOWING: source}), clock=clock)
    unknown = replace(ask_for(2, source, 1), prompt_ids=tuple(range(1, 10)))
    del source.truth[SequenceId(1)]
    waits: list[int] = []
    for request in (ask_for(60, source), unknown):
        bench.add(request)
        while bench.engine.has_work:
            bench.engine.submit()
            clock.advance(0.01)
            bench.read(bench.engine.collect())
        waits.append(source.waits)
    assert waits[0] == waits[1] > 0


def test_drafts_leave_room_for_prompts() -> None:
    source = Knowing()
    bench = bench_with(source, prefill_chunk=8)
    bench.add(ask_for(200, source, 0), ask_for(200, source, 1))
    for _ in range(8):
        bench.step()
    bench.add(replace(ask_for(4, source, 2), prompt_ids=tuple(range(1, 31))))
    for _ in range(12):
        bench.step()
    assert bench.answers[RequestId("r2"), 0].token_ids
    assert not bench.answers[RequestId("r0"), 0].finish


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_of_a_step_are_bounded(depth: int) -> None:
    """Each takes a row of logits, and memory has room for so many."""
    most = list[int]()
    for max_guesses in (3, 64):
        source, rows = Knowing(), list[int]()
        bench = bench_with(source, depth=depth, prefill_chunk=32, max_guesses=max_guesses)
        submit = bench.executor.submit
        bench.executor.submit = lambda batch, rows=rows, submit=submit: (  # type: ignore[method-assign]
            rows.append(sum(len(step.logits_rows) for step in batch.steps)),
            submit(batch),
        )[1]
        bench.run(*(ask_for(60, source, index) for index in range(2)))
        most.append(max(rows))
    assert most[0] <= 2 + 3 < most[1]


def test_texts_that_wait_are_not_indexed() -> None:
    bench = EngineBench(max_context=64, n_blocks=80, max_running=1, drafting=DraftingConfig("ngram"))
    bench.add(ask_for(40, Knowing(), 0), ask_for(4, Knowing(), 1))
    for _ in range(8):
        bench.step()
    indexes = [drafts.index for drafts in bench.engine._drafting._of.values()]
    assert [index is not None and bool(index.ids) for index in indexes] == [True, False]
    bench.run()


def test_a_request_may_name_who_came_later() -> None:
    came = Knowing()

    class Others:
        def names(self) -> Sequence[str]:
            return ("late",)

        def find(self, name: str, sequence: SequenceId) -> Knowing | None:
            assert sequence == SequenceId(0)
            return came if name == "late" else None

    bench = EngineBench(max_context=256, n_blocks=80, drafting=DraftingConfig("off", more=Others()))
    request = ask_for(100, came)
    answer = bench.run(replace(request, draft="late"))[request.request_id, 0]
    assert answer.token_ids == answer_alone(request).token_ids
    assert bench.engine.stats().accepted_tokens["late"] > 80
    assert came.forgotten == [SequenceId(0)]
    with pytest.raises(InvalidRequest, match="the request's ways are without draft"):
        bench.engine.add(replace(request, draft="late", ways=frozenset({"alone"})))
    with pytest.raises(InvalidRequest, match="o node drafts with 'later'") as refused:
        bench.engine.add(replace(request, draft="later"))
    assert refused.value.hint == "There are: auto, off, ngram, late."


def test_who_drafts_for_nobody_any_more_is_listened_to_no_more() -> None:
    """However long the engine is not idle."""
    kept = Knowing()
    made: list[Knowing] = []

    class Others:
        def names(self) -> Sequence[str]:
            return ("new",)

        def find(self, name: str, sequence: SequenceId) -> Knowing:
            made.append(Knowing())
            return made[-1]

    bench = EngineBench(max_context=256, n_blocks=80, drafting=DraftingConfig(KNOWING, {KNOWING: kept}, Others()))
    lasting = ask_for(200, kept)
    bench.add(lasting)
    for number in range(1, 4):
        brief = replace(ask_for(3, kept, number), draft="new")
        bench.add(brief)
        while (brief.request_id, 0) not in bench.answers or bench.answers[brief.request_id, 0].finish is None:
            bench.step()
    assert len(made) == 3
    assert list(bench.engine._drafting._asking._sources) == [kept]
    bench.run()
    assert bench.answers[lasting.request_id, 0].token_ids == answer_alone(lasting).token_ids
