"""`paceline bench`: how fast this machine runs a model; and what benches have in common: lists of counts, word of what runs, a report as JSON or as a table.

`paceline bench speculate`, `pipeline` and `fault`, for a person and as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from rich.console import Console

from paceline.bench.draft.exercises import ExerciseKind
from paceline.bench.draft.run import DraftBenchPlan, DraftReport, run_draft_bench
from paceline.bench.engine import BenchPlan, BenchReport, run_bench
from paceline.bench.fault import FaultPlan, FaultReport, run_fault_bench
from paceline.bench.local_fleet import LocalFleet, become_first
from paceline.bench.node import BenchNode
from paceline.bench.pipeline import PipelineBenchPlan, PipelineReport, run_pipeline_bench
from paceline.cli.models import lies_elsewhere
from paceline.cli.sharing import fleet_settings
from paceline.cli.terminal import EXIT_INTERRUPTED, Terminal, counted, interrupts_end_now, table_of
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.core.ids import NodeId
from paceline.fleet.plan import Objective, Pin
from paceline.machine.config_file import PipelineSettings, read_pipeline_settings
from paceline.machine.settings import NodeSettings
from paceline.machine.timing import Sampled
from paceline.net.member.settings import FleetSettings, parse_preset
from paceline.node.planning import parse_pin
from paceline.store.catalog import resolve
from paceline.store.home import Home
from paceline.ways.pipeline.routes.build import PipelineOrder

BUSY = 0.5
"""A load average at the start above this many programs is worth a word: they took their share of what was measured."""

Tell = Callable[[str], None]


class Report(Protocol):
    """What a bench gives."""

    def as_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Report)


def counts(option: str, value: str) -> tuple[int, ...]:
    """An option's list of numbers.

    Raises:
        ConfigError: it is none.
    """
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise ConfigError(f"{option} {value!r} is not a list of numbers", "Write it like 1,4,16.") from None


@contextmanager
def telling() -> Generator[Tell]:
    """What runs: a spinner on a terminal, elsewhere a line for each run, so that a minute of measuring is not a minute of silence."""
    console = Terminal(stderr=True)
    with interrupts_end_now(EXIT_INTERRUPTED), console.status("starting") as status:
        yield status.update if console.is_terminal else lambda run: console.print(run, markup=False)


def print_report(report: R, show: Callable[[Console, R], None], *, as_json: bool) -> None:
    """To standard output."""
    if as_json:
        json.dump(report.as_json(), sys.stdout, indent=2)
        print()
    else:
        show(Terminal(), report)


def note_load(console: Console, load_average: float) -> None:
    """A word where other programs ran."""
    if load_average > BUSY:
        console.print(f"note: other programs were running (load average {load_average:.1f}): this machine can do better", style="yellow")


def run_benchmark(
    settings: NodeSettings, *, prompt_tokens: int, answer_tokens: int, concurrency: str, rounds: int, sampling: Sampled, as_json: bool
) -> None:
    """Measure, then print a table or JSON.

    Raises:
        ConfigError: the plan makes no sense, or does not fit the model.
        UserError: the model can't be loaded.
    """
    plan = BenchPlan(prompt_tokens, answer_tokens, counts("--concurrency", concurrency), rounds=rounds, sampling=sampling)
    with telling() as tell:
        report = run_bench(settings, plan, tell)
    print_report(report, show, as_json=as_json)


def show(console: Console, report: BenchReport) -> None:
    """Print a report for a person."""
    plan = report.plan
    over = f"medians of {plan.rounds} rounds" if plan.rounds > 1 else "one round"
    console.print(
        f"{report.model}, {report.weights} weights, {counted(report.threads, 'thread')}, {plan.sampling} sampling, {over}", markup=False
    )
    note_load(console, report.load_average)
    console.print(f"prefill of {plan.prefill_tokens} tokens: {report.prefill_per_s:.0f} tokens/s", markup=False)
    table = table_of("at once", "each, tokens/s", "all, tokens/s", "first token p50 / p99, ms", "between tokens p50 / p99, ms")
    for row in report.rows:
        table.add_row(
            str(row.concurrency),
            f"{row.sequence_decode_per_s:.0f}",
            "-" if math.isnan(row.total_decode_per_s) else f"{row.total_decode_per_s:.0f}",
            f"{row.first_token.p50_ms:.0f} / {row.first_token.p99_ms:.0f}",
            f"{row.between_tokens.p50_ms:.1f} / {row.between_tokens.p99_ms:.1f}",
        )
    console.print(table)
    if any(math.isnan(row.total_decode_per_s) for row in report.rows):
        console.print("-: the first answers ended before the last began; a longer --answer lets all run at once", markup=False)


def bench_pipeline(
    settings: NodeSettings,
    *,
    local_nodes: int,
    lengths: tuple[int, int],
    streams: str,
    rounds: int,
    pins: tuple[str, ...],
    own_layers: int | None,
    peers: Sequence[str],
    preset: str,
    as_json: bool,
) -> None:
    """Measure, then print a table or JSON.

    Raises:
        UserError: there is no such pipeline, or the plan makes no sense.
    """
    plan = PipelineBenchPlan(*lengths, counts("--streams", streams), rounds)
    plan.check()
    asked = tuple(map(parse_pin, pins))
    clock = SystemClock()
    with telling() as tell:
        if local_nodes == 1:
            fleet = fleet_settings(0, "", peers, preset, mdns=not peers, needed=True)
            assert fleet is not None, "it is needed"
            with closing(BenchNode(fleet, Home.from_environment(), clock)) as node:
                report = run_pipeline_bench(node, settings, PipelineOrder(_allowed(), asked, own_layers), plan, clock, tell)
        else:
            with _local(local_nodes, settings) as (local, node):
                settings = replace(settings, threads=local.threads)
                order = PipelineOrder(
                    _allowed(), asked or tuple(Pin(NodeId(name)) for name in local.names), own_layers, Objective.THROUGHPUT
                )
                report = run_pipeline_bench(node, settings, order, plan, clock, tell)
    print_report(report, show_pipeline, as_json=as_json)


def bench_fault(
    settings: NodeSettings, *, kill: str, at: int, local_nodes: int, spare: bool, lengths: tuple[int, int], streams: str, as_json: bool
) -> None:
    """Break, then print a table or JSON.

    Raises:
        UserError: there is no such pipeline, or the plan makes no sense.
    """
    plan = FaultPlan(kill, at, *lengths, counts("--streams", streams), spare)
    plan.check(local_nodes)
    with telling() as tell, _local(local_nodes, settings) as (local, node):
        settings = replace(settings, threads=local.threads)
        report = run_fault_bench(node, local, settings, _allowed(), plan, SystemClock(), tell)
    print_report(report, show_fault, as_json=as_json)


def _allowed() -> PipelineSettings:
    """As configured, but for the switch: who asks for a pipeline wants one."""
    return read_pipeline_settings(Home.from_environment()).overridden(enabled=True)


@contextmanager
def _local(count: int, settings: NodeSettings) -> Generator[tuple[LocalFleet, BenchNode]]:
    """A fleet on this machine, whose first node this process is."""
    path = lies_elsewhere(settings.model, Terminal())
    local = LocalFleet(count, settings.threads, model=path)
    try:
        become_first(local)
        at = FleetSettings(local.port, local.host, mdns=False, preset=parse_preset(local.preset))
        home = Home.from_environment()
        beside = () if path is None else (resolve(str(path), home),)
        with closing(BenchNode(at, home, SystemClock(), beside)) as node:
            node.wait_for(local.names[1:])
            yield local, node
    finally:
        local.close()


def show_pipeline(console: Console, report: PipelineReport) -> None:
    """Print a report for a person."""
    console.print(report.summary, markup=False, soft_wrap=True)
    console.print(f"{counted(report.threads, 'thread')} each, {counted(report.plan.rounds, 'round')}", markup=False)
    note_load(console, report.load_average)
    table = table_of(
        "at once",
        "pipeline, tokens/s",
        "alone, tokens/s",
        "pipeline / alone",
        "estimate, tokens/s",
        "first token p50, ms",
        "a batch away, ms",
        "of it, on the way",
    )
    for row in report.rows:
        table.add_row(
            str(row.streams),
            f"{row.pipeline_per_s:.0f}",
            f"{row.alone_per_s:.0f}",
            f"{row.ratio:.2f}x",
            f"{row.estimate_per_s:.0f}",
            f"{row.first_token.p50_ms:.0f}",
            f"{row.split.away_ms:.2f}",
            f"{row.split.transfer_ms:.2f}",
        )
    console.print(table)
    shares = table_of("at once", "machine", "layers", "computing, s", "waiting, s", "of the time, computing")
    for row in report.rows:
        for share in row.split.stages:
            layers = f"{share.first_layer} to {share.last_layer}" if share.last_layer >= share.first_layer else "none"
            shares.add_row(
                str(row.streams),
                share.node_id,
                layers,
                f"{share.computing_s:.2f}",
                f"{share.waiting_s:.2f}",
                f"{share.computing_s / row.split.wall_s:.0%}",
            )
    console.print(shares)


def show_fault(console: Console, report: FaultReport) -> None:
    """Print a report for a person."""
    console.print(f"{report.model}, {counted(report.threads, 'thread')} each, killed at token {report.plan.at}", markup=False)
    note_load(console, report.load_average)
    table = table_of("at once", "killed", "gap, s", "prefill, s", "beyond it, s", "replayed tokens", "bytes of one machine")
    for row in report.rows:
        table.add_row(
            str(row.streams),
            row.killed,
            f"{row.gap_s:.2f}",
            f"{row.prefill_s:.2f}",
            f"{row.beyond_prefill_s:.2f}",
            str(row.replayed_tokens),
            "the same" if row.same_bytes else "OTHERS",
        )
    console.print(table)
    for row in report.rows:
        console.print(f"{row.streams} at once: {row.before} -> {row.after}", markup=False, soft_wrap=True)


def bench_speculate(
    settings: NodeSettings, *, draft: str, kinds: str, batches: str, answer_tokens: int, rounds: int, as_json: bool
) -> None:
    """Measure, then print a table or JSON.

    Raises:
        ConfigError: the plan makes no sense.
        UserError: the model can't be loaded.
    """
    plan = DraftBenchPlan(draft, kinds=_kinds(kinds), batches=counts("--streams", batches), answer_tokens=answer_tokens, rounds=rounds)
    with telling() as tell:
        report = run_draft_bench(settings, plan, SystemClock(), tell)
    print_report(report, show_speculate, as_json=as_json)


def _kinds(asked: str) -> tuple[ExerciseKind, ...]:
    try:
        return tuple(ExerciseKind(part.strip()) for part in asked.split(",")) if asked else tuple(ExerciseKind)
    except ValueError:
        raise ConfigError(f"--kinds {asked!r} names a kind that there is not", f"There are: {', '.join(ExerciseKind)}.") from None


def show_speculate(console: Console, report: DraftReport) -> None:
    """Print a report for a person."""
    console.print(
        f"{report.model}, {report.weights} weights, {counted(report.threads, 'thread')}, {counted(report.plan.rounds, 'round')}, "
        f"drafts: {report.plan.draft}",
        "Shipped answers are what the model is made to say; its own are what it says. Rates: tokens a second.",
        sep="\n",
        markup=False,
    )
    note_load(console, report.load_average)
    # Eleven columns, and a terminal of 80.
    table = table_of(
        "text", "answers", "at\nonce", "off\n/s", "on\n/s", "on /\noff", "at\nleast", "right", "a\ndraft", "steps\nsaved", "bytes"
    )
    table.collapse_padding = True
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[:2]:
        column.justify = "left"
    for row in report.rows:
        left_out = f", {row.left_out} loop" if row.left_out else ""
        table.add_row(
            row.kind,
            f"{row.answers} {'shipped' if row.forced else 'own'}{left_out}",
            str(row.batch),
            f"{row.off_per_s:.0f}",
            f"{row.on_per_s:.0f}",
            f"{row.ratio:.2f}x",
            f"{row.least_ratio:.2f}x",
            f"{row.acceptance:.0%}",
            f"{row.accepted_length:.1f}",
            f"{1 - row.on.steps / row.off.steps if row.off.steps else 0:.0%}",
            "same" if row.same_bytes else "OTHERS",
        )
    console.print(table)
