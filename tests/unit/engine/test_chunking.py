"""A step's rows of prompts: the short ones first, the oldest always, and all within the time that others wait."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.clock import FakeClock
from tests.fakes.engines import EngineBench

from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.engine.executor import StepBatch
from paceline.engine.step_costs import BESIDE, FLOOR, LONGER, PromptLeft, StepCosts, StepLoad, rows_of_prompts


def left(n: int, start: int = 0, rows: int | None = None) -> PromptLeft:
    return PromptLeft(start, n if rows is None else rows, n)


def machine(one_s: float, row_s: float, key_s: float = 0.0) -> StepCosts:
    """Costs as they were measured on a machine that takes so long for a step, for each row of it, and for each key."""
    costs = StepCosts()
    for _ in range(30):
        for rows, start in [(1, 0), (2, 0), (4, 0), (9, 0), (33, 0), (120, 4000), (250, 0), (512, 0), (512, 8000)]:
            load = StepLoad(0).more(rows, start)
            costs.took(load, one_s + row_s * rows + key_s * load.keys)
        costs.took(StepLoad(1), one_s + row_s)
    return costs


def prompts_alone(costs: StepCosts) -> StepCosts:
    """As they are where no step without prompts was measured."""
    alone = StepCosts()
    if costs.any_known:
        alone.took(StepLoad(0).more(100, 0), 0.2)
    return alone


prompts = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 900), st.integers(0, 100)), min_size=1, max_size=12).map(
    lambda made: [PromptLeft(start, rows, rows + (more if more > 50 else 0)) for start, rows, more in made]
)
budgets = st.sampled_from([0.001, 0.05, 0.25, inf])


@given(prompts, st.integers(0, 600), st.integers(0, 20), budgets, st.booleans())
def test_rows_are_within_bounds_and_the_oldest_always_advances(
    each: list[PromptLeft], most: int, answers: int, budget_s: float, known: bool
) -> None:
    costs = machine(0.01, 0.001, 1e-7) if known else StepCosts()
    costs = costs if answers % 2 else prompts_alone(costs)
    rows = rows_of_prompts(each, most, answers, costs, budget_s)
    assert sum(rows) <= most
    assert all(0 <= n <= prompt.rows for n, prompt in zip(rows, each, strict=True))
    assert rows[0] > 0 or most == 0


@given(prompts, st.integers(5, 600))
def test_where_nothing_waits_no_row_is_left_empty(each: list[PromptLeft], most: int) -> None:
    # None of them ends, so that no first token waits.
    each = [PromptLeft(prompt.start, prompt.rows, prompt.rows + 1) for prompt in each]
    rows = rows_of_prompts(each, most, 0, machine(0.01, 0.001))
    assert sum(rows) == min(most, sum(prompt.rows for prompt in each))
    assert rows[0] >= min(most // FLOOR, each[0].rows)


@given(prompts, st.integers(1, 16), st.sampled_from([0.02, 0.1, 0.25, 1.0]))
def test_a_budget_is_kept_but_for_the_oldest_prompts_one_row(each: list[PromptLeft], answers: int, budget_s: float) -> None:
    costs = machine(0.02, 0.0005, 1e-7)
    rows = rows_of_prompts(each, 512, answers, costs, budget_s)
    load = StepLoad(answers)
    for n, prompt in zip(rows, each, strict=True):
        load = load.more(n, prompt.start)
    allowed = max(budget_s, BESIDE * costs.of(StepLoad(answers)))
    assert costs.of(load) <= allowed * (1 + 1e-9) or rows[0] == 1


@pytest.mark.parametrize("answers", [18, 22, 60])
def test_answers_that_fill_the_budget_leave_prompts_a_part_of_the_time(answers: int) -> None:
    # As of an 8B on two processors: sixteen answers took 225 ms a step, and a prompt of 32 tokens beside them sixteen steps.
    costs = machine(0.01, 0.0135)
    [rows] = rows_of_prompts([left(512)], 512, answers, costs, 0.25)
    assert costs.of(StepLoad(answers).more(rows, 0)) - costs.of(StepLoad(answers)) > costs.of(StepLoad(answers)) / 4


@pytest.mark.parametrize("row_s", [0.001, 0.022])
def test_a_first_token_waits_little_for_rows_that_end_no_wait(row_s: float) -> None:
    costs = machine(row_s, row_s)
    rows = rows_of_prompts([left(8000), left(20)], 512, 0, costs)
    assert rows[1] == 20
    assert rows[0] >= 1
    assert costs.of(StepLoad(0).more(sum(rows), 0)) <= LONGER * costs.of(StepLoad(0).more(20, 0)) * 1.1


def test_where_rows_are_free_they_are_used_beside_a_first_token() -> None:
    assert sum(rows_of_prompts([left(8000), left(20)], 512, 0, machine(1.0, 1e-9))) == 512


def test_the_shortest_comes_first_and_the_oldest_has_its_part() -> None:
    assert rows_of_prompts([left(8000), left(3000), left(900)], 500, 0, machine(0.01, 0.001)) == [100, 0, 400]
    assert rows_of_prompts([left(900), left(3000)], 500, 0, machine(0.01, 0.001)) == [500, 0]


def test_a_step_is_of_one_path() -> None:
    assert rows_of_prompts([left(90, rows=40)], 500, 0, StepCosts()) == [40]


def test_a_context_grows_dear() -> None:
    costs = machine(0.02, 0.0005, 4e-7)
    near, far = (rows_of_prompts([left(8000, start)], 512, 1, costs, 0.25)[0] for start in (0, 16000))
    assert near > 1.5 * far > 20


def test_what_was_measured_twice_stands_while_other_counts_are_found_cheaper_than_assumed() -> None:
    """An 8B where weights are read for one row as for twenty: steps of more rows cost less than their shape suggests, those of twenty what they cost."""
    costs = StepCosts()
    for rows, seconds in [(20, 3.0), (20, 1.5), (20, 1.5), (27, 1.6), (32, 1.7), (64, 2.4), (16, 1.4)]:
        costs.took(StepLoad(0).more(rows, 0), seconds)
    assert costs.of(StepLoad(0).more(20, 0)) == pytest.approx(1.5, rel=0.05)
    costs.took(StepLoad(1), 0.8)
    (rows,) = rows_of_prompts([left(8000)], 512, 1, costs, 0.25)
    assert 0 < rows < 20, "twenty would make the answer beside them wait for almost twice its time"


def test_a_machine_that_begins_slowly_is_soon_known_to_be_fast() -> None:
    costs = StepCosts()
    for rows, seconds in [(20, 0.6), (20, 0.02), (20, 0.02), (512, 0.4), (24, 0.024)]:
        costs.took(StepLoad(0).more(rows, 0), seconds)
    assert costs.of(StepLoad(0).more(20, 0)) == pytest.approx(0.02, rel=0.2)
    assert costs.of(StepLoad(0).more(24, 0)) < 0.04


def test_a_step_without_rows_is_estimated_where_only_prompts_were_measured() -> None:
    """As beside a pipeline's answers, all of whose rows are on their way."""
    costs = StepCosts()
    costs.took(StepLoad(0).more(64, 0), 0.1)
    assert 0 <= costs.of(StepLoad(0)) < costs.of(StepLoad(0).more(64, 0))


class TimedExecutor:
    """Lets each batch take what a machine with such costs would."""

    def __init__(self, bench: EngineBench, clock: FakeClock, one_s: float, row_s: float, key_s: float) -> None:
        self.took: list[tuple[StepBatch, float]] = []
        submit = bench.executor.submit

        def timed(batch: StepBatch) -> None:
            submit(batch)
            rows = sum(len(step.token_ids) for step in batch.steps)
            keys = sum(len(step.token_ids) * step.first_position for step in batch.steps)
            seconds = one_s + row_s * rows + key_s * keys
            clock.advance(seconds)
            self.took.append((batch, seconds))

        bench.executor.submit = timed  # type: ignore[method-assign]


@pytest.mark.parametrize(("one_s", "row_s", "key_s"), [(0.01, 0.0015, 1e-6), (0.22, 0.02, 2e-6), (0.4, 0.03, 0.0)])
def test_while_an_answer_is_written_steps_keep_to_their_budget(one_s: float, row_s: float, key_s: float) -> None:
    clock = FakeClock()
    bench = EngineBench(n_blocks=600, max_context=2000, prefill_chunk=512, clock=clock)
    timed = TimedExecutor(bench, clock, one_s, row_s, key_s)
    live = GenerationRequest(RequestId("live"), (1, 2, 3), 400, SamplingParams(temperature=0), ignore_eos=True)
    long = GenerationRequest(RequestId("long"), tuple(1 + i % 29 for i in range(1500)), 2, SamplingParams(temperature=0), ignore_eos=True)
    bench.add(live)
    for _ in range(20):
        bench.step()
    bench.add(long)
    bench.run()
    both = [seconds for batch, seconds in timed.took if len(batch.steps) == 2]
    allowed = max(0.25, BESIDE * (one_s + row_s))
    # What is learnt on the way may be late by a step or two.
    assert sum(seconds > 1.2 * allowed for seconds in both) <= 0.04 * len(both) + 2
    assert max(both) < 2 * allowed
    # And prompts use what they may.
    assert sum(both) / len(both) > 0.6 * allowed or len(both) < 5


def test_where_nothing_waits_chunks_are_full_however_slow() -> None:
    clock = FakeClock()
    bench = EngineBench(n_blocks=600, max_context=2000, prefill_chunk=512, clock=clock)
    timed = TimedExecutor(bench, clock, 0.4, 0.03, 0.0)
    bench.run(GenerationRequest(RequestId("long"), tuple(1 + i % 29 for i in range(1500)), 2))
    assert [len(batch.steps[0].token_ids) for batch, _ in timed.took] == [512, 512, 476, 1]
