"""A step of prompts ends early where nobody wants it any more, or a shorter prompt waits; no byte follows from that, and all get on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.engines import EngineBench, answer_alone
from tests.sampling import examples

from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.engine.executor import StepBatch
from paceline.engine.scheduler import LEAST_ROWS


def request(name: str, n_prompt: int, max_tokens: int = 3) -> GenerationRequest:
    prompt = tuple(1 + (i * i + len(name)) % 31 for i in range(n_prompt))
    return GenerationRequest(RequestId(name), prompt, max_tokens, SamplingParams(temperature=0), ignore_eos=True)


def bench_with(*requests: GenerationRequest, **config: int) -> EngineBench:
    """A bench whose first batch is in flight."""
    bench = EngineBench(n_blocks=200, max_context=700, **{"prefill_chunk": 64, **config})
    bench.add(*requests)
    bench.engine.submit()
    return bench


def collect(bench: EngineBench) -> None:
    bench.read(bench.engine.collect())
    bench.engine.check_invariants()


def steps(bench: EngineBench) -> int:
    return bench.engine.stats().steps


class TestWhoIsGone:
    def test_a_step_of_which_nothing_is_wanted_ends(self) -> None:
        bench = bench_with(request("a", 100), request("bb", 30))
        bench.engine.recall({RequestId("a")}, None)
        bench.engine.recall({RequestId("a"), RequestId("bb"), RequestId("other")}, None)
        collect(bench)
        assert steps(bench) == 0
        for name in ("a", "bb"):
            bench.engine.abort(RequestId(name))
        bench.run()
        assert {answer.finish for answer in bench.answers.values()} == {FinishReason.ABORT}

    def test_a_step_of_which_something_is_wanted_goes_on(self) -> None:
        bench = bench_with(request("a", 100), request("bb", 30))
        bench.engine.recall({RequestId("a")}, None)
        collect(bench)
        assert steps(bench) == 1
        bench.run()

    def test_aborted_while_its_step_is_recalled(self) -> None:
        bench = bench_with(request("a", 100))
        bench.engine.recall({RequestId("a")}, None)
        bench.engine.abort(RequestId("a"))
        assert bench.engine.stats().blocks_in_use > 0
        collect(bench)
        bench.check_rest()

    def test_a_step_with_answers_goes_on(self) -> None:
        bench = bench_with(request("live", 5, 30))
        collect(bench)
        bench.add(request("a", 100))
        bench.engine.submit()
        bench.engine.recall({RequestId("live"), RequestId("a")}, 1, stops=True)
        collect(bench)
        assert steps(bench) == 2
        bench.run()

    def test_a_stop_ends_whatever_it_is(self) -> None:
        bench = bench_with(request("a", 100))
        bench.engine.recall(set(), None, stops=True)
        collect(bench)
        assert steps(bench) == 0

    def test_over_other_machines_nothing_is_called_back(self) -> None:
        bench = bench_with(request("a", 100))
        deep = EngineBench(n_blocks=64, depth=2)
        deep.add(request("a", 40))
        deep.engine.submit()
        deep.engine.recall({RequestId("a")}, 1, stops=True)
        collect(deep)
        assert steps(deep) == 1
        for each in (bench, deep):
            each.run()


class TestWhoComes:
    def test_a_short_prompt_is_answered_next_and_the_other_loses_no_byte(self) -> None:
        long, short = request("long", 200), request("short", 6)
        bench = bench_with(long)
        bench.engine.recall(set(), len(short.prompt_ids))
        collect(bench)
        bench.add(short)
        bench.step()
        assert len(bench.answers[short.request_id, 0].token_ids) == 1
        bench.run()
        for one in (long, short):
            assert bench.answers[one.request_id, 0].token_ids == answer_alone(one).token_ids

    @pytest.mark.parametrize(("shortest", "config"), [(17, {}), (1, {"max_running": 1})])
    def test_what_would_gain_little_or_nothing_is_waited_for(self, shortest: int, config: dict[str, int]) -> None:
        bench = bench_with(request("long", 300), **config)
        bench.engine.recall(set(), shortest)
        collect(bench)
        assert steps(bench) == 1
        bench.run()

    def test_steps_are_short_for_a_while_so_that_little_is_lost_when_others_come(self) -> None:
        bench = bench_with(request("long", 600), prefill_chunk=256)
        batches: list[StepBatch] = []
        submit = bench.executor.submit
        bench.executor.submit = lambda batch: (batches.append(batch), submit(batch))[1]  # type: ignore[method-assign, func-returns-value]
        bench.engine.recall(set(), 1)
        collect(bench)
        bench.run()
        assert [len(batch.steps[0].token_ids) for batch in batches[:5]] == [LEAST_ROWS, 64, 128, 256, 120]

    @given(st.lists(st.booleans(), min_size=30, max_size=60))
    @settings(max_examples=examples(30), deadline=None)
    def test_however_often_others_come_a_prompt_gets_on(self, comes: list[bool]) -> None:
        """No two steps in a row are given up, so that at least each second one is done."""
        bench = EngineBench(n_blocks=200, max_context=700, prefill_chunk=64)
        bench.add(request("long", 600))
        given_up = [False]
        for one in comes:
            if not bench.engine.has_work:
                break
            before = steps(bench)
            bench.engine.submit()
            if one:
                bench.engine.recall(set(), 1)
            collect(bench)
            given_up.append(steps(bench) == before)
            assert not (given_up[-1] and given_up[-2])
        bench.run()
