"""`paceline bench fault`: a machine of a pipeline is killed while answers stream, and what that costs is measured.

Law: the machine is a real process and dies by SIGKILL. Answers are compared, token by token, with those of this machine alone; half of them are
drawn by chance, from seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from paceline.bench.fleet import BenchNode, LocalFleet
from paceline.bench.pipeline import PipelineBenchPlan
from paceline.core.clock import Clock
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.generation import PROMPT_PROGRESS, GenerationRequest, SamplingParams
from paceline.core.ids import NodeId, RequestId
from paceline.fleet.plan import Objective, Pin
from paceline.machine.build import build_engine
from paceline.machine.config_file import PipelineSettings
from paceline.machine.settings import NodeSettings
from paceline.machine.speed import PromptMaker, StepsRequests, drive, steps
from paceline.ways.pipeline.order import PipelineOrder
from paceline.ways.pipeline.routes.build import BuiltPipeline


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Settings of a fault benchmark: which node to kill, and when."""

    kill: str
    """A node, or `stage:N`: N counts from 1; stage 0 is this machine."""
    at: int
    """Token of the first answer after which the machine dies."""
    prompt_tokens: int = 128
    answer_tokens: int = 128
    streams: tuple[int, ...] = (1, 16)
    spare: bool = True
    """One node of the fleet runs no layers at first, and has them loaded."""

    @property
    def lengths(self) -> PipelineBenchPlan:
        return PipelineBenchPlan(self.prompt_tokens, self.answer_tokens, self.streams, rounds=1)

    def check(self, nodes: int) -> None:
        """Refuse what can't be done.

        Args:
            nodes: of the fleet, the orchestrator included.

        Raises:
            ConfigError: which, and why.
        """
        self.lengths.check()
        if nodes < 3:
            raise ConfigError("There is no machine to spare: nobody could go on", "Ask for --local-nodes 3.")
        if not 0 < self.at < self.answer_tokens:
            raise ConfigError(
                f"Nothing streams any more at token {self.at} of {self.answer_tokens}", "--at is below --answer, and above 0."
            )


@dataclass(frozen=True, slots=True)
class FaultRow:
    """Cost of one lost machine."""

    streams: int
    killed: str
    gap_s: float
    """The longest silence of any stream from the kill on."""
    prefill_s: float
    """Time that the machines that remained needed to prefill the sequences that were live then."""
    replayed_tokens: int
    same_bytes: bool
    """The answers equal those of this machine alone."""
    before: str
    after: str

    @property
    def beyond_prefill_s(self) -> float:
        return self.gap_s - self.prefill_s


@dataclass(frozen=True, slots=True)
class FaultReport:
    model: str
    threads: int
    plan: FaultPlan
    rows: tuple[FaultRow, ...]
    load_average: float

    def as_json(self) -> dict[str, Any]:
        said = asdict(self)
        for row, plain in zip(self.rows, said["rows"], strict=True):
            plain["beyond_prefill_s"] = row.beyond_prefill_s
        return said


def run_fault_bench(
    node: BenchNode,
    fleet: LocalFleet,
    settings: NodeSettings,
    pipelines: PipelineSettings,
    plan: FaultPlan,
    clock: Clock,
    on_run: Callable[[str], None],
) -> FaultReport:
    """Break a pipeline over a local fleet, once for each number of streams.

    Raises:
        UserError: the pipeline can't be built, or the node to kill does not exist.
        PacelineError: answers ended before their time.
    """
    plan.check(len(fleet.names))
    load_average = os.getloadavg()[0]
    settings = plan.lengths.settings(settings)
    on_run(f"loading {settings.model} here, to know what is right")
    alone = build_engine(settings)
    try:
        prompts = PromptMaker(alone.model.tokenizer)
        asked = {streams: requests(prompts.make(streams, plan.prompt_tokens), plan.answer_tokens) for streams in plan.streams}
        right = {streams: answer(alone.engine, each, clock).tokens for streams, each in asked.items()}
        name, threads = alone.model.name, alone.setup.threads
    finally:
        alone.close()
    own, *others = fleet.names
    taking_part = others[:-1] if plan.spare else others
    order = PipelineOrder(pipelines, tuple(Pin(NodeId(each)) for each in (own, *taking_part)), None, Objective.THROUGHPUT, exact=True)
    rows: list[FaultRow] = []
    gone: set[bytes] = set()
    for streams in plan.streams:
        on_run(f"{streams} at once: opening the pipeline")
        node.wait_for(others, beside=gone)
        instances = {str(card.node_id): card.instance for card in node.cards}
        built = node.build(settings, order)
        try:
            rows.append(_break(node, fleet, built, plan, asked[streams], right[streams], clock, on_run))
        finally:
            built.close()
        gone.add(instances[rows[-1].killed])
        fleet.start(rows[-1].killed)
    return FaultReport(name, threads, plan, tuple(rows), load_average)


def _break(
    node: BenchNode,
    fleet: LocalFleet,
    built: BuiltPipeline,
    plan: FaultPlan,
    asked: Sequence[GenerationRequest],
    right: Mapping[RequestId, Sequence[int]],
    clock: Clock,
    on_run: Callable[[str], None],
) -> FaultRow:
    before, victim = built.executor.stages, _victim(plan.kill, [stage.node_id for stage in built.executor.stages])
    spares = set(fleet.pids) - {stage.node_id for stage in before}
    route = built.router.route
    assert route is not None, "an executor begins with a route"
    for spare in spares:
        for session in route.sessions:
            node.warm(NodeId(spare), session.request)
    on_run(f"{len(asked)} at once: warm-up")
    drive(built.engine, [request.prompt_ids for request in asked], 2, clock)
    on_run(f"{len(asked)} at once: {victim} dies at token {plan.at}")
    seen = answer(built.engine, asked, clock, plan.at, lambda: fleet.kill(victim))
    if not seen.replayed:
        raise PacelineError(f"{victim} died, and no answer needed it any more")
    on_run(f"{len(asked)} at once: the same sequences, to know what a prefill costs")
    times = [max(drive(built.engine, seen.replayed, 1, clock).first_token_s) for _ in range(2)]
    return FaultRow(
        len(asked),
        victim,
        seen.gap_s,
        min(times),
        sum(map(len, seen.replayed)),
        seen.tokens == right,
        ", ".join(map(str, before)),
        ", ".join(map(str, built.executor.stages)),
    )


def _victim(kill: str, stages: Sequence[NodeId]) -> str:
    word, colon, number = kill.partition(":")
    if colon and word == "stage" and number.isascii() and number.isdigit() and 0 < int(number) <= len(stages):
        return stages[int(number) - 1]
    if kill in stages:
        return kill
    raise ConfigError(
        f"--kill {kill!r} names no machine that can be killed",
        f"stage:1 to stage:{len(stages)}, or one of {', '.join(stages)}. Stage 0 is this process.",
    )


def requests(prompts: Sequence[tuple[int, ...]], answer_tokens: int) -> list[GenerationRequest]:
    """Return a request for each prompt: greedy ones, and ones drawn with a seed, in turns."""
    return [
        GenerationRequest(
            RequestId(f"fault-{number}"),
            prompt,
            answer_tokens,
            SamplingParams(temperature=0.0 if number % 2 == 0 else 0.9, top_p=0.95, seed=number),
            ignore_eos=True,
        )
        for number, prompt in enumerate(prompts)
    ]


@dataclass(slots=True)
class Answers:
    """Answers to requests that were sent together."""

    tokens: dict[RequestId, list[int]] = field(default_factory=dict[RequestId, list[int]])
    gap_s: float = 0.0
    """The longest silence of a stream that ended after the machine died."""
    replayed: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """Sequences that lived when the loss was noticed, prompts and what was generated till then."""


def answer(
    engine: StepsRequests, asked: Sequence[GenerationRequest], clock: Clock, at: int = 0, kill: Callable[[], None] = lambda: None
) -> Answers:
    """Answer requests side by side.

    Args:
        asked: all begin together.
        at: token of the first request after which `kill` is called; 0: never.

    Raises:
        PacelineError: an answer ended before its time.
    """
    seen = Answers({request.request_id: [] for request in asked})
    arrivals: dict[RequestId, list[float]] = {request.request_id: [] for request in asked}
    killed_s: float | None = None
    for now_s, chunks in steps(engine, asked, clock):
        if not seen.replayed and any(notice.kind != PROMPT_PROGRESS for chunk in chunks for notice in chunk.notices):
            seen.replayed = [
                (*request.prompt_ids, *seen.tokens[request.request_id])
                for request in asked
                if request.max_tokens is None or len(seen.tokens[request.request_id]) < request.max_tokens
            ]
        for chunk in chunks:
            seen.tokens[chunk.request_id].extend(chunk.token_ids)
            if chunk.token_ids:
                arrivals[chunk.request_id].append(now_s)
        if killed_s is None and 0 < at <= len(seen.tokens[asked[0].request_id]):
            kill()
            killed_s = now_s
    if killed_s is not None:
        gaps = (then - max(last, killed_s) for times in arrivals.values() for last, then in pairwise(times) if then > killed_s)
        seen.gap_s = max(gaps, default=0.0)
    return seen
