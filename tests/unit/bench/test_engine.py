from __future__ import annotations

import json
import math

import pytest
from tests.fakes.null_backend import ByteVocabulary, NullRunner

from paceline.bench.engine import BenchPlan, BenchReport, DecodeRow, check_plan, run_bench
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.generation import FinishReason, GenerationChunk, GenerationRequest
from paceline.core.ids import RequestId
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.local import LocalExecutor
from paceline.machine.settings import NodeSettings, Sampled
from paceline.machine.speed import PromptMaker, Spread, drive

VOCABULARY = ByteVocabulary(32, frozenset({0}), (b"", b"a", b"b", b"", b"d"))


class Ticks:
    """A clock that goes on by a second each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def wall(self) -> float:
        return self.now_s


def engine() -> Engine:
    runner = NullRunner(n_blocks=64, block_size=4, vocab=VOCABULARY.size)
    config = EngineConfig(max_context=64, max_running=4, max_waiting=8, prefill_chunk=16, prefix_cache=False)
    return Engine(LocalExecutor(runner), VOCABULARY, config, SystemClock())


def test_every_sequence_gets_exactly_the_tokens_asked_for() -> None:
    timing = drive(engine(), PromptMaker(VOCABULARY).make(3, 7), 5, Ticks())
    assert [len(times) for times in timing.arrivals_s] == [5, 5, 5]
    assert timing.started_s == 1.0
    assert all(list(times) == sorted(times) for times in timing.arrivals_s)


def test_tokens_are_drawn_as_asked() -> None:
    drawn: dict[Sampled, list[int]] = {}
    for sampling in Sampled:
        subject = engine()
        step, tokens = subject.step, drawn.setdefault(sampling, [])
        subject.step = lambda step=step, tokens=tokens: [tokens.extend(chunk.token_ids) or chunk for chunk in step()]  # type: ignore[method-assign]
        drive(subject, PromptMaker(VOCABULARY).make(1, 7), 40, Ticks(), sampling)
    assert len({tuple(tokens) for tokens in drawn.values()}) == len(Sampled)


def test_an_engine_can_be_driven_again() -> None:
    subject, prompts = engine(), PromptMaker(VOCABULARY).make(1, 16)
    drive(subject, prompts, 2, Ticks())
    drive(subject, prompts, 2, Ticks())
    assert not subject.has_work
    assert subject.stats().blocks_in_use == 0


def test_prompts_have_the_length_asked_for_and_no_token_without_text() -> None:
    prompts = PromptMaker(VOCABULARY).make(20, 33)
    assert {len(prompt) for prompt in prompts} == {33}
    assert len(set(prompts)) == 20
    used = {token for prompt in prompts for token in prompt}
    assert not used & {0, 3}
    assert {1, 2, 4} <= used


def test_prompts_are_the_same_in_the_next_bench() -> None:
    assert PromptMaker(VOCABULARY).make(4, 8) == PromptMaker(VOCABULARY).make(4, 8)


class Failing:
    """An engine whose one sequence ends early."""

    def __init__(self, reason: FinishReason, error: str | None) -> None:
        self._chunk = GenerationChunk(RequestId("bench-0"), 0, (1,), "", finish_reason=reason, error=error)
        self.has_work = False

    def add(self, request: GenerationRequest) -> None:
        self.has_work = True

    def step(self) -> list[GenerationChunk]:
        self.has_work = False
        return [self._chunk]


def test_a_failed_sequence_is_no_measurement() -> None:
    with pytest.raises(PacelineError, match="bench-0 ended by error: out of blocks"):
        drive(Failing(FinishReason.ERROR, "out of blocks"), [(1, 2)], 4, Ticks())


def test_a_short_answer_is_no_measurement() -> None:
    with pytest.raises(PacelineError, match="1 tokens where 4"):
        drive(Failing(FinishReason.LENGTH, None), [(1, 2)], 4, Ticks())


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (BenchPlan(prompt_tokens=0), "prompt can't be 0"),
        (BenchPlan(prefill_tokens=-1), "prefill prompt can't be -1"),
        (BenchPlan(rounds=0), "rounds can't be 0"),
        (BenchPlan(answer_tokens=1), "with 1 tokens"),
        (BenchPlan(concurrency=()), "concurrency"),
        (BenchPlan(concurrency=(4, 0)), "concurrency"),
    ],
)
def test_a_plan_that_measures_nothing_is_refused(plan: BenchPlan, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_plan(plan)


def test_a_report_is_json_even_where_a_number_is_missing() -> None:
    row = DecodeRow(2, 1.0, math.nan, 2.0, Spread(1.0, 2.0, 3.0), Spread(math.nan, math.nan, math.nan))
    report = BenchReport("m", "int4", 2, "id", BenchPlan(), 100.0, (row,), 0.0)
    read = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert read["rows"][0]["total_decode_per_s"] is None
    assert read["rows"][0]["first_token"]["p99_ms"] == 3.0
    assert read["plan"]["concurrency"] == [1, 4, 16]


def test_the_bundled_model_is_measured() -> None:
    told: list[str] = []
    plan = BenchPlan(prompt_tokens=8, answer_tokens=4, concurrency=(1, 2), prefill_tokens=24, rounds=1)
    report = run_bench(NodeSettings(), plan, told.append)
    assert [row.concurrency for row in report.rows] == [1, 2]
    assert all(row.sequence_decode_per_s > 0 and row.aggregate_per_s > 0 for row in report.rows)
    assert report.prefill_per_s > 0
    assert report.rows[0].first_token.p50_ms > 0
    assert told[0] == "loading smollm2-135m"
    assert told[-1] == "round 1 of 1: a prompt of 24"


def test_lengths_beyond_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="exceed"):
        run_bench(NodeSettings(context=64), BenchPlan(prompt_tokens=60, answer_tokens=10, concurrency=(1,), prefill_tokens=8, rounds=1))
