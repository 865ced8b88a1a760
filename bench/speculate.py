"""What drafts gain and cost, as ratios of rates that were measured in turns, with every byte compared.

    python bench/speculate.py [--rounds 3] [--parts local,garbage,pipeline] [--json speculate.json]

Texts are those of `paceline bench speculate`: *shipped* answers are what the model is made to say, *own* ones what it says, but for those that go
round in circles. One thread for the model. garbage: another member of a fleet, a process of its own, over mTLS on loopback, proposes what nobody
should believe; what the first second costs is not counted. pipeline: two stages, a process, a core and a thread each, as in bench/pipeline.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draft_peers import GARBAGE, DraftPeers
from paceline.bench.drafts import DraftBenchPlan, DraftRow, RowMeter, settings_for
from paceline.bench.exercises import ExerciseKind, ForcedExecutor
from paceline.core.clock import SystemClock
from paceline.core.model import LayerRange
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.drafts import DraftSource
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor
from paceline.machine.build import BuiltEngine, build_engine
from paceline.machine.settings import NodeSettings
from paceline.store.catalog import open_model
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.search import PipelineLimits

MODEL = "smollm2-135m"
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement, and what it should be."""

    what: str
    row: DraftRow
    least: float
    reach: float

    def __str__(self) -> str:
        row = self.row
        looped = f", {row.left_out} loop" if row.left_out else ""
        which = f"{row.kind}, {'shipped' if row.forced else 'own'}, {row.batch} at once"
        return (
            f"{self.what:34} {which:30} {row.ratio:5.2f}x ({row.least_ratio:.2f} to {row.most_ratio:.2f})  at least {self.least:.2f}, "
            f"reach for {self.reach:.2f}  right {row.acceptance:4.0%}, {row.accepted_length:.1f} a draft  "
            f"bytes {'same' if row.same_bytes else 'OTHERS'}  ({row.answers} answers{looped})"
        )


class Bench:
    """Measures, prints, and keeps."""

    def __init__(self, rounds: int, tokenizer: Any) -> None:
        self.plan = DraftBenchPlan(rounds=rounds)
        self.tokenizer = tokenizer
        self.lines: list[Line] = []

    def meter(self, executor: Executor, config: EngineConfig, sources: dict[str, DraftSource]) -> Callable[..., RowMeter]:
        forced = ForcedExecutor(executor)
        engine = Engine(forced, self.tokenizer, config, SystemClock(), drafting=DraftingConfig(sources=sources))
        return lambda **changes: RowMeter(engine, forced, replace(self.plan, **changes), SystemClock())

    def measure(self, what: str, meter: RowMeter, cases: Sequence[tuple[ExerciseKind, int, bool]], least: float, reach: float) -> None:
        for kind, batch, forced in cases:
            line = Line(what, meter.row(self.tokenizer, kind, batch, forced=forced), least, reach)
            self.lines.append(line)
            print(line, flush=True)


def both(*kinds: ExerciseKind, batch: int = 1) -> list[tuple[ExerciseKind, int, bool]]:
    return [(kind, batch, forced) for kind in kinds for forced in (True, False)]


def measure_local(bench: Bench, built: BuiltEngine) -> None:
    meter = bench.meter(built.executor, built.config, {})
    bench.measure("ngram / off", meter(draft="ngram"), both(ExerciseKind.CODE_EDIT, ExerciseKind.AGENT), 1.8, 2.5)
    bench.measure("auto / off", meter(), both(ExerciseKind.SUMMARY), 1.0, 1.5)
    bench.measure("auto / off", meter(), [*both(ExerciseKind.PROSE), *both(ExerciseKind.PROSE, batch=16)], 0.97, 1.0)


def measure_garbage(bench: Bench, built: BuiltEngine, peers: DraftPeers) -> None:
    sources: dict[str, DraftSource] = {kind: peers.source(kind) for kind in GARBAGE}
    meter = bench.meter(built.executor, built.config, sources)
    for kind in GARBAGE:
        bench.measure(f"garbage ({kind}) / off", meter(draft=kind), [(ExerciseKind.PROSE, 1, True)], 0.95, 1.0)


def measure_pipeline(bench: Bench, cut: int, cores: tuple[int, int]) -> None:
    from pipeline import connect, load

    os.sched_setaffinity(0, {cores[0]})
    head, opened = load(LayerRange(0, cut), edges=True)
    route, process = connect(cut, opened.spec.n_layers, cores[1])
    executor = PipelineExecutor(head, opened.spec.n_layers, route, PipelineLimits(stall_s=PATIENCE_S, search_s=1.0), SystemClock())
    config = EngineConfig(max_context=2048, max_running=16, prefix_cache=False)
    try:
        meter = bench.meter(executor, config, {})
        bench.measure("2 stages: ngram / off", meter(draft="ngram"), both(ExerciseKind.AGENT), 1.8, 2.5)
    finally:
        executor.close()
        process.kill()


@contextlib.contextmanager
def engine(threads: int, tokenizer: Any, plan: DraftBenchPlan) -> Iterator[BuiltEngine]:
    built = build_engine(settings_for(NodeSettings(MODEL, threads=threads), tokenizer, plan))
    try:
        yield built
    finally:
        built.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--parts", default="local,garbage,pipeline")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--cut", type=int, default=11)
    arguments.add_argument("--cores", default="0,1")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    logging.disable(logging.WARNING)  # what fails here is meant to
    parts = options.parts.split(",")
    tokenizer = open_model(MODEL).tokenizer
    bench = Bench(options.rounds, tokenizer)
    with contextlib.ExitStack() as stack:
        built = stack.enter_context(engine(options.threads, tokenizer, bench.plan))
        if "local" in parts:
            measure_local(bench, built)
        if "garbage" in parts:
            peers = DraftPeers(tokenizer.size)
            stack.callback(peers.close)
            measure_garbage(bench, built, peers)
    if "pipeline" in parts:
        first, second = (int(core) for core in options.cores.split(","))
        measure_pipeline(bench, options.cut, (first, second))
    short = [line.what for line in bench.lines if not (line.row.ratio >= line.least and line.row.same_bytes)]
    print(f"below the least, or other bytes: {', '.join(short) or 'none'}")
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in bench.lines], indent=1))


if __name__ == "__main__":
    main()
