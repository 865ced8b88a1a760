"""Shared parts of `paceline bench` and its subcommands: lists of counts, progress lines, fleets on this machine, and reports.

A report is printed as JSON or for a person.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from paceline.bench.drafts import DraftReport, DraftRow
from paceline.bench.engine import BenchReport, DecodeRow
from paceline.bench.exercises import ExerciseKind
from paceline.bench.fault import FaultReport, FaultRow
from paceline.bench.fleet import BenchNode, LocalFleet, become_first
from paceline.bench.pipeline import PipelineReport, PipelineRow, StageShare
from paceline.cli import EXIT_INTERRUPTED
from paceline.cli.models import lies_elsewhere
from paceline.cli.terminal import Terminal, counted, interrupts_end_now, print_json, print_lines, table_of
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.fleet.presets import FleetSettings, parse_preset
from paceline.machine.config_file import PipelineSettings, read_pipeline_settings
from paceline.machine.settings import NodeSettings
from paceline.store.catalog import resolve
from paceline.store.home import Home

BUSY = 0.5
"""A load average at the start above this many programs is worth a word: they took their share of what was measured."""

Tell = Callable[[str], None]


class Report(Protocol):
    def as_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Report)
Row = TypeVar("Row")


def counts(option: str, value: str) -> tuple[int, ...]:
    """Read an option's list of numbers.

    Raises:
        ConfigError: the value is not such a list.
    """
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise ConfigError(f"{option} {value!r} is not a list of numbers", "Write it like 1,4,16.") from None


@contextmanager
def telling() -> Generator[Tell]:
    """Show what runs: a spinner on a terminal, elsewhere a line for each run, so that a minute of measuring is not a minute of silence."""
    console = Terminal(stderr=True)
    with interrupts_end_now(EXIT_INTERRUPTED), console.status("starting") as status:
        yield status.update if console.is_terminal else lambda run: print_lines(console, run)


def print_report(report: R, show: Callable[[Console, R], None], *, as_json: bool) -> None:
    """Print a report to standard output."""
    if as_json:
        print_json(report.as_json())
    else:
        show(Terminal(), report)


def note_load(console: Console, load_average: float) -> None:
    """Print a note if other programs were running."""
    if load_average > BUSY:
        console.print(f"note: other programs were running (load average {load_average:.1f}): this machine can do better", style="yellow")


def filled(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> Table:
    """Return a table of rows. `columns` has the heading of each column, and a function that returns a row's cell."""
    table = table_of(*columns)
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    return table


def show(console: Console, report: BenchReport) -> None:
    """Print a report for a person."""
    plan = report.plan
    over = f"medians of {plan.rounds} rounds" if plan.rounds > 1 else "one round"
    print_lines(console, f"{report.model}, {report.weights} weights, {counted(report.threads, 'thread')}, {plan.sampling} sampling, {over}")
    note_load(console, report.load_average)
    print_lines(console, f"prefill of {plan.prefill_tokens} tokens: {report.prefill_per_s:.0f} tokens/s")
    columns: dict[str, Callable[[DecodeRow], str]] = {
        "at once": lambda row: str(row.concurrency),
        "each, tokens/s": lambda row: f"{row.sequence_decode_per_s:.0f}",
        "all, tokens/s": lambda row: "-" if math.isnan(row.total_decode_per_s) else f"{row.total_decode_per_s:.0f}",
        "first token p50 / p99, ms": lambda row: f"{row.first_token.p50_ms:.0f} / {row.first_token.p99_ms:.0f}",
        "between tokens p50 / p99, ms": lambda row: f"{row.between_tokens.p50_ms:.1f} / {row.between_tokens.p99_ms:.1f}",
    }
    console.print(filled(report.rows, columns))
    if any(math.isnan(row.total_decode_per_s) for row in report.rows):
        print_lines(console, "-: the first answers ended before the last began; a longer --answer lets all run at once")


def as_configured() -> PipelineSettings:
    """Return the pipeline settings of config.toml with `enabled` forced on."""
    return read_pipeline_settings(Home.from_environment()).overridden(enabled=True)


@contextmanager
def local_fleet(count: int, settings: NodeSettings) -> Generator[tuple[LocalFleet, BenchNode]]:
    """Run a fleet on this machine; this process is its first node."""
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
    print_lines(console, report.summary)
    print_lines(console, f"{counted(report.threads, 'thread')} each, {counted(report.plan.rounds, 'round')}")
    note_load(console, report.load_average)
    columns: dict[str, Callable[[PipelineRow], str]] = {
        "at once": lambda row: str(row.streams),
        "pipeline, tokens/s": lambda row: f"{row.pipeline_per_s:.0f}",
        "alone, tokens/s": lambda row: f"{row.alone_per_s:.0f}",
        "pipeline / alone": lambda row: f"{row.ratio:.2f}x",
        "estimate, tokens/s": lambda row: f"{row.estimate_per_s:.0f}",
        "first token p50, ms": lambda row: f"{row.first_token.p50_ms:.0f}",
        "a batch away, ms": lambda row: f"{row.split.away_ms:.2f}",
        "of it, on the way": lambda row: f"{row.split.transfer_ms:.2f}",
    }
    console.print(filled(report.rows, columns))
    parts: dict[str, Callable[[tuple[PipelineRow, StageShare]], str]] = {
        "at once": lambda part: str(part[0].streams),
        "machine": lambda part: part[1].node_id,
        "layers": lambda part: f"{part[1].first_layer} to {part[1].last_layer}" if part[1].last_layer >= part[1].first_layer else "none",
        "computing, s": lambda part: f"{part[1].computing_s:.2f}",
        "waiting, s": lambda part: f"{part[1].waiting_s:.2f}",
        "of the time, computing": lambda part: f"{part[1].computing_s / part[0].split.wall_s:.0%}",
    }
    console.print(filled([(row, share) for row in report.rows for share in row.split.stages], parts))


def show_fault(console: Console, report: FaultReport) -> None:
    """Print a report for a person."""
    print_lines(console, f"{report.model}, {counted(report.threads, 'thread')} each, killed at token {report.plan.at}")
    note_load(console, report.load_average)
    columns: dict[str, Callable[[FaultRow], str]] = {
        "at once": lambda row: str(row.streams),
        "killed": lambda row: row.killed,
        "gap, s": lambda row: f"{row.gap_s:.2f}",
        "prefill, s": lambda row: f"{row.prefill_s:.2f}",
        "beyond it, s": lambda row: f"{row.beyond_prefill_s:.2f}",
        "replayed tokens": lambda row: str(row.replayed_tokens),
        "bytes of one machine": lambda row: "the same" if row.same_bytes else "OTHERS",
    }
    console.print(filled(report.rows, columns))
    for row in report.rows:
        print_lines(console, f"{row.streams} at once: {row.before} -> {row.after}")


def exercise_kinds(asked: str) -> tuple[ExerciseKind, ...]:
    """Return the kinds that `--kinds` names; all if it is empty.

    Raises:
        ConfigError: a name is not a kind.
    """
    try:
        return tuple(ExerciseKind(part.strip()) for part in asked.split(",")) if asked else tuple(ExerciseKind)
    except ValueError:
        raise ConfigError(f"--kinds {asked!r} names a kind that there is not", f"There are: {', '.join(ExerciseKind)}.") from None


def show_speculate(console: Console, report: DraftReport) -> None:
    """Print a report for a person."""
    run_with = f"{counted(report.threads, 'thread')}, {counted(report.plan.rounds, 'round')}, drafts: {report.plan.draft}"
    print_lines(
        console,
        f"{report.model}, {report.weights} weights, {run_with}",
        "Shipped answers are what the model is made to say; its own are what it says. Rates: tokens a second.",
    )
    note_load(console, report.load_average)
    # Eleven columns, and a terminal of 80.
    columns: dict[str, Callable[[DraftRow], str]] = {
        "text": lambda row: row.kind,
        "answers": lambda row: f"{row.answers} {'shipped' if row.forced else 'own'}{f', {row.left_out} loop' if row.left_out else ''}",
        "at\nonce": lambda row: str(row.batch),
        "off\n/s": lambda row: f"{row.off_per_s:.0f}",
        "on\n/s": lambda row: f"{row.on_per_s:.0f}",
        "on /\noff": lambda row: f"{row.ratio:.2f}x",
        "at\nleast": lambda row: f"{row.least_ratio:.2f}x",
        "right": lambda row: f"{row.acceptance:.0%}",
        "a\ndraft": lambda row: f"{row.accepted_length:.1f}",
        "steps\nsaved": lambda row: f"{1 - row.on.steps / row.off.steps if row.off.steps else 0:.0%}",
        "bytes": lambda row: "same" if row.same_bytes else "OTHERS",
    }
    table = filled(report.rows, columns)
    table.collapse_padding = True
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[:2]:
        column.justify = "left"
    console.print(table)
