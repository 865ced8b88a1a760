"""`paceline bench pipeline`: gains and costs of spreading a model over machines, measured at the engine and compared with this machine alone.

Law: as for `bench.engine`; the pipeline and this machine alone run with the same threads and take turns, round by round. Times of computing and
waiting come from the parts that measured them: this machine's executor, and each stage's own reports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from paceline.bench.engine import with_room
from paceline.bench.fleet import BenchNode
from paceline.core.clock import Clock
from paceline.core.errors import ConfigError
from paceline.core.model import LayerRange
from paceline.fleet.plan import Estimate, Objective, Pin, PlanRequest
from paceline.machine.build import build_engine
from paceline.machine.settings import NodeSettings
from paceline.machine.speed import PromptMaker, Spread, StepsRequests, Timing, drive
from paceline.node.ways import plan as make_plan
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.routes.build import BuiltPipeline
from paceline.ways.pipeline.splits import PIPELINE

REPORTED_S = 2.0
"""How long the last reports of a run may take."""


@dataclass(frozen=True, slots=True)
class PipelineBenchPlan:
    """Settings of a pipeline benchmark."""

    prompt_tokens: int = 128
    answer_tokens: int = 128
    streams: tuple[int, ...] = (1, 16)
    rounds: int = 3

    def check(self) -> None:
        """Refuse what can't be measured.

        Raises:
            ConfigError: a length or a count is too small.
        """
        if min(self.prompt_tokens, self.rounds, *self.streams, self.answer_tokens - 1) < 1:
            raise ConfigError("Nothing can be measured of that", "Ask for 1 or more of everything, and for answers of 2 tokens or more.")

    def settings(self, asked: NodeSettings) -> NodeSettings:
        """Return the settings for an engine with room for exactly this plan."""
        return with_room(asked, max(self.streams), self.prompt_tokens + self.answer_tokens)


@dataclass(frozen=True, slots=True)
class StageShare:
    """One machine's part in a run, in seconds of the run."""

    node_id: str
    first_layer: int
    last_layer: int
    """Below `first_layer` where it runs none."""
    computing_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True)
class Split:
    """Where the time of one run went."""

    wall_s: float
    stages: tuple[StageShare, ...]
    """This machine's first: embedding and head are its own."""
    batches: int
    away_ms: float
    """Average time of a batch from its departure from this machine to its return, in ms."""
    transfer_ms: float
    """Share of `away_ms` in which no stage computed, in ms: the transfer and, with several batches, the wait for their turn."""


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """Medians over the rounds with `streams` concurrent streams. Rates are in tokens per second."""

    streams: int
    pipeline_per_s: float
    alone_per_s: float
    ratio: float
    """Median of the pipeline's rate divided by this machine's, round by round."""
    estimate_per_s: float
    """Estimate of the cost model from the cards and links, for exactly this pipeline."""
    estimate_first_token_ms: float
    first_token: Spread
    between_tokens: Spread
    split: Split
    """Split of the round with the median rate of the pipeline."""


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Results of a pipeline benchmark, with the model and machine they belong to."""

    model: str
    summary: str
    threads: int
    plan: PipelineBenchPlan
    rows: tuple[PipelineRow, ...]
    load_average: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_pipeline_bench(
    node: BenchNode,
    settings: NodeSettings,
    order: PipelineOrder,
    plan: PipelineBenchPlan,
    clock: Clock,
    on_run: Callable[[str], None],
) -> PipelineReport:
    """Open a pipeline that begins on this machine, and measure it in comparison with this machine alone.

    Args:
        node: a member of a fleet with the other machines in view, now or soon.
        settings: the model, and this machine's threads.

    Raises:
        UserError: the pipeline can't be built.
    """
    plan.check()
    load_average = os.getloadavg()[0]
    settings = plan.settings(settings)
    on_run("opening the pipeline")
    built = node.build(settings, order)
    try:
        on_run(f"loading {settings.model} here")
        alone = build_engine(settings)
        try:
            on_run("looking at the ways between the machines")
            node.wait_for_links([stage.node_id for stage in built.executor.stages])
            rows = _measure(node, built, alone.engine, PromptMaker(alone.model.tokenizer), plan, clock, on_run)
            return PipelineReport(alone.model.name, built.summary, alone.setup.threads, plan, rows, load_average)
        finally:
            alone.close()
    finally:
        built.close()


def _measure(
    node: BenchNode,
    built: BuiltPipeline,
    alone: StepsRequests,
    prompts: PromptMaker,
    plan: PipelineBenchPlan,
    clock: Clock,
    on_run: Callable[[str], None],
) -> tuple[PipelineRow, ...]:
    rows: list[PipelineRow] = []
    for streams in plan.streams:
        estimate = estimated(node, built, plan, streams)
        here: list[Timing] = []
        spread: list[tuple[Timing, Split]] = []
        for turn in range(plan.rounds + 1):
            on_run(f"{streams} at once, {f'round {turn} of {plan.rounds}' if turn else 'warm-up'}")
            here.append(drive(alone, prompts.make(streams, plan.prompt_tokens), plan.answer_tokens, clock))
            before = Snapshot.of(built)
            timing = drive(built.engine, prompts.make(streams, plan.prompt_tokens), plan.answer_tokens, clock)
            spread.append((timing, Snapshot.of(built).since(before, timing.wall_s, built)))
        rows.append(_row(streams, here[1:], spread[1:], estimate))
    return tuple(rows)


def estimated(node: BenchNode, built: BuiltPipeline, plan: PipelineBenchPlan, streams: int) -> Estimate:
    """Return the planner's estimate of the open pipeline, from the machines' cards.

    Raises:
        PlacementError: the planner would not choose this pipeline.
    """
    stages = built.executor.stages
    own = LayerRange(0, stages[0].layers.start)
    here = (Pin(node.node_id, own),) if own else ()
    request = PlanRequest(
        built.warm.model.digest,
        built.warm.model.weights,
        prompt_tokens=plan.prompt_tokens,
        answer_tokens=plan.answer_tokens,
        ways=frozenset({PIPELINE}),
        pins=(*here, *(Pin(stage.node_id, stage.layers) for stage in stages)),
        objective=Objective.THROUGHPUT,
        streams=streams,
        orchestrator=node.node_id,
        orchestrator_layers=len(own),
    )
    return make_plan(node.cards, request, node.trust).chosen.estimate


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Totals of each machine at a moment with no batch in flight."""

    batches: int
    own_s: float
    away_s: float
    busy_s: tuple[float, ...]

    @classmethod
    def of(cls, built: BuiltPipeline) -> Snapshot:
        """Take a snapshot now. Waits for the stages' last reports."""
        times, route = built.executor.times, built.router.route
        sessions = () if route is None else route.sessions
        until = time.monotonic() + REPORTED_S
        while time.monotonic() < until and any(session.report.sent < times.batches for session in sessions):
            time.sleep(0.01)
        return cls(times.batches, times.own_s, times.away_s, tuple(session.report.busy_s for session in sessions))

    def since(self, before: Snapshot, wall_s: float, built: BuiltPipeline) -> Split:
        own_s, busy = self.own_s - before.own_s, [now - then for now, then in zip(self.busy_s, before.busy_s, strict=True)]
        stages = built.executor.stages
        first = stages[0].layers.start if stages else 0
        shares = [StageShare("this machine", 0, first - 1, own_s, wall_s - own_s)]
        for stage, computing_s in zip(stages, busy, strict=True):
            shares.append(StageShare(stage.node_id, stage.layers.start, stage.layers.stop - 1, computing_s, wall_s - computing_s))
        batches = max(1, self.batches - before.batches)
        away_s = self.away_s - before.away_s
        return Split(wall_s, tuple(shares), batches, 1000 * away_s / batches, 1000 * (away_s - sum(busy)) / batches)


def _row(streams: int, here: Sequence[Timing], spread: Sequence[tuple[Timing, Split]], estimate: Estimate) -> PipelineRow:
    timings = [timing for timing, _ in spread]
    rates = [timing.total_decode_per_s for timing in timings]
    middle = sorted(range(len(rates)), key=rates.__getitem__)[len(rates) // 2]
    return PipelineRow(
        streams=streams,
        pipeline_per_s=median(rates),
        alone_per_s=median(timing.total_decode_per_s for timing in here),
        ratio=median(two.total_decode_per_s / one.total_decode_per_s for one, two in zip(here, timings, strict=True)),
        estimate_per_s=estimate.tokens_per_s,
        estimate_first_token_ms=1000 * estimate.ttft_s,
        first_token=Spread.of([wait for timing in timings for wait in timing.first_token_s]),
        between_tokens=Spread.of([gap for timing in timings for gap in timing.gaps_s]),
        split=spread[middle][1],
    )
