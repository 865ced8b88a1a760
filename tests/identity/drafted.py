"""What the tests of drafts and bytes run: models, requests of every kind, configurations, and what each request answers alone."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fakes.engines import UnsteadySource
from tests.fakes.null_backend import ByteVocabulary
from tests.fakes.pipelines import Machine, MemoryRouter
from tests.identity.draft_rounds import HITS, PLAIN, PREEMPTED, PROPOSERS, Configuration

from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.backends.table import choose
from paceline.bench.exercises import ExerciseKind, load
from paceline.core.clock import Clock, SystemClock
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from paceline.core.ids import RequestId, SequenceId
from paceline.core.model import LayerRange, ModelSpec, RopeSpec, WeightsFormat
from paceline.core.stats import EngineStats
from paceline.core.text import Vocabulary
from paceline.core.weights import WeightSource
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.drafts import DraftAnswer, DraftAsk, DraftSession, DraftSource, SessionProposer
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor, Path, StepBatch, StepOutput
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.engine.proposers import DraftModelProposer, JacobiProposer
from paceline.machine.setup import load_runner
from paceline.store.catalog import open_model
from paceline.store.home import Home
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.search import PipelineLimits

TINY = ModelSpec(
    model_type="llama", n_layers=3, hidden=96, n_heads=6, n_kv_heads=2, head_dim=32, ffn=160, vocab=307, max_context=512,
    rms_eps=1e-5, rope=RopeSpec(10_000.0), tied_head=True,
)  # fmt: skip
BLOCKS, CHUNK = 200, 96
CRAMPED = 9
"""Blocks with which a few sequences preempt one another, and the longest still fits."""
LONGEST_PROMPT, ANSWER = 88, 48


@dataclass(slots=True)
class Answer:
    """All that a client sees of one sequence."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: FinishReason | None = None


Answers = dict[tuple[RequestId, int], Answer]


class SessionSource:
    """A `DraftSource` over a proposer, in the engine's own thread: an answer is there as soon as it is looked for."""

    expected_s, block = 0.0, 8

    def __init__(self, proposer: SessionProposer) -> None:
        self._proposer = proposer
        self._sessions: dict[SequenceId, DraftSession] = {}
        self._asks: list[DraftAsk] = []

    def ask(self, ask: DraftAsk) -> None:
        self._asks.append(replace(ask, token_ids=tuple(ask.token_ids)))

    def answers(self, wait_s: float = 0.0) -> Sequence[DraftAnswer]:
        asks, self._asks = self._asks, []
        return [self._draft(ask) for ask in asks]

    def forget(self, sequence: SequenceId) -> None:
        self._asks = [ask for ask in self._asks if ask.sequence != sequence]
        if (session := self._sessions.pop(sequence, None)) is not None:
            session.close()

    def _draft(self, ask: DraftAsk) -> DraftAnswer:
        if ask.sequence not in self._sessions:
            self._sessions[ask.sequence] = self._proposer.open()
        block = self._sessions[ask.sequence].propose(ask.first_position, ask.token_ids, ask.length, 0)
        return DraftAnswer(ask.sequence, ask.first_position + len(ask.token_ids), block.token_ids)


class Subject:
    """A model, whole, in two stages, and as a drafter; and what it answers alone, without drafts.

    Args:
        answer: tokens of an answer, at most.
        clock: of the engines; one that stands still makes every draft look cheap.
    """

    def __init__(
        self, source: WeightSource, vocabulary: Vocabulary, prompts: Sequence[tuple[int, ...]], answer: int, clock: Callable[[], Clock]
    ) -> None:
        self.vocabulary, self._source, self._clock = vocabulary, source, clock
        self.n_layers = source.spec.n_layers
        everything = source.spec.all_layers
        self._whole, self._drafter = self._load(everything), self._load(everything)
        self._head = self._load(LayerRange(0, 0))
        self.stage = self._load(everything, edges=False)
        self.requests, self.alone = self._asked(prompts, answer)
        self.stats: dict[str, list[EngineStats]] = {proposer: [] for proposer in PROPOSERS}

    def run(
        self,
        config: Configuration,
        requests: Sequence[GenerationRequest],
        stages: Sequence[Any] = (),
        dies_at: int | None = None,
    ) -> Answers:
        """The answers of the last round.

        Args:
            stages: runners of machines, the last of which are spare; else all have one that is here.
            dies_at: the batch at which the second machine goes away.
        """
        router: MemoryRouter | None = None
        executor: _Whole | _Spread
        n_blocks = CRAMPED if config.memory == PREEMPTED else BLOCKS
        if config.stages == 1:
            executor = _Whole(self._whole, n_blocks)
        else:
            hidden = self._source.spec.hidden
            runners = stages or [self.stage] * config.stages
            machines = [Machine(f"m{place}", runner, hidden, n_blocks) for place, runner in enumerate(runners)]
            if not stages:
                for machine in machines:
                    machine.lock = machines[0].lock  # of the one runner that all have
            machines[1].dies_at = dies_at
            cuts = [place * self.n_layers // config.stages for place in range(config.stages + 1)]
            router = MemoryRouter(machines, list(itertools.starmap(LayerRange, itertools.pairwise(cuts))))
            executor = _Spread(self._head, self.n_layers, router, PipelineLimits(stall_s=60.0), SystemClock())
        truths: list[tuple[int, ...]] = []
        sources = self._sources(config.proposer, truths)
        answers: Answers = {}
        try:
            drafting = DraftingConfig(config.proposer, sources)
            # A prompt's chunk is cut by the number of stages.
            engine = self._engine(executor, config.batch, drafting, CHUNK * config.stages, prefix_cache=config.memory != PLAIN)
            for _ in range(2 if config.memory == HITS else 1):
                for request in requests:
                    truths += [(*request.prompt_ids, *self.alone[request.request_id, index].token_ids) for index in range(request.n)]
                answers = drain(engine, requests)
            stats = engine.stats()
        finally:
            if router is not None:
                router.close()
        assert stats.blocks_in_use == 0
        assert not isinstance(executor, _Spread) or executor.failovers == (dies_at is not None)
        if config.memory == HITS:
            assert stats.prefix_hits_tokens > 0
        if config.memory == PREEMPTED:
            assert stats.preemptions > 0
        else:
            # Those with a short answer may have ended before the last one began.
            early = sum(len(self.alone[request.request_id, 0].token_ids) < ANSWER // 2 for request in requests)
            least = max(config.batch - early, (config.batch + 1) // 2)
            assert least <= executor.crowd <= config.batch, "more or fewer sequences were generated at once"
        self.stats[config.proposer].append(stats)
        return answers

    def close(self) -> None:
        for runner in (self._whole, self._drafter, self._head, self.stage):
            runner.close()

    def _sources(self, proposer: str, truths: Sequence[Sequence[int]]) -> dict[str, DraftSource]:
        eos = self.vocabulary.eos_ids
        made: dict[str, Callable[[], DraftSource]] = {
            "model": lambda: SessionSource(DraftModelProposer(self._drafter, vocabulary_size=self.vocabulary.size, eos_ids=eos)),
            "jacobi": lambda: SessionSource(JacobiProposer(self._drafter, vocabulary_size=self.vocabulary.size, eos_ids=eos)),
            "knowing": lambda: UnsteadySource(lambda sequence: truths[sequence], random.Random(len(truths)), self.vocabulary.size),
        }
        # Two that draft with one runner would write each other's KV.
        wanted = {"auto": ("model", "knowing")}.get(proposer, (proposer,))
        return {name: make() for name, make in made.items() if name in wanted}

    def _engine(self, executor: Executor, batch: int, drafting: DraftingConfig | None, chunk: int, *, prefix_cache: bool) -> Engine:
        # Bounds that no busy machine reaches: what is cut and crowded is the configuration's.
        config = EngineConfig(
            max_context=512, max_running=batch, prefill_chunk=chunk, prefix_cache=prefix_cache, step_timeout_s=1e9, step_budget_s=1e9
        )
        return Engine(executor, self.vocabulary, config, self._clock(), drafting=drafting)

    def _asked(self, prompts: Sequence[tuple[int, ...]], answer: int) -> tuple[list[GenerationRequest], Answers]:
        requests = [_request(place, prompt, answer, self.vocabulary.size) for place, prompt in enumerate(prompts)]
        alone = self._alone(requests)
        for place, request in enumerate(requests):
            text = alone[request.request_id, 0].text
            if place % 8 == 5 and len(text) > 20:
                # Ends inside its text, and most times inside a draft.
                requests[place] = replace(request, stop=(text[17:20],))
                alone |= self._alone([requests[place]])
        return requests, alone

    def _alone(self, requests: Sequence[GenerationRequest]) -> Answers:
        return drain(self._engine(_Whole(self._whole, BLOCKS), 1, None, CHUNK, prefix_cache=False), requests)

    def _load(self, layers: LayerRange, *, edges: bool = True) -> LayerRunner[Any]:
        options = LoadOptions(layers, WeightsFormat.INT4, BLOCKS, threads=1, edges=edges, kernel_cache=Home.from_environment().kernels)
        return load_runner(choose(self._source.spec, WeightsFormat.INT4), self._source, options)


class _Crowded:
    """An executor that knows for how many sequences it generated at once."""

    crowd = 0

    def __init__(self, *args: Any) -> None:
        self._generating: deque[set[SequenceId]] = deque()
        super().__init__(*args)

    def submit(self, batch: StepBatch) -> None:
        super().submit(batch)
        self._generating.append({step.sequence for step in batch.steps if step.path is Path.GENERATED})
        self.crowd = max(self.crowd, len(set().union(*self._generating)))

    def collect(self, deadline: float) -> StepOutput | None:
        output = super().collect(deadline)
        self._generating.popleft()
        return output


class _Whole(_Crowded, LocalExecutor[Any]):
    def __init__(self, runner: LayerRunner[Any], n_blocks: int) -> None:
        super().__init__(runner)
        self.n_blocks = n_blocks

    def close(self) -> None:
        """The runner outlives the engines of a test."""


class _Spread(_Crowded, PipelineExecutor):
    """Over stages in threads."""


def drain(engine: Engine, requests: Sequence[GenerationRequest]) -> Answers:
    """What each sequence answers, all added at once."""
    answers: Answers = {(request.request_id, index): Answer() for request in requests for index in range(request.n)}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for chunk in engine.step():
            answer = answers[chunk.request_id, chunk.index]
            assert answer.finish is None, "a chunk followed the end"
            answer.token_ids += chunk.token_ids
            answer.text += chunk.text
            answer.logprobs += chunk.logprobs
            answer.finish = chunk.finish_reason
    engine.check_invariants()
    return answers


def _request(place: int, prompt: tuple[int, ...], answer: int, vocabulary: int) -> GenerationRequest:
    """Greedy and drawn by turns, and with everything else that a request may ask for."""
    odd = place % 8
    sampling = SamplingParams(
        temperature=0.0 if place % 2 == 0 else 0.7,
        top_p=0.9 if odd == 3 else 1.0,
        top_k=40 if odd == 5 else 0,
        repetition_penalty=1.2 if odd in {4, 7} else 1.0,
        presence_penalty=0.4 if odd == 7 else 0.0,
        frequency_penalty=0.3 if odd == 7 else 0.0,
        seed=100 + place,
        logit_bias={place % vocabulary: 3.0} if odd == 3 else {},
        logprobs=2 if odd in {1, 2} else None,
    )
    return GenerationRequest(RequestId(f"r{place}"), prompt, answer - place % 3, sampling, n=2 if odd == 6 else 1, ignore_eos=odd == 0)


def tiny(clock: Callable[[], Clock], count: int = 16) -> Subject:
    """A random model of three layers."""
    rng = random.Random(5)
    shared = tuple(rng.choices(range(1, TINY.vocab), k=40))
    prompts: list[tuple[int, ...]] = []
    for place in range(count):
        piece = tuple(rng.choices(range(1, TINY.vocab), k=rng.randint(3, 12)))
        # Text that was there before, so that there is something to look up.
        own = (piece * 4)[: rng.randint(2, 40)]
        prompts.append((*shared, *own) if place % 2 else (*own, 1 + place))
    return Subject(SeededWeights(TINY), ByteVocabulary(TINY.vocab), prompts, ANSWER, clock)


def bundled(clock: Callable[[], Clock], count: int, answer: int = ANSWER) -> Subject:
    """The model that ships, on pieces of the texts that ship."""
    opened = open_model("smollm2-135m")
    exercises = [exercise for several in zip(*(load(kind) for kind in ExerciseKind), strict=True) for exercise in several]
    prompts = list(itertools.islice(_pieces([exercise.prompt_ids(opened.tokenizer) for exercise in exercises]), count))
    return Subject(opened.weights, opened.tokenizer, prompts, answer, clock)


def _pieces(texts: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Ends of texts, and beginnings that are shared."""
    rng = random.Random(6)
    while True:
        for text in texts:
            yield text[-rng.randint(20, LONGEST_PROMPT) :]
            yield text[: rng.randint(40, LONGEST_PROMPT)]
