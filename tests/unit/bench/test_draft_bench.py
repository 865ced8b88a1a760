"""The bench of drafts: its texts, its forced answers, what it leaves out, what it compares."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console
from tests.fakes.executors import InOrderExecutor
from tests.fakes.null_backend import NullRunner
from tests.fakes.scripted_inference import EOS, SIZE, ByteTokenizer

from paceline.bench import drafts as subject
from paceline.bench.drafts import DraftBenchPlan, DraftReport, RowMeter, answer_all, loops, without_loops
from paceline.bench.exercises import ExerciseKind, ForcedExecutor, Script, load, parse
from paceline.cli.bench import show_speculate
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.core.generation import GenerationChunk
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.store.catalog import open_model

PLAN = DraftBenchPlan(kinds=(ExerciseKind.AGENT,), batches=(1, 3), answer_tokens=12, rounds=2)
SHORT = [
    parse(ExerciseKind.AGENT, f"agent-{place}", f"=== system\nBe brief.\n=== user\n{asked}\n=== assistant\n{said}\n")
    for place, (asked, said) in enumerate([("one two", "one two three"), ("a b c", "abcabc")])
]


def forced_engine(depth: int = 1, chunk: int = 5) -> tuple[Engine, ForcedExecutor]:
    executor = ForcedExecutor(InOrderExecutor(NullRunner(n_blocks=200, vocab=SIZE), depth))
    config = EngineConfig(max_context=256, max_running=4, prefill_chunk=chunk, prefix_cache=False)
    return Engine(executor, ByteTokenizer(), config, SystemClock(), drafting=DraftingConfig()), executor


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return open_model("smollm2-135m").tokenizer


@pytest.mark.parametrize("kind", ExerciseKind)
def test_texts_are_as_long_as_real_ones(kind: ExerciseKind, tokenizer: ByteTokenizer) -> None:
    exercises = load(kind)
    assert len(exercises) >= 4
    for exercise in exercises:
        assert 300 <= len(exercise.prompt_ids(tokenizer)) <= 900, exercise.name
        answer = exercise.answer_ids(tokenizer)
        assert 100 <= len(answer) <= 430, exercise.name
        assert answer[-1] in tokenizer.eos_ids
        assert not loops(answer), exercise.name
        assert exercise.prompt_ids(tokenizer) != exercise.prompt_ids(tokenizer, 1)


def test_a_text_without_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="half"):
        parse(ExerciseKind.PROSE, "half", "=== user\nWell?\n")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forced_model_says_what_it_is_told_to(depth: int) -> None:
    engine, executor = forced_engine(depth)
    tokenizer = ByteTokenizer()
    for words in (["hello", "x", "a longer one", "four", "five"], ["again"]):
        prompts = [tuple(tokenizer.encode(f"prompt of {word}")) for word in words]
        answers = [(*tokenizer.encode(word), EOS) for word in words]
        executor.begin([Script(len(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)])
        got, tally = answer_all(engine, prompts, "off", [99] * len(words), SystemClock())
        assert got == answers
        assert tally.steps > 0
    executor.begin([])
    (free,), _ = answer_all(engine, [tuple(tokenizer.encode("prompt of hello"))], "off", [5], SystemClock())
    assert free != answers[0]


def test_an_answer_loops_where_half_of_its_pieces_are_old() -> None:
    assert not loops(range(40))
    assert not loops([1, 2, 3])
    assert loops([1, 2, 3] * 20)
    assert not loops([*range(30), *range(20)])
    assert loops([7] * 30)


def test_what_loops_is_left_out_and_counted() -> None:
    works = [subject.DraftWork([(1,), (2,)], [9, 9], []), subject.DraftWork([(3,)], [9], [])]
    kept, answers, left_out = without_loops(works, [[(7,) * 30, (1, 2)], [(8,) * 30]])
    assert [work.prompts for work in kept] == [[(2,)]]
    assert answers == [[(1, 2)]]
    assert left_out == 2


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("batch", PLAN.batches)
def test_a_row_compares_the_same_work_with_and_without(monkeypatch: pytest.MonkeyPatch, batch: int, forced: bool) -> None:
    monkeypatch.setattr(subject, "load", lambda _: SHORT)
    engine, executor = forced_engine()
    row = RowMeter(engine, executor, PLAN, SystemClock()).row(ByteTokenizer(), ExerciseKind.AGENT, batch, forced=forced)
    assert row.answers == (batch if batch > 1 else 2 if forced else subject.FEW)
    assert row.same_bytes
    assert row.off.tokens > 0
    assert row.on.tokens > 0
    assert row.least_ratio <= row.ratio <= row.most_ratio
    said = io.StringIO()
    rated = replace(row, kind=ExerciseKind.CODE_EDIT, left_out=12, off_per_s=1332.0, on_per_s=1332.0, ratio=2.5, least_ratio=2.25)
    show_speculate(Console(file=said, width=80), DraftReport("m", "int4", 1, PLAN, (rated, replace(rated, same_bytes=False)), 0.0))
    assert "…" not in said.getvalue()
    assert "12 loop" in said.getvalue()
    assert " same" in said.getvalue()
    assert "OTHERS" in said.getvalue()


def test_other_bytes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "load", lambda _: SHORT)
    engine, executor = forced_engine()

    class Lying:
        """Gives another token now and then, as wrong drafts would that are believed."""

        has_work = property(lambda _: engine.has_work)
        add, stats = engine.add, engine.stats
        steps = 0

        def step(self) -> Sequence[GenerationChunk]:
            self.steps += 1
            return [replace(each, token_ids=(1,)) if self.steps % 50 == 0 and each.token_ids else each for each in engine.step()]

    row = RowMeter(Lying(), executor, PLAN, SystemClock()).row(ByteTokenizer(), ExerciseKind.AGENT, 1, forced=True)  # type: ignore[arg-type]
    assert not row.same_bytes


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"batches": (0,)}, {"answer_tokens": 1}, {"kinds": ()}, {"draft": "off"}, {"draft": ""}, {"draft": "fleet"}]
)
def test_plans_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(PLAN, **wrong).check()  # type: ignore[arg-type]


def test_behind_the_end_of_a_script_it_ends_again() -> None:
    script = Script(4, (10, 11, 12, EOS))
    assert [script.at(position) for position in range(4, 9)] == [10, 11, 12, EOS, EOS]
