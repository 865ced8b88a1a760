"""`paceline bench speculate`: every exercise with drafts and without, one after the other, round by round, alone and sixteen at once.

Law: both runs use one engine and differ only in the request's `draft`. Each answer must equal, byte for byte, that of a first run without drafts.
The runs alternate in order. *Free* answers are the model's own; those that repeat themselves in a loop are left out and counted. *Forced* answers ship
with the texts (`bench.exercises`). A rate counts only the time from the moment the last sequence has its first token until the end of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from functools import partial
from operator import add
from statistics import median
from typing import Any, cast

from paceline.bench.engine import with_room
from paceline.bench.exercises import ExerciseKind, ForcedExecutor, Script, load
from paceline.core.clock import Clock
from paceline.core.errors import ConfigError
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.text import Tokenizer
from paceline.engine.drafts import DRAFTS, OFF, DraftSource
from paceline.engine.engine import Engine
from paceline.machine.settings import NodeSettings
from paceline.machine.speed import steps
from paceline.ways.draft.names import FLEET

GRAM = 8
"""Tokens of the pieces by which a text that goes round in circles is known."""
LEAST_DISTINCT = 0.5


@dataclass(frozen=True, slots=True)
class DraftTally:
    """Counts and time of measured work. Tallies can be added."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    blocks: int = 0
    """Drafts that were verified. `drafted` counts their tokens, `accepted` those that were right."""
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftTally) -> DraftTally:
        return DraftTally(*map(add, astuple(self), astuple(other)))

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 if no time was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


Answers = list[tuple[int, ...]]


def answer_all(
    engine: Engine, prompts: Sequence[tuple[int, ...]], draft: str, max_tokens: Sequence[int], clock: Clock
) -> tuple[Answers, DraftTally]:
    """Answer greedily, ends of sequence honoured.

    Args:
        engine: idle.
        draft: as `GenerationRequest` has it.
        max_tokens: of each prompt's answer.

    Raises:
        PacelineError: a sequence ended otherwise than by its own end or its length.
    """
    names = [RequestId(f"draft-{place}") for place in range(len(prompts))]
    answers: dict[RequestId, list[int]] = {name: [] for name in names}
    arrivals: dict[RequestId, list[float]] = {name: [] for name in names}
    greedy = SamplingParams(temperature=0.0)
    requests = [
        GenerationRequest(name, prompt, most, greedy, draft=draft) for name, prompt, most in zip(names, prompts, max_tokens, strict=True)
    ]
    before = engine.stats()
    for now_s, chunks in steps(engine, requests, clock, (FinishReason.LENGTH, FinishReason.STOP)):
        for chunk in chunks:
            answers[chunk.request_id] += chunk.token_ids
            arrivals[chunk.request_id] += [now_s] * len(chunk.token_ids)
    after = engine.stats()
    begin = max(times[0] for times in arrivals.values())
    end = max(times[-1] for times in arrivals.values())
    tally = DraftTally(
        sum(at > begin for times in arrivals.values() for at in times),
        end - begin,
        after.steps - before.steps,
        sum(after.draft_blocks.values()) - sum(before.draft_blocks.values()),
        sum(after.drafted_tokens.values()) - sum(before.drafted_tokens.values()),
        sum(after.accepted_tokens.values()) - sum(before.accepted_tokens.values()),
    )
    return [tuple(answers[name]) for name in names], tally


def loops(token_ids: Sequence[int]) -> bool:
    """Return whether an answer repeats itself in a loop. Any drafter guesses such an answer, so it measures nothing."""
    grams = [tuple(token_ids[start : start + GRAM]) for start in range(len(token_ids) - GRAM + 1)]
    return bool(grams) and len({*grams}) < LEAST_DISTINCT * len(grams)


FEW = 6
"""Number of prompts of a kind that are answered one at a time."""


@dataclass(frozen=True, slots=True)
class DraftBenchPlan:
    """Settings of a draft benchmark."""

    draft: str = "auto"
    against: str = OFF
    """Drafting method to compare `draft` with."""
    kinds: tuple[ExerciseKind, ...] = tuple(ExerciseKind)
    batches: tuple[int, ...] = (1, 16)
    answer_tokens: int = 128
    """Maximum length of an answer that is not forced, in tokens."""
    rounds: int = 3

    def check(self) -> None:
        """Refuse what can't be measured.

        Raises:
            ConfigError: a count is too small, or nothing is compared with nothing.
        """
        if min(self.rounds, *self.batches, self.answer_tokens - 1) < 1 or not self.kinds:
            raise ConfigError("Nothing can be measured of that", "Ask for 1 or more of everything, and for answers of 2 tokens or more.")
        if not self.draft.strip() or self.draft == FLEET:
            raise ConfigError(f"--draft {self.draft!r} names nothing that drafts here", "Ask for auto, ngram, or a model on this machine.")
        if self.draft == self.against:
            raise ConfigError(f"Drafts: {self.draft} would be compared with itself", "Ask for --draft auto, ngram, or a draft model.")


@dataclass(frozen=True, slots=True)
class DraftWork:
    """Prompts that are answered side by side, and how long their answers may be."""

    prompts: list[tuple[int, ...]]
    max_tokens: list[int]
    scripts: list[Script]
    """Empty: the model speaks for itself."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One kind of text at one batch size. Rates in tokens a second, medians over the rounds; counts of all rounds together."""

    kind: ExerciseKind
    forced: bool
    batch: int
    answers: int
    left_out: int
    """Number of answers left out because they repeat themselves in a loop."""
    off_per_s: float
    on_per_s: float
    ratio: float
    """Median over the rounds of the rate with drafts divided by the rate of `against`; the next two fields are the extremes."""
    least_ratio: float
    most_ratio: float
    off: DraftTally
    on: DraftTally
    same_bytes: bool

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were right; 0 if none were drafted."""
        return self.on.accepted / self.on.drafted if self.on.drafted else 0.0

    @property
    def accepted_length(self) -> float:
        """Average number of right tokens per draft; 0 without drafts."""
        return self.on.accepted / self.on.blocks if self.on.blocks else 0.0


def prepare(tokenizer: Tokenizer, kind: ExerciseKind, batch: int, plan: DraftBenchPlan, *, forced: bool) -> list[DraftWork]:
    """Return the work of one row, in pieces that run one after the other."""
    exercises = load(kind)
    count = batch if batch > 1 else len(exercises) if forced else FEW
    made: list[tuple[tuple[int, ...], int, Script | None]] = []
    for place in range(count):
        variant, which = divmod(place, len(exercises))
        prompt = exercises[which].prompt_ids(tokenizer, variant)
        answer = exercises[which].answer_ids(tokenizer)
        made.append((prompt, len(answer), Script(len(prompt), answer)) if forced else (prompt, plan.answer_tokens, None))
    pieces = [made] if batch > 1 else [[one] for one in made]
    return [
        DraftWork(
            [prompt for prompt, _, _ in piece], [most for _, most, _ in piece], [script for _, _, script in piece if script is not None]
        )
        for piece in pieces
    ]


def settings_for(asked: NodeSettings, tokenizer: Tokenizer, plan: DraftBenchPlan) -> NodeSettings:
    """Return settings for an engine with room for exactly this plan."""
    works = [work for kind in plan.kinds for forced in (False, True) for work in prepare(tokenizer, kind, 1, plan, forced=forced)]
    # A few more, for the words in which variants differ.
    longest = 16 + max(len(prompt) + tokens for work in works for prompt, tokens in zip(work.prompts, work.max_tokens, strict=True))
    return with_room(asked, max(plan.batches), longest)


def without_loops(works: Sequence[DraftWork], looks: Sequence[Answers]) -> tuple[list[DraftWork], list[Answers], int]:
    """Remove answers that repeat themselves in a loop. Returns the work and the answers that are left, and how many were removed."""
    kept: list[DraftWork] = []
    answers: list[Answers] = []
    left_out = 0
    for work, look in zip(works, looks, strict=True):
        good = [place for place, answer in enumerate(look) if not loops(answer)]
        left_out += len(look) - len(good)
        if good:
            kept.append(DraftWork([work.prompts[place] for place in good], [work.max_tokens[place] for place in good], []))
            answers.append([look[place] for place in good])
    return kept, answers, left_out


class RowMeter:
    """Measures rows on one engine.

    Args:
        executor: produces the model's own tokens, or those of the scripts it holds.
    """

    def __init__(self, engine: Engine, executor: ForcedExecutor, plan: DraftBenchPlan, clock: Clock) -> None:
        self._engine, self._executor, self._plan, self._clock = engine, executor, plan, clock

    def row(self, tokenizer: Tokenizer, kind: ExerciseKind, batch: int, *, forced: bool) -> DraftRow:
        works = prepare(tokenizer, kind, batch, self._plan, forced=forced)
        looks = [self._run(work, OFF)[0] for work in works]
        left_out = 0
        if not forced:
            works, looks, left_out = without_loops(works, looks)
        base, draft = self._plan.against, self._plan.draft
        for work in works:  # so that what steps cost is known
            self._run(work, draft)
        off: list[DraftTally] = []
        on: list[DraftTally] = []
        same = True
        for turn in range(self._plan.rounds if works else 0):
            sums = {base: DraftTally(), draft: DraftTally()}
            for place, (work, look) in enumerate(zip(works, looks, strict=True)):
                order = list(sums)
                for each in order if (turn + place) % 2 else reversed(order):
                    answers, tally = self._run(work, each)
                    sums[each] += tally
                    same = same and answers == look
            off.append(sums[base])
            on.append(sums[draft])
        ratios = sorted(two.per_s / one.per_s for one, two in zip(off, on, strict=True) if one.per_s > 0)
        return DraftRow(
            kind=kind,
            forced=forced,
            batch=batch,
            answers=sum(map(len, looks)),
            left_out=left_out,
            off_per_s=median([tally.per_s for tally in off] or [0.0]),
            on_per_s=median([tally.per_s for tally in on] or [0.0]),
            ratio=median(ratios or [0.0]),
            least_ratio=min(ratios, default=0.0),
            most_ratio=max(ratios, default=0.0),
            off=sum(off, DraftTally()),
            on=sum(on, DraftTally()),
            same_bytes=same,
        )

    def _run(self, work: DraftWork, draft: str) -> tuple[Answers, DraftTally]:
        self._executor.begin(work.scripts)
        return answer_all(self._engine, work.prompts, draft, work.max_tokens, self._clock)


@dataclass(frozen=True, slots=True)
class DraftReport:
    """Results of a draft benchmark, with the model and machine they belong to."""

    model: str
    weights: str
    threads: int
    plan: DraftBenchPlan
    rows: tuple[DraftRow, ...]
    load_average: float

    def as_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "acceptance": row.acceptance, "accepted_length": row.accepted_length} for row in self.rows]
        return {**asdict(self), "rows": rows}


def run_draft_bench(settings: NodeSettings, plan: DraftBenchPlan, clock: Clock, on_run: Callable[[str], None]) -> DraftReport:
    """Load a model and measure it.

    Raises:
        ConfigError: the plan makes no sense.
        UserError: the model can't be loaded.
    """
    plan.check()
    load_average = os.getloadavg()[0]
    from paceline.engine.drafting import DraftingConfig
    from paceline.engine.executor import Executor
    from paceline.machine.build import build_engine
    from paceline.store.catalog import open_model

    on_run(f"loading {settings.model}")
    tokenizer = open_model(settings.model).tokenizer
    with ExitStack() as stack:
        # First: a name that is wrong should not cost a load to find out.
        sources = {} if plan.draft in DRAFTS else {plan.draft: stack.enter_context(_drafts(plan.draft, settings, tokenizer, clock))}
        built = build_engine(settings_for(settings, tokenizer, plan), clock=clock)
        stack.callback(built.close)
        if not built.runner.holds_identity:
            raise ConfigError(
                "Nothing is drafted on this machine: its kernels give other bytes for other batches", "Try another --device or --weights."
            )
        executor = ForcedExecutor(built.executor)
        engine = Engine(
            cast("Executor", executor), tokenizer, built.config, clock, drafting=DraftingConfig(sources=sources), sampler=built.sampler
        )
        meter = RowMeter(engine, executor, plan, clock)
        rows: list[DraftRow] = []
        for batch in plan.batches:
            for kind in plan.kinds:
                for forced in (True, False):
                    on_run(f"{kind}, {batch} at once, {'the answers that ship' if forced else 'its own answers'}")
                    rows.append(meter.row(tokenizer, kind, batch, forced=forced))
        return DraftReport(built.model.name, str(built.setup.weights), built.setup.threads, plan, tuple(rows), load_average)


@contextmanager
def _drafts(name: str, settings: NodeSettings, tokenizer: Tokenizer, clock: Clock) -> Generator[DraftSource]:
    """Run a draft model on this machine, as `paceline up --propose` does: in a thread of its own, asked over an event loop.

    Raises:
        VocabularyMismatch: its tokens are others than those of the model.
        UserError: it can't be loaded.
    """
    from paceline.bench.fleet import LoopThread
    from paceline.machine.speed import vocabulary_id
    from paceline.ways.draft.finding import OwnProposers
    from paceline.ways.draft.pool import ProposerPool
    from paceline.ways.draft.remote import DraftMeter, RemoteDrafts
    from paceline.ways.draft.service import check_vocabulary, close_proposers, load_proposer

    loaded = load_proposer(name, settings.threads, None, clock)
    loop = LoopThread("paceline-drafts")
    pool, source = ProposerPool({name: loaded.proposer}), RemoteDrafts(name, DraftMeter(), clock)
    alone = OwnProposers(pool, {name: loaded.offer})

    async def begin() -> None:
        check_vocabulary(vocabulary_id(tokenizer), [loaded], {name})
        source.attach(partial(alone.find, name), alone.open, tokenizer.size)

    async def end() -> None:
        await source.detach()
        pool.close()
        await close_proposers(pool, [loaded])

    try:
        loop.run(begin())
        yield source
    finally:
        loop.run(end())
        loop.close()
