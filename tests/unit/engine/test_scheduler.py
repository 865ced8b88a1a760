"""Who runs when: neither prompts nor answers starve, the earliest always advances, and computed prompts are computed once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.engines import EngineBench, answer_alone
from tests.sampling import examples

from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.engine.executor import Path, StepBatch
from paceline.engine.scheduler import PASSED


def request(name: str, n_prompt: int = 6, max_tokens: int = 8, *, salt: int = 0, **fields: object) -> GenerationRequest:
    prompt = tuple(1 + (i * i + salt) % 31 for i in range(n_prompt))
    return GenerationRequest(RequestId(name), prompt, max_tokens, SamplingParams(temperature=0), ignore_eos=True, **fields)  # type: ignore[arg-type]


def watched(bench: EngineBench) -> list[StepBatch]:
    """All batches the engine will submit."""
    batches: list[StepBatch] = []
    submit = bench.executor.submit

    def spy(batch: StepBatch) -> None:
        batches.append(batch)
        submit(batch)

    bench.executor.submit = spy  # type: ignore[method-assign]
    return batches


class TestFairness:
    def test_decodes_run_in_every_step_and_prompts_share_the_chunk_beside_them(self) -> None:
        bench = EngineBench(n_blocks=64, prefill_chunk=8)
        batches = watched(bench)
        bench.add(request("a", 3, 20), request("b", 3, 20, salt=1))
        bench.step()
        bench.add(request("long", 40, 4, salt=2))
        for _ in range(5):
            bench.step()
        for batch in batches[1:6]:
            assert [(step.sequence, len(step.token_ids)) for step in batch.steps] == [(0, 1), (1, 1), (2, 8)]
        bench.run()

    def test_a_chunk_smaller_than_the_running_sequences_still_moves_prompts(self) -> None:
        bench = EngineBench(prefill_chunk=1)
        bench.add(*(request(str(i), 2, 30, salt=i) for i in range(4)))
        for _ in range(8):
            bench.step()
        assert bench.engine.stats().running == 4
        assert all(len(bench.answers[RequestId(str(i)), 0].token_ids) > 0 for i in range(4))
        bench.run()

    def test_admission_is_first_come_first_served(self) -> None:
        bench = EngineBench(n_blocks=8, max_running=2, prefill_chunk=64)
        bench.add(*(request(str(i), 5, 4, salt=i) for i in range(6)))
        bench.run()
        assert list(bench.answers) == [(str(i), 0) for i in range(6)]

    def test_one_that_finds_no_blocks_lets_others_pass_and_not_for_ever(self) -> None:
        bench = EngineBench(n_blocks=8, max_running=8, prefill_chunk=64)
        bench.add(request("a", 20, 8), request("big", 28, 4, salt=1))
        bench.step()
        for number in range(3 * PASSED):
            bench.add(request(f"small {number}", 2, 4, salt=2 + number))
            bench.step()
        bench.run()
        order = [name for name, _ in bench.answers]
        assert order.index(RequestId("small 0")) < order.index(RequestId("big")) <= PASSED + 2

    @pytest.mark.parametrize("n_blocks", [64, 12])
    def test_a_short_prompt_overtakes_a_long_one(self, n_blocks: int) -> None:
        bench = EngineBench(n_blocks=n_blocks)
        bench.add(request("long", 40, 2), request("longer", 44, 2, salt=1))
        bench.step()
        bench.add(request("short", 3, 2, salt=2))
        bench.step()
        assert list(bench.answers) == [("short", 0)]
        bench.run()
        assert list(bench.answers) == [("short", 0), ("long", 0), ("longer", 0)]

    def test_behind_a_backlog_nobody_is_admitted_who_would_get_no_row(self) -> None:
        bench = EngineBench(n_blocks=64)
        bench.add(request("long", 40, 2), request("longer", 44, 2, salt=1), request("middle", 30, 2, salt=2))
        bench.step()
        assert (bench.engine.stats().running, bench.engine.stats().waiting) == (2, 1)
        bench.run()
        assert list(bench.answers) == [("middle", 0), ("long", 0), ("longer", 0)]

    @given(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=40),
        st.sampled_from([13, 30, 64]),
    )
    @settings(max_examples=examples(60), deadline=None)
    def test_the_earliest_advances_in_every_step_whoever_comes(self, arrivals: list[tuple[int, int, int]], n_blocks: int) -> None:
        """Whatever comes after it, the oldest that runs gets a row in each step; and everything ends."""
        bench = EngineBench(n_blocks=n_blocks)
        batches = watched(bench)
        bench.add(request("first", 40, 4))
        for number, (pause, n_prompt, n_answer) in enumerate(arrivals):
            bench.add(request(str(number), n_prompt, n_answer, salt=number))
            for _ in range(pause):
                bench.step()
        answers = bench.run()
        n_first = sum(any(step.sequence == 0 for step in batch.steps) for batch in batches)
        assert all(batches[place].steps and any(step.sequence == 0 for step in batches[place].steps) for place in range(n_first))
        for number, (_, n_prompt, n_answer) in enumerate(arrivals):
            one = request(str(number), n_prompt, n_answer, salt=number)
            assert answers[one.request_id, 0].token_ids == answer_alone(one).token_ids

    def test_never_more_than_max_running(self) -> None:
        bench = EngineBench(max_running=2)
        bench.add(*(request(str(i), salt=i) for i in range(5)))
        most = 0
        while bench.engine.has_work:
            bench.step()
            most = max(most, bench.engine.stats().running)
        assert most == 2


class TestPaths:
    def test_rows_below_the_prompts_length_run_the_prompt_path_and_later_ones_the_generated(self) -> None:
        bench = EngineBench(n_blocks=9, prefill_chunk=5)
        batches = watched(bench)
        requests = [request(str(i), 5 + i, 16, salt=i) for i in range(3)]
        bench.run(*requests)
        assert bench.engine.stats().preemptions > 0
        replayed = 0
        for batch in batches:
            for step in batch.steps:
                n_prompt = 5 + step.sequence
                last = step.first_position + len(step.token_ids) - 1
                assert step.path is (Path.PROMPT if last < n_prompt else Path.GENERATED)
                assert (step.first_position < n_prompt) == (last < n_prompt), "a step is of two paths"
                replayed += step.path is Path.GENERATED and len(step.token_ids) > 1
        assert replayed > 0, "nothing was replayed in more than one row"

    def test_only_the_last_row_wants_logits(self) -> None:
        bench = EngineBench(prefill_chunk=4)
        batches = watched(bench)
        bench.run(request("a", 10, 2))
        wanted = [tuple(step.logits_rows) for batch in batches for step in batch.steps]
        assert wanted == [(), (), (1,), (0,)]


class TestPreemption:
    def test_takes_the_latest_and_changes_no_byte(self) -> None:
        bench = EngineBench(n_blocks=10)
        requests = [request(str(i), 8, 24, salt=i) for i in range(3)]
        answers = bench.run(*requests)
        assert bench.engine.stats().preemptions > 0
        assert list(answers) == [(str(i), 0) for i in range(3)]
        for one in requests:
            assert answers[one.request_id, 0].token_ids == answer_alone(one).token_ids

    def test_the_earliest_is_never_delayed(self) -> None:
        bench = EngineBench(n_blocks=10, prefix_cache=False)
        bench.add(*(request(str(i), 8, 24, salt=i) for i in range(3)))
        for generated in range(1, 25):
            bench.step()
            assert len(bench.answers[RequestId("0"), 0].token_ids) == generated
        bench.run()

    def test_a_sequence_that_needs_every_block_gets_them(self) -> None:
        bench = EngineBench(n_blocks=8)
        bench.run(request("warm", 8, 9, salt=4))
        answer = bench.run(request("all", 8, 25))[RequestId("all"), 0]
        assert len(answer.token_ids) == 25


class TestPrefixes:
    def test_the_last_prompt_token_always_runs(self) -> None:
        bench = EngineBench()
        bench.run(request("a", 8, 3))
        before = bench.runner.rows_run
        answers = bench.run(request("b", 8, 3))
        assert answers[RequestId("b"), 0].cached_tokens == 4
        assert bench.runner.rows_run - before == 4 + 2
        assert answers[RequestId("b"), 0].token_ids == answers[RequestId("a"), 0].token_ids

    def test_siblings_compute_their_prompt_once(self) -> None:
        bench = EngineBench(n_blocks=64, prefill_chunk=16)
        bench.run(request("a", 30, 3, n=4))
        assert bench.runner.rows_run == 30 + 3 * 2 + 4 * 2
        assert bench.answers[RequestId("a"), 3].cached_tokens == 28

    def test_strangers_with_one_beginning_compute_it_once_even_when_they_come_together(self) -> None:
        bench = EngineBench(n_blocks=64, prefill_chunk=16)
        bench.run(*(request(str(i), 30, 3) for i in range(4)))
        assert bench.runner.rows_run == 30 + 3 * 2 + 4 * 2

    def test_who_waits_for_a_prefix_goes_on_when_its_maker_is_gone(self) -> None:
        bench = EngineBench(prefill_chunk=4)
        bench.add(request("a", 30, 3), request("b", 30, 3))
        bench.step()
        assert bench.engine.stats().running == 1
        bench.engine.abort(RequestId("a"))
        answers = bench.run()
        assert answers[RequestId("b"), 0].token_ids == answer_alone(request("b", 30, 3)).token_ids
        assert answers[RequestId("b"), 0].cached_tokens == 4

    def test_who_waits_for_a_prefix_lets_others_pass(self) -> None:
        bench = EngineBench(n_blocks=64, prefill_chunk=32)
        bench.add(request("a", 30, 3), request("twin", 30, 3), request("other", 2, 3, salt=9))
        bench.step()
        assert bench.engine.stats().running == 2
        bench.run()

    @pytest.mark.parametrize("one_path", [False, True])
    def test_generated_blocks_are_shared_only_where_the_paths_are_one(self, one_path: bool) -> None:
        bench = EngineBench(one_path=one_path)
        first = bench.run(request("a", 6, 14))[RequestId("a"), 0]
        turn = GenerationRequest(
            RequestId("b"), (*request("a", 6).prompt_ids, *first.token_ids, 5, 6), 4, SamplingParams(temperature=0), ignore_eos=True
        )
        answer = bench.run(turn)[RequestId("b"), 0]
        assert answer.cached_tokens == (16 if one_path else 4)
        assert answer.token_ids == answer_alone(turn, one_path=one_path).token_ids

    def test_a_prompt_shorter_than_a_block_shares_what_it_generated(self) -> None:
        bench = EngineBench(one_path=True)
        first = bench.run(request("a", 2, 8))[RequestId("a"), 0]
        turn = GenerationRequest(RequestId("b"), (*request("a", 2).prompt_ids, *first.token_ids), 2, ignore_eos=True)
        assert bench.run(turn)[RequestId("b"), 0].cached_tokens == 8

    def test_an_answer_of_one_token_leaves_all_full_blocks_of_its_prompt(self) -> None:
        bench = EngineBench(one_path=True, prefill_chunk=16)
        bench.run(request("a", 9, 1))
        assert bench.run(request("b", 9, 3))[RequestId("b"), 0].cached_tokens == 8

    def test_off_means_off(self) -> None:
        bench = EngineBench(prefix_cache=False)
        bench.run(request("a", 12, 2))
        assert bench.run(request("b", 12, 2))[RequestId("b"), 0].cached_tokens == 0


class TestDepth:
    @pytest.mark.parametrize("depth", [2, 4])
    def test_one_prompt_keeps_every_stage_at_work(self, depth: int) -> None:
        bench = EngineBench(n_blocks=64, max_context=128, depth=depth, prefill_chunk=8 * depth)
        batches, long = watched(bench), request("long", 96, 4)
        bench.add(long)
        bench.engine.submit()
        assert [[(step.first_position, len(step.token_ids)) for step in batch.steps] for batch in batches] == [
            [(8 * place, 8)] for place in range(depth)
        ]
        bench.read(bench.engine.collect())
        assert bench.engine.stats().steps_in_flight == depth - 1
        assert bench.run()[RequestId("long"), 0].token_ids == answer_alone(long).token_ids

    def test_what_comes_behind_a_long_prompt_waits_for_no_more_than_a_chunk(self) -> None:
        bench = EngineBench(n_blocks=64, max_context=128, depth=2, prefill_chunk=16)
        batches = watched(bench)
        bench.add(request("long", 96, 4))
        bench.step()
        bench.step()
        came = len(batches)
        bench.add(request("short", 4, 1, salt=1))
        while (RequestId("short"), 0) not in bench.answers or not bench.answers[RequestId("short"), 0].token_ids:
            bench.step()
        before = batches[came - 1 : next(i for i, batch in enumerate(batches) if any(step.sequence == 1 for step in batch.steps))]
        assert sum(len(step.token_ids) for batch in before for step in batch.steps) <= 16

    @pytest.mark.parametrize("depth", [2, 4])
    def test_running_sequences_are_spread_over_the_batches(self, depth: int) -> None:
        bench = EngineBench(n_blocks=64, depth=depth)
        batches = watched(bench)
        requests = [request(str(i), 2, 20, salt=i) for i in range(8)]
        bench.add(*requests)
        for _ in range(40):
            bench.step()
        assert [len(batch.steps) for batch in batches[20:30]] == [8 // depth] * 10
        answers = bench.run()
        for one in requests:
            assert answers[one.request_id, 0].token_ids == answer_alone(one).token_ids

    @pytest.mark.parametrize("depth", [2, 4])
    def test_preemption_waits_for_the_batch_in_flight(self, depth: int) -> None:
        bench = EngineBench(n_blocks=10, depth=depth)
        requests = [request(str(i), 8, 24, salt=i) for i in range(4)]
        answers = bench.run(*requests)
        assert bench.engine.stats().preemptions > 0
        for one in requests:
            assert answers[one.request_id, 0].token_ids == answer_alone(one).token_ids
