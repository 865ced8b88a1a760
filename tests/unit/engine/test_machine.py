"""Random arrivals, aborts, losses, tiny pools, chunks, depths and drafts: nothing leaks, all end once, and each answer is what it is alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from tests.fakes.engines import VOCAB, Answer, EngineBench, UnsteadySource, answer_alone
from tests.sampling import examples

from paceline.core.errors import ContextOverflow, ExecutorLost, Overloaded
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId, SequenceId
from paceline.engine.drafting import DraftingConfig
from paceline.engine.executor import HeldSequence, StepBatch, StepOutput

BASES = tuple(tuple(1 + (base * 7 + i * i) % 31 for i in range(24)) for base in range(3))

samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logprobs=st.sampled_from([None, 0, 2]),
    seed=st.integers(0, 3),
)
requests = st.builds(
    lambda base, shared, own, **fields: GenerationRequest(RequestId(""), (*BASES[base][:shared], *own), **fields),
    st.integers(0, 2),
    st.integers(1, 24),
    st.lists(st.integers(1, 31), max_size=6),
    max_tokens=st.integers(1, 24),
    sampling=samplings,
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stop=st.sampled_from([(), (), ("é",), ("ab", "b")]),
    stop_ids=st.sampled_from([frozenset[int](), frozenset({7})]),
    ignore_eos=st.booleans(),
)


class EngineMachine(RuleBasedStateMachine):
    ids = Bundle("ids")

    @initialize(
        pool_tokens=st.integers(12, 96),
        block_size=st.sampled_from([1, 2, 4]),
        depth=st.sampled_from([1, 2, 4]),
        one_path=st.booleans(),
        max_running=st.integers(1, 6),
        max_waiting=st.integers(3, 12),
        prefill_chunk=st.integers(1, 20),
        prefix_cache=st.sampled_from([True, True, False]),
        lose=st.frozensets(st.integers(0, 60), max_size=3),
        restores=st.sampled_from(["nothing", "all", "some"]),
        drafts=st.sampled_from(["off", "ngram", "auto", "knowing"]),
        chance=st.integers(0, 1 << 30).map(Random),
        slow=st.sampled_from([0.0, 0.0, 0.05]),
    )
    def start(
        self, pool_tokens: int, block_size: int, one_path: bool, drafts: str, chance: Random, slow: float, restores: str, **config: object
    ) -> None:
        n_blocks = pool_tokens // block_size
        self.truths: list[list[int]] = []
        drafting = DraftingConfig(drafts, {"knowing": UnsteadySource(lambda sequence: self.truths[sequence], chance, VOCAB)})
        self.bench = EngineBench(
            n_blocks=n_blocks,
            block_size=block_size,
            one_path=one_path,
            max_losses=100,
            drafting=drafting,
            restores=restores != "nothing",
            **config,  # type: ignore[arg-type]
        )
        submit = self.bench.executor.submit

        def timed(batch: StepBatch) -> None:
            self.bench.clock.advance(slow * chance.random() * sum(len(step.token_ids) for step in batch.steps))
            submit(batch)

        self.bench.executor.submit = timed  # type: ignore[method-assign]
        collect = self.bench.executor.collect

        def recalling(deadline: float) -> StepOutput | None:
            engine = self.bench.engine
            match chance.randrange(6):
                case 0:
                    engine.recall(set(), None, stops=True)
                case 1:
                    engine.recall(set(), chance.randrange(1, 9))
                case _:
                    engine.recall(self.aborted, None)
            output = collect(deadline)
            self.recalled += output is None
            return output

        self.bench.executor.collect = recalling  # type: ignore[method-assign]
        restore = self.bench.executor.restore

        def unsteady(held: Sequence[HeldSequence]) -> Collection[SequenceId] | None:
            match chance.randrange(4):
                case 0:
                    return None
                case 1:
                    raise ExecutorLost("lost again", ())
                case 2:
                    return restore(held[: len(held) // 2])
                case _:
                    return restore(held)

        if restores == "some":
            self.bench.executor.restore = unsteady  # type: ignore[method-assign]
        self.one_path = one_path
        self.known: dict[RequestId, GenerationRequest] = {}
        self.aborted: set[RequestId] = set()
        self.recalled = 0
        self.names = (RequestId(f"r{i}") for i in count())

    @rule(target=ids, request=requests, data=st.data())
    def add_next_turn(self, request: GenerationRequest, data: st.DataObject) -> object:
        """A prompt that goes on from what was answered."""
        if not self.bench.answers:
            return multiple()
        request_id, index = data.draw(st.sampled_from(sorted(self.bench.answers)))
        said = (*self.known[request_id].prompt_ids, *self.bench.answers[request_id, index].token_ids)
        return self.add(replace(request, prompt_ids=(*said, *request.prompt_ids[-3:])))

    @rule(old=consumes(ids), request=requests, target=ids)
    def replace_one(self, old: RequestId, request: GenerationRequest) -> object:
        """What a freed block goes to at once."""
        self.abort_one(old)
        added = self.add(request)
        if self.bench.engine.has_work:
            self.bench.step()
        return added

    @rule(target=ids, request=requests)
    def add_one(self, request: GenerationRequest) -> object:
        return self.add(request)

    @rule(request_id=consumes(ids))
    def abort(self, request_id: RequestId) -> None:
        self.abort_one(request_id)

    def add(self, request: GenerationRequest) -> object:
        request = replace(request, request_id=next(self.names))
        tokens = len(request.prompt_ids) + request.max_tokens
        if tokens > 64 or tokens - 1 > self.bench.runner.n_blocks * self.bench.runner.block_size:
            with pytest.raises(ContextOverflow):
                self.bench.add(request)
            return multiple()
        try:
            self.bench.add(request)
        except Overloaded:
            return multiple()
        self.known[request.request_id] = request
        for index in range(request.n):
            self.truths.append([*request.prompt_ids, *answer_alone(request, index, one_path=self.one_path).token_ids])
        return request.request_id

    def abort_one(self, request_id: RequestId) -> None:
        self.bench.engine.abort(request_id)
        self.aborted.add(request_id)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.bench.engine.has_work:
                self.bench.step()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "bench"):
            self.bench.engine.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        answers = self.bench.run()
        assert answers.keys() == {(request_id, index) for request_id, request in self.known.items() for index in range(request.n)}
        for (request_id, index), answer in answers.items():
            request = self.known[request_id]
            self.compare(request, index, answer)
        finished = self.bench.engine.stats().finished
        assert sum(finished.values()) == sum(request.n for request in self.known.values())

    def compare(self, request: GenerationRequest, index: int, answer: Answer) -> None:
        expected = answer_alone(request, index, one_path=self.one_path)
        if answer.finish is FinishReason.ABORT:
            assert request.request_id in self.aborted
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            assert expected.text.startswith(answer.text)
        else:
            assert (answer.token_ids, answer.text, answer.finish) == (expected.token_ids, expected.text, expected.finish)
            assert answer.logprobs == expected.logprobs


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=examples(60), stateful_step_count=35, deadline=None)
