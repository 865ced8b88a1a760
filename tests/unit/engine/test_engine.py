"""What an engine promises its owner: endings, refusals, aborts, failures, counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.engines import VOCABULARY, Answer, EngineBench, answer_alone

from paceline.core.errors import (
    ConfigError,
    ContextOverflow,
    ExecutorLost,
    ExecutorUnavailable,
    InvalidRequest,
    Overloaded,
    PacelineError,
)
from paceline.core.generation import FinishReason, GenerationRequest, Notice, SamplingParams
from paceline.core.ids import BlockId, RequestId
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.executor import StepOutput
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.sequence import SequenceState

GREEDY = SamplingParams(temperature=0)


def request(name: str = "r", n_prompt: int = 6, max_tokens: int | None = 8, *, salt: int = 0, **fields: object) -> GenerationRequest:
    prompt = tuple(1 + (i * i + salt) % 31 for i in range(n_prompt))
    fields = {"sampling": GREEDY, "ignore_eos": True, **fields}
    return GenerationRequest(RequestId(name), prompt, max_tokens, **fields)  # type: ignore[arg-type]


class TestEndings:
    def test_length_is_exact_when_eos_is_banned(self) -> None:
        for salt in range(8):
            (answer,) = EngineBench().run(request(salt=salt, max_tokens=30)).values()
            assert (len(answer.token_ids), answer.finish, answer.chunks) == (30, FinishReason.LENGTH, 30)
            assert 0 not in answer.token_ids

    @pytest.mark.parametrize(("sizes", "most"), [({"n_blocks": 32}, 64), ({"n_blocks": 5}, 21), ({"max_context": 9}, 9)])
    def test_without_a_number_of_tokens_an_answer_takes_what_the_context_leaves(self, sizes: dict[str, int], most: int) -> None:
        bench = EngineBench(**sizes)  # type: ignore[arg-type]
        assert bench.engine.stats().max_context == most
        (answer,) = bench.run(request(max_tokens=None)).values()
        assert (len(answer.token_ids), answer.finish) == (most - 6, FinishReason.LENGTH)

    def test_eos_ends_with_its_token_but_without_text(self) -> None:
        ended = [EngineBench().run(request(salt=salt, max_tokens=50, ignore_eos=False))["r", 0] for salt in range(8)]
        stopped = [answer for answer in ended if answer.finish is FinishReason.STOP]
        assert stopped, "no answer of eight met the end of sequence"
        for answer in stopped:
            assert answer.token_ids.index(0) == len(answer.token_ids) - 1

    def test_a_stop_id_ends_where_it_first_stands(self) -> None:
        free = EngineBench().run(request(max_tokens=12))["r", 0]
        stop = free.token_ids[5]
        answer = EngineBench().run(request(max_tokens=12, stop_ids=frozenset({stop})))["r", 0]
        assert answer.finish is FinishReason.STOP
        assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
        assert free.text.startswith(answer.text)

    def test_a_stop_string_ends_and_is_not_shown(self) -> None:
        free = EngineBench().run(request(max_tokens=12))["r", 0]
        stop = free.text[4:6]
        answer = EngineBench().run(request(max_tokens=12, stop=(stop,)))["r", 0]
        assert (answer.text, answer.finish) == (free.text[: free.text.index(stop)], FinishReason.STOP)

    def test_held_back_text_comes_out_at_the_length(self) -> None:
        free = EngineBench().run(request(max_tokens=12))["r", 0]
        answer = EngineBench().run(request(max_tokens=12, stop=(free.text[-1] + "never",)))["r", 0]
        assert (answer.text, answer.finish) == (free.text, FinishReason.LENGTH)


class TestSeeds:
    def test_a_missing_seed_is_fixed_at_admission_and_differs_by_request(self) -> None:
        bench = EngineBench(n_blocks=10)  # too few for all at once: some are preempted, and draw again what they drew
        answers = bench.run(*(request(str(i), max_tokens=20, sampling=SamplingParams()) for i in range(4)))
        assert bench.engine.stats().preemptions > 0
        for i in range(4):
            seeded = request(str(i), max_tokens=20, sampling=SamplingParams(seed=1000 + i))
            assert answers[RequestId(str(i)), 0].token_ids == answer_alone(seeded).token_ids
        assert len({tuple(answer.token_ids) for answer in answers.values()}) == 4

    def test_sequence_i_draws_with_seed_plus_i(self) -> None:
        answers = EngineBench().run(request(n=3, sampling=SamplingParams(seed=5)))
        for index in range(3):
            assert answers[RequestId("r"), index].token_ids == answer_alone(request(sampling=SamplingParams(seed=5 + index))).token_ids


class TestPenalties:
    def test_see_the_tokens_drawn(self) -> None:
        (free,) = EngineBench().run(request(max_tokens=30)).values()
        assert len(set(free.token_ids)) < 30
        sampling = SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2)
        (answer,) = EngineBench().run(request(max_tokens=30, sampling=sampling)).values()
        assert len(set(answer.token_ids)) == 30

    def test_of_repetition_see_the_prompt(self) -> None:
        sampling = SamplingParams(temperature=0, repetition_penalty=10)
        (answer,) = EngineBench().run(request(n_prompt=5, max_tokens=20, sampling=sampling)).values()
        assert len({*answer.token_ids, *request(n_prompt=5).prompt_ids}) == 20 + len(set(request(n_prompt=5).prompt_ids))


class TestLossesThatPileUp:
    @pytest.mark.parametrize(("depth", "steps"), [(1, 10), (3, 28)])
    def test_the_oldest_gets_ahead_though_others_keep_coming(self, depth: int, steps: int) -> None:
        """KV is lost every so many steps, and computing its prompt takes almost as many; shorter ones come all the time."""
        bench = EngineBench(n_blocks=96, max_running=8, lose=range(steps, 9000, steps), max_losses=1000, depth=depth, prefix_cache=False)
        bench.add(request("long", 56, 6))
        for number in range(300):
            for place in range(3):
                with suppress(Overloaded):
                    bench.add(request(f"{number}.{place}", 24, 2, salt=number))
            bench.step()
            if bench.answers.get((RequestId("long"), 0), Answer()).finish is not None:
                break
        assert bench.answers[RequestId("long"), 0].token_ids == answer_alone(request("long", 56, 6)).token_ids


class TestGoingOn:
    """An answer that began at another engine."""

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"sampling": SamplingParams(seed=3)},
            {"sampling": SamplingParams(seed=3, logprobs=2)},
            {"sampling": SamplingParams(temperature=0, presence_penalty=2, frequency_penalty=2)},
            {"sampling": SamplingParams(seed=9, repetition_penalty=1.5)},
            {"ignore_eos": False, "sampling": SamplingParams(seed=1)},
            {"max_tokens": None},
        ],
    )
    @pytest.mark.parametrize("bench", [{}, {"depth": 3}, {"n_blocks": 16}, {"prefix_cache": False}])
    def test_is_the_same_answer_wherever_it_is_cut(self, fields: dict[str, object], bench: dict[str, int]) -> None:
        asked = request(max_tokens=20, **fields) if "max_tokens" not in fields else request(**fields)  # type: ignore[arg-type]
        whole = EngineBench(**bench).run(asked)["r", 0]  # type: ignore[arg-type]
        for stop in (asked, replace(asked, stop=(whole.text[8:10],))):
            whole = EngineBench(**bench).run(stop)["r", 0]  # type: ignore[arg-type]
            for cut in range(len(whole.token_ids)):
                first = EngineBench(**bench)  # type: ignore[arg-type]
                first.add(stop)
                while len(first.answers.get((RequestId("r"), 0), Answer()).token_ids) < cut:
                    first.step()
                said = first.answers.get((RequestId("r"), 0), Answer())
                rest = EngineBench(**bench).run(replace(stop, so_far={0: tuple(said.token_ids)}))["r", 0]  # type: ignore[arg-type]
                assert said.token_ids + rest.token_ids == whole.token_ids
                assert said.text + rest.text == whole.text
                assert said.logprobs + rest.logprobs == whole.logprobs
                assert rest.finish is whole.finish

    def test_only_sequences_that_have_not_ended_go_on_each_with_its_own_seed(self) -> None:
        asked = request(n=3, sampling=SamplingParams(seed=5), max_tokens=12)
        whole = EngineBench().run(asked)
        so_far = {0: (), 2: tuple(whole[asked.request_id, 2].token_ids[:5])}
        rest = EngineBench().run(replace(asked, so_far=so_far))
        assert {index for _, index in rest} == {0, 2}
        for index, tokens in so_far.items():
            assert [*tokens, *rest[asked.request_id, index].token_ids] == whole[asked.request_id, index].token_ids

    @pytest.mark.parametrize(
        "so_far", [{1: (1,)}, {-1: (1,)}, {0: (32,)}, {0: (-1,)}, {0: (1,) * 8}, {0: (0,)}], ids=lambda so_far: str(so_far)[:20]
    )
    def test_what_is_no_part_of_the_request_is_refused(self, so_far: dict[int, tuple[int, ...]]) -> None:
        bench = EngineBench()
        with pytest.raises(InvalidRequest) as caught:
            bench.add(request(so_far=so_far, ignore_eos=False))
        assert caught.value.field == "so_far"
        bench.check_rest()


class TestRefusals:
    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            (request(n_prompt=0), "prompt"),
            (replace(request(), prompt_ids=(1, 32)), "prompt"),
            (replace(request(), prompt_ids=(-1,)), "prompt"),
            (request(max_tokens=0), "max_tokens"),
            (request(n=0), "n"),
            (request(n=100), "n"),
            (request(max_tokens=59), "max_tokens"),
            (request(sampling=SamplingParams(logit_bias={32: 1.0})), "logit_bias"),
            (request(sampling=SamplingParams(logit_bias={3: math.nan})), "logit_bias"),
            (request(sampling=SamplingParams(temperature=math.nan)), "temperature"),
            (request(sampling=SamplingParams(temperature=-1)), "temperature"),
            (request(sampling=SamplingParams(temperature=2.1)), "temperature"),
            (request(sampling=SamplingParams(top_k=-1)), "top_k"),
            (request(sampling=SamplingParams(top_p=1.1)), "top_p"),
            (request(sampling=SamplingParams(min_p=1.5)), "min_p"),
            (request(sampling=SamplingParams(repetition_penalty=0)), "repetition_penalty"),
            (request(sampling=SamplingParams(presence_penalty=-2.5)), "presence_penalty"),
            (request(sampling=SamplingParams(frequency_penalty=math.inf)), "frequency_penalty"),
            (request(sampling=SamplingParams(logit_bias={3: 101.0})), "logit_bias"),
            (request(sampling=SamplingParams(logprobs=21)), "logprobs"),
        ],
    )
    def test_name_the_field(self, bad: GenerationRequest, field: str) -> None:
        bench = EngineBench()
        with pytest.raises(InvalidRequest) as caught:
            bench.add(bad)
        assert caught.value.field == field
        assert caught.value.hint
        assert not bench.engine.has_work

    def test_what_can_never_fit_the_pool(self) -> None:
        bench = EngineBench(n_blocks=4)
        with pytest.raises(ContextOverflow, match="the KV memory holds, 17"):
            bench.add(request(max_tokens=12))
        with pytest.raises(ContextOverflow, match="17 tokens of prompt exceed") as caught:
            bench.add(request(n_prompt=17, max_tokens=None))
        assert caught.value.field == "prompt"
        (answer,) = bench.run(request(max_tokens=11)).values()
        assert len(answer.token_ids) == 11, "the last token needs no room: it is never run"

    def test_a_full_queue(self) -> None:
        bench = EngineBench(max_running=2, max_waiting=3)
        bench.add(request("a", n=4), request("b"))
        with pytest.raises(Overloaded) as caught:
            bench.add(request("c"))
        assert caught.value.retry_after_s >= 1
        bench.run()
        bench.run(request("c"))

    def test_an_id_in_use(self) -> None:
        bench = EngineBench()
        bench.add(request())
        with pytest.raises(InvalidRequest, match="in use"):
            bench.add(request())
        bench.run()

    @pytest.mark.parametrize(
        "bounds", [{"max_running": 0}, {"prefill_chunk": 0}, {"max_context": 1}, {"max_waiting": -1}, {"step_timeout_s": 0}]
    )
    def test_bounds_under_which_nothing_could_run(self, bounds: dict[str, int]) -> None:
        with pytest.raises(ConfigError, match=next(iter(bounds))):
            EngineConfig(**{"max_context": 64, **bounds})  # type: ignore[arg-type]


class TestAborts:
    @pytest.mark.parametrize("depth", [1, 2, 4])
    @pytest.mark.parametrize("steps", range(6))
    def test_free_all_blocks_at_any_moment(self, depth: int, steps: int) -> None:
        bench = EngineBench(depth=depth)
        bench.add(request("a", n_prompt=20, max_tokens=20, n=2), request("b", max_tokens=20))
        for _ in range(steps):
            bench.step()
        bench.engine.abort(RequestId("a"))
        bench.engine.check_invariants()
        answers = bench.run()
        assert [answers[RequestId("a"), i].finish for i in range(2)] == [FinishReason.ABORT] * 2
        assert answers[RequestId("b"), 0].token_ids == answer_alone(request("b", max_tokens=20)).token_ids

    def test_at_depth_one_blocks_are_free_at_once(self) -> None:
        bench = EngineBench()
        bench.add(request(n_prompt=20))
        bench.step()
        assert bench.engine.stats().blocks_in_use > 0
        bench.engine.abort(RequestId("r"))
        assert bench.engine.stats().blocks_in_use == 0

    def test_in_flight_keep_their_blocks_until_the_batch_is_collected(self) -> None:
        """The executor refuses a batch that writes what a batch in flight still names."""
        bench = EngineBench(n_blocks=5, depth=2, prefix_cache=False, prefill_chunk=16)
        after = request("after", 8, 4, salt=2)
        bench.add(request("a", 8, 4), request("b", 8, 4, salt=1), after)
        bench.step()  # a's batch was collected, b's is in flight
        bench.engine.abort(RequestId("b"))
        assert bench.engine.stats().blocks_in_use == 4
        bench.step()
        assert bench.engine.stats().running == 1, "the blocks went to another while a batch in flight names them"
        answers = bench.run()
        assert answers[RequestId("after"), 0].token_ids == answer_alone(after).token_ids

    def test_of_what_is_about_to_be_preempted(self) -> None:
        bench = EngineBench(n_blocks=11, depth=4, prefix_cache=False, prefill_chunk=32)
        bench.add(*(request(str(i), 5 + i, 24, salt=i) for i in range(4)))
        doomed: list[SequenceState] = []
        while bench.engine.has_work and not doomed:
            bench.step()
            doomed = [seq for seq in bench.engine._scheduler.running if seq.preempt_when_collected]
        assert doomed, "the case did not come up"
        bench.engine.abort(doomed[0].request.request_id)
        bench.engine.check_invariants()
        answers = bench.run()
        assert answers[doomed[0].request.request_id, 0].finish is FinishReason.ABORT
        assert [answer.finish for answer in answers.values()].count(FinishReason.LENGTH) == 3

    def test_of_what_ended_or_never_was_do_nothing(self) -> None:
        bench = EngineBench()
        bench.run(request())
        bench.engine.abort(RequestId("r"))
        bench.engine.abort(RequestId("nobody"))
        assert not bench.engine.has_work
        assert bench.engine.stats().finished == {"length": 1}


class Elsewhere:
    """Another machine that computes the KV of a prompt: it is there, or comes, after so many seconds."""

    def __init__(self, after_s: float) -> None:
        self.clock, self.after_s, self.waits = FakeClock(), after_s, 0
        self.bench = EngineBench(clock=self.clock, wait=self.wait)
        self.bench.run(request("computes it", n_prompt=14, max_tokens=2))  # what is to come lies here, unseen
        self.began_s = self.clock.monotonic()
        prefixes = self.bench.engine._scheduler.prefixes  # pyright: ignore[reportPrivateUsage]
        self._find = prefixes.find
        prefixes.find = self.find  # type: ignore[method-assign]

    def wait(self, seconds: float) -> None:
        self.waits += 1
        self.clock.advance(max(seconds, 0.5))

    def find(self, seq: SequenceState, cache: PrefixCache) -> Sequence[BlockId] | None:
        """None: another computes them."""
        awaited = seq.request.request_id == "waits" and self.clock.monotonic() < self.began_s + self.after_s
        return None if awaited else self._find(seq, cache)


class Trickle:
    """Implements `KvSource`, and its `KvFetch`: a block comes every 50 s, until it stops."""

    counts: Mapping[str, int] = {}
    kept_bytes = 0
    given = None

    def __init__(self) -> None:
        self.blocks: Sequence[BlockId] = ()
        self.let_go: list[BlockId] = []
        self.filled, self.is_over, self.stops, self._next_s = 0, False, False, 0.0

    def run_of(self, keys: Sequence[bytes], request: GenerationRequest | None = None, n_writing: int = 0) -> int:
        return len(keys)

    def fetch(self, keys: Sequence[bytes], blocks: Sequence[BlockId]) -> Trickle:
        self.blocks, self.filled, self.is_over = blocks, 0, False
        return self

    def wait(self, clock: FakeClock) -> None:
        clock.advance(0.5)
        if clock.monotonic() >= self._next_s and not self.stops:
            self.filled, self._next_s = self.filled + 1, clock.monotonic() + 50
            self.is_over = self.filled == len(self.blocks)

    def cancel(self) -> None:
        self.is_over = True

    def keep(self, key: bytes, block: BlockId, parent: bytes | None = None) -> bool:
        self.let_go.append(block)
        return True

    def lacks(self, key: bytes) -> bool:
        return False

    def kept(self) -> Sequence[BlockId]:
        let_go, self.let_go = self.let_go, []
        return let_go

    def reset(self) -> None:
        """Nothing is under way."""


class TestWaiting:
    def test_kv_that_is_computed_elsewhere_is_waited_for(self) -> None:
        elsewhere = Elsewhere(after_s=12)
        waits = request("waits", n_prompt=14, max_tokens=8)
        answers = elsewhere.bench.run(waits)
        assert elsewhere.clock.monotonic() - elsewhere.began_s >= 12
        assert answers["waits", 0].token_ids == EngineBench().run(waits)["waits", 0].token_ids
        assert answers["waits", 0].cached_tokens == 12

    def test_whoever_needs_nothing_of_it_does_not_wait(self) -> None:
        elsewhere = Elsewhere(after_s=12)
        other = request("other", n_prompt=9, max_tokens=5, salt=3)
        elsewhere.bench.add(request("waits", n_prompt=14), other)
        while elsewhere.bench.answers.get((RequestId("other"), 0), Answer()).finish is None:
            elsewhere.bench.step()
        assert elsewhere.waits == 0
        assert elsewhere.bench.answers[RequestId("other"), 0].token_ids == EngineBench().run(other)["other", 0].token_ids

    def test_a_request_that_waits_may_be_aborted(self) -> None:
        elsewhere = Elsewhere(after_s=12)
        elsewhere.bench.add(request("waits", n_prompt=14), request("waits too", n_prompt=9, salt=3))
        elsewhere.bench.engine.abort(RequestId("waits too"))
        assert [chunk.finish_reason for chunk in elsewhere.bench.step()] == [FinishReason.ABORT]
        assert elsewhere.waits == 0, "an ending is told at once"
        assert elsewhere.bench.step() == []
        elsewhere.bench.engine.abort(RequestId("waits"))
        elsewhere.bench.step()
        assert not elsewhere.bench.engine.has_work

    def test_it_is_not_waited_for_without_end(self) -> None:
        elsewhere = Elsewhere(after_s=1e9)
        elsewhere.bench.add(request("waits", n_prompt=14))
        for _ in range(120):  # of half a second
            assert elsewhere.bench.step() == []
        with pytest.raises(RuntimeError, match="1 sequences are live and none could run for 60 s"):
            elsewhere.bench.step()

    def test_blocks_that_come_are_waited_for_however_long_all_of_them_take(self) -> None:
        clock, source = FakeClock(), Trickle()
        bench = EngineBench(clock=clock, wait=lambda _: source.wait(clock), kv=lambda _: source)
        waits = request("waits", n_prompt=21)
        bench.add(waits)
        advanced = bench.engine.advanced
        while not source.is_over:
            bench.step()
        assert clock.monotonic() > 200
        assert bench.engine.advanced >= advanced + len(source.blocks) - 1, "a wait in which blocks come is no stall"
        source.filled, source.is_over = 0, True  # they hold nothing
        assert bench.run()["waits", 0].token_ids == EngineBench().run(waits)["waits", 0].token_ids
        bench.add(request("waits longer", n_prompt=21, salt=3))
        source.stops = True
        with pytest.raises(RuntimeError, match="1 sequences are live and none could run for 60 s"):
            bench.run()

    def test_an_executor_that_is_not_ready_yet_is_waited_for(self) -> None:
        clock, answers = FakeClock(), [False] * 7
        bench = EngineBench(clock=clock)

        def ready() -> bool:
            clock.advance(20)  # it bounds its silence itself
            return not answers or answers.pop()

        bench.executor.ready = ready  # type: ignore[method-assign]
        assert bench.run(request())["r", 0].token_ids == EngineBench().run(request())["r", 0].token_ids
        assert not answers


class Search:
    """Makes an executor that was lost answer `ready` with these, one a time, and come back with other sizes."""

    def __init__(self, bench: EngineBench, answers: list[bool | Exception], n_blocks: int | None = None) -> None:
        self.answers, self._executor, self._n_blocks = answers, bench.executor, n_blocks
        self._collect = bench.executor.collect
        self._lost = False
        bench.executor.collect = self.collect  # type: ignore[method-assign]
        bench.executor.ready = self.ready  # type: ignore[method-assign]

    def collect(self, deadline: float) -> StepOutput | None:
        try:
            return self._collect(deadline)
        except ExecutorLost:
            self._lost = True
            raise

    def ready(self) -> bool:
        if not self._lost or not self.answers:
            return True
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer and self._n_blocks is not None:
            self._executor.n_blocks = self._n_blocks
        return answer


class TestFailures:
    @pytest.mark.parametrize("depth", [1, 2, 4])
    def test_a_lost_executor_costs_time_and_no_byte(self, depth: int) -> None:
        bench = EngineBench(depth=depth, lose={3, 4, 9})
        requests = [request(str(i), n_prompt=5 + 3 * i, max_tokens=10, sampling=SamplingParams(seed=i)) for i in range(4)]
        answers = bench.run(*requests)
        for one in requests:
            assert answers[one.request_id, 0].token_ids == answer_alone(one).token_ids

    def test_an_executor_that_is_lost_again_and_again_ends_what_is_live_and_serves_what_comes_later(self) -> None:
        bench = EngineBench(lose=range(2, 6), max_losses=3)
        answers = bench.run(request("a"), request("b"))
        assert {answer.finish for answer in answers.values()} == {FinishReason.ERROR}
        assert {answer.code for answer in answers.values()} == {"pipeline_aborted"}
        assert {notice.kind for answer in answers.values() for notice in answer.notices} == {"pipeline_aborted"}
        bench.check_rest()
        later = request("c")
        assert bench.run(later)[RequestId("c"), 0].token_ids == answer_alone(later).token_ids

    @pytest.mark.parametrize("depth", [1, 3])
    def test_while_machines_are_looked_for_nothing_runs_and_nothing_is_lost(self, depth: int) -> None:
        bench = EngineBench(depth=depth, lose={3})
        search = Search(bench, answers=[False, False, True])
        one = request("a", n_prompt=9, max_tokens=10)
        assert bench.run(one)[RequestId("a"), 0].token_ids == answer_alone(one).token_ids
        assert not search.answers

    def test_when_none_are_found_what_is_live_ends_and_later_requests_are_served(self) -> None:
        bench = EngineBench(lose={3})
        Search(bench, answers=[False, ExecutorUnavailable("no machine has layer 7", code="shard_unavailable")])
        answers = bench.run(request("a"), request("b"))
        assert {(answer.finish, answer.code, answer.error) for answer in answers.values()} == {
            (FinishReason.ERROR, "shard_unavailable", "no machine has layer 7")
        }
        bench.check_rest()
        later = request("c")
        assert bench.run(later)[RequestId("c"), 0].token_ids == answer_alone(later).token_ids

    def test_what_does_not_fit_the_machines_that_are_left_ends(self) -> None:
        bench = EngineBench(lose={3}, n_blocks=64)
        Search(bench, answers=[True], n_blocks=8)
        small = request("small", n_prompt=9, max_tokens=10)
        answers = bench.run(small, request("large", n_prompt=40, max_tokens=10))
        assert answers[RequestId("small"), 0].token_ids == answer_alone(small).token_ids
        assert "too little memory" in (answers[RequestId("large"), 0].error or "")
        assert answers[RequestId("large"), 0].code == "shard_unavailable"
        assert bench.engine.stats().blocks_total == 8

    def test_notices_reach_every_live_request(self) -> None:
        bench = EngineBench()
        pending = [Notice("shard_failover", {"shard": "x"})]

        def notices() -> list[Notice]:
            said, pending[:] = list(pending), []
            return said

        bench.executor.notices = notices  # type: ignore[method-assign,assignment]
        bench.add(request("a", n=2), request("b"))
        chunks = [chunk for chunk in bench.engine.step() if chunk.notices]
        assert sorted(chunk.request_id for chunk in chunks) == ["a", "b"]
        assert all(chunk.notices[0].kind == "shard_failover" and not chunk.token_ids for chunk in chunks)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_any_other_failure_ends_requests_with_errors(self, depth: int) -> None:
        bench = EngineBench(depth=depth, break_at=4)
        bench.add(request("a", n=2), request("b"))
        with pytest.raises(ZeroDivisionError):
            bench.run()
        assert bench.engine.has_work, "the endings are still to be said"
        bench.read(bench.engine.step())
        assert not bench.engine.has_work
        bench.check_rest()
        assert len(bench.answers) == 3
        assert all(
            answer.finish is FinishReason.ERROR and "the executor broke" in (answer.error or "") for answer in bench.answers.values()
        )
        with pytest.raises(PacelineError, match="stopped"):
            bench.add(request("c"))

    @pytest.mark.parametrize("depth", [1, 2])
    def test_its_executor_is_fit_for_another_engine(self, depth: int) -> None:
        bench = EngineBench(depth=depth, break_at=4)
        with pytest.raises(ZeroDivisionError):
            bench.run(request("a", n=2), request("b"))
        bench.executor.reset()
        bench.engine = Engine(bench.executor, VOCABULARY, bench.config, bench.clock)
        bench.answers.clear()
        again = request("a", salt=5)
        assert bench.run(again)[again.request_id, 0].token_ids == answer_alone(again).token_ids

    def test_broken_logits_end_their_sequence_only(self) -> None:
        bench = EngineBench()
        sound, logits, calls = request("b", salt=3), bench.runner.logits, 0

        def broken(x_TD: object, rows_R: object) -> object:
            nonlocal calls
            calls += 1
            out = logits(x_TD, rows_R)  # type: ignore[arg-type]
            if calls == 3:
                out[0, 4] = math.nan
            return out

        bench.runner.logits = broken  # type: ignore[method-assign]
        answers = bench.run(request("a"), sound)
        assert answers[RequestId("a"), 0].finish is FinishReason.ERROR
        assert "not finite" in (answers[RequestId("a"), 0].error or "")
        assert answers[RequestId("b"), 0].token_ids == answer_alone(sound).token_ids

    def test_a_draw_that_raises_ends_its_sequence_only(self) -> None:
        """What the kernels give is narrower than the vocabulary: a bias has no place to go to."""
        bench = EngineBench()
        sound, logits = request("b", salt=3), bench.runner.logits
        bench.runner.logits = lambda x_TD, rows_R: logits(x_TD, rows_R)[:, :31]  # type: ignore[method-assign]
        answers = bench.run(request("a", sampling=SamplingParams(temperature=0, logit_bias={31: -100.0})), sound)
        assert answers[RequestId("a"), 0].finish is FinishReason.ERROR
        assert "IndexError" in (answers[RequestId("a"), 0].error or "")
        assert answers[RequestId("b"), 0].finish is FinishReason.LENGTH


class TestStats:
    def test_count_what_happened(self) -> None:
        bench = EngineBench()
        bench.run(request("a", n_prompt=9, max_tokens=5))
        bench.run(request("b", n_prompt=9, max_tokens=5))
        stats = bench.engine.stats()
        assert (stats.prompt_tokens, stats.generated_tokens) == (18, 10)
        assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (18, 8)
        assert stats.finished == {"length": 2}
        assert stats.blocks_cached == 2
        assert stats.steps == 2 + 4 + 1 + 4  # nine rows are two chunks of eight; a hit of eight leaves one

    def test_of_a_fresh_engine_are_zero(self) -> None:
        stats = EngineBench(n_blocks=7).engine.stats()
        assert (stats.blocks_total, stats.running, stats.waiting, stats.blocks_in_use, stats.steps) == (7, 0, 0, 0, 0)
