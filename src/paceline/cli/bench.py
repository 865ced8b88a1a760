"""`paceline bench`: how fast this machine runs a model; and what benches have in common: lists of counts, word of what runs, a report as JSON or as a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from paceline.bench.engine import BenchPlan, BenchReport, run_bench
from paceline.cli.terminal import EXIT_INTERRUPTED, Terminal, counted, interrupts_end_now
from paceline.core.errors import ConfigError
from paceline.machine.sampled import Sampled
from paceline.machine.settings import NodeSettings

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


def table_of(*headings: str) -> Table:
    """An empty one, for numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


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
            f"{row.total_decode_per_s:.0f}",
            f"{row.first_token.p50_ms:.0f} / {row.first_token.p99_ms:.0f}",
            f"{row.between_tokens.p50_ms:.1f} / {row.between_tokens.p99_ms:.1f}",
        )
    console.print(table)
