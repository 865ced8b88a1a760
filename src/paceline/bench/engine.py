"""`paceline bench`: the speed of a model on this machine, measured at the engine.

Law: prompts have exactly the length asked for, and so have answers, because the end of sequence is banned. The prefix cache is off, prompts differ from
run to run, nothing is drafted (`bench.drafts` measures that), and one run of each kind warms up uncounted. Kinds take turns, round by round, so that
a machine that slows down slows all of them. The report shows the median over the rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.core.model import BLOCK_TOKENS
from paceline.engine.local import blocks_for
from paceline.machine.settings import NodeSettings, Sampled
from paceline.machine.speed import PromptMaker, Spread, Timing, drive
from paceline.node.ways import plain

if TYPE_CHECKING:
    from paceline.machine.build import Spread as LoadsRanks


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Settings of an engine benchmark."""

    prompt_tokens: int = 128
    answer_tokens: int = 128
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Numbers of concurrent sequences; each number is measured separately."""
    prefill_tokens: int = 512
    """Prompt of the run that measures prefill alone, with one token of answer."""
    rounds: int = 3
    sampling: Sampled = Sampled.DEFAULT


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Medians over the rounds at one concurrency. Rates in tokens a second."""

    concurrency: int
    sequence_decode_per_s: float
    total_decode_per_s: float
    aggregate_per_s: float
    first_token: Spread
    between_tokens: Spread


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Results of an engine benchmark, with the model and machine they belong to."""

    model: str
    weights: str
    threads: int
    numerics_id: str
    plan: BenchPlan
    prefill_per_s: float
    rows: tuple[DecodeRow, ...]
    load_average: float
    """Load average of the last minute when the bench began. Above zero, other programs used the processor too."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values; a number that could not be measured is null."""
        return plain(asdict(self))


def run_bench(
    settings: NodeSettings,
    plan: BenchPlan | None = None,
    on_run: Callable[[str], None] | None = None,
    spread: LoadsRanks | None = None,
) -> BenchReport:
    """Load a model and measure it.

    Args:
        settings: the model and how to hold it; the bench decides what else would change what is measured.
        spread: what loads tensor ranks; None: those of this machine are.

    Raises:
        ConfigError: the plan does not fit the model.
        UserError: the model can't be loaded.
    """
    plan = plan or BenchPlan()
    check_plan(plan)
    load_average = os.getloadavg()[0]
    tell = on_run or (lambda _: None)
    from paceline.machine.build import build_engine
    from paceline.ways.tensor.loading import load_group

    tell(f"loading {settings.model}")
    clock = SystemClock()
    longest = max(plan.prompt_tokens + plan.answer_tokens, plan.prefill_tokens + 1)
    built = build_engine(with_room(settings, max(plan.concurrency), longest), spread=spread or load_group)
    try:
        if longest > built.model.max_context:
            raise ConfigError(
                f"{longest} tokens of prompt and answer exceed the context of {built.model.max_context}", "Ask for shorter ones."
            )
        prompts = PromptMaker(built.model.tokenizer)
        decode: dict[int, list[Timing]] = {concurrency: [] for concurrency in plan.concurrency}
        prefill: list[Timing] = []
        for turn in range(plan.rounds + 1):
            name = f"round {turn} of {plan.rounds}" if turn else "warm-up"
            for concurrency, timings in decode.items():
                tell(f"{name}: {concurrency} at once")
                timings.append(drive(built.engine, prompts.make(concurrency, plan.prompt_tokens), plan.answer_tokens, clock, plan.sampling))
            tell(f"{name}: a prompt of {plan.prefill_tokens}")
            prefill.append(drive(built.engine, prompts.make(1, plan.prefill_tokens), 1, clock, plan.sampling))
        return BenchReport(
            model=built.model.name,
            weights=str(built.setup.weights),
            threads=built.setup.threads,
            numerics_id=built.executor.numerics_id,
            plan=plan,
            prefill_per_s=median(timing.prefill_per_s(plan.prefill_tokens) for timing in prefill[1:]),
            rows=tuple(_row(concurrency, timings[1:]) for concurrency, timings in decode.items()),
            load_average=load_average,
        )
    finally:
        built.close()


def check_plan(plan: BenchPlan) -> None:
    """Refuse what can't be measured.

    Raises:
        ConfigError: a length or a count is too small.
    """
    counts = {"prompt": plan.prompt_tokens, "prefill prompt": plan.prefill_tokens, "number of rounds": plan.rounds}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"The {name} can't be {count}", "Ask for 1 or more.")
    if plan.answer_tokens < 2:
        raise ConfigError(f"A decode rate can't be measured with {plan.answer_tokens} tokens", "Ask for an answer of 2 or more.")
    if not plan.concurrency or min(plan.concurrency) < 1:
        raise ConfigError(f"A concurrency of {min(plan.concurrency, default=0)} can't be measured", "Ask for 1 or more.")


def with_room(settings: NodeSettings, sequences: int, longest: int) -> NodeSettings:
    """Return settings for an engine with room for exactly `sequences` sequences of `longest` tokens."""
    tokens = sequences * blocks_for(longest, BLOCK_TOKENS) * BLOCK_TOKENS
    return replace(
        settings, prefix_cache=False, max_running=sequences, kv_tokens=max(tokens, settings.kv_tokens or 0, settings.context or 0)
    )


def _row(concurrency: int, timings: Sequence[Timing]) -> DecodeRow:
    return DecodeRow(
        concurrency=concurrency,
        sequence_decode_per_s=median(timing.sequence_decode_per_s for timing in timings),
        total_decode_per_s=median(timing.total_decode_per_s for timing in timings),
        aggregate_per_s=median(timing.aggregate_per_s for timing in timings),
        first_token=Spread.of([wait for timing in timings for wait in timing.first_token_s]),
        between_tokens=Spread.of([gap for timing in timings for gap in timing.gaps_s]),
    )
