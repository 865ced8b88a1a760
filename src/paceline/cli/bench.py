"""`paceline bench`: how fast this machine runs a model."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from paceline.cli.faults import EXIT_INTERRUPTED
from paceline.cli.interrupts import interrupts_end_now
from paceline.cli.terminal import Terminal, counted
from paceline.core.errors import ConfigError
from paceline.node.bench import BenchPlan, BenchReport, run_bench
from paceline.node.settings import NodeSettings

BUSY = 0.5
"""A load average at the start above this many programs is worth a word: they took their share of what was measured."""


def run_benchmark(settings: NodeSettings, *, prompt_tokens: int, answer_tokens: int, concurrency: str, rounds: int, as_json: bool) -> None:
    """Measure, then print a table or JSON.

    Raises:
        ConfigError: the plan makes no sense, or does not fit the model.
        UserError: the model can't be loaded.
    """
    try:
        counts = tuple(int(part) for part in concurrency.split(","))
    except ValueError:
        raise ConfigError(f"--concurrency {concurrency!r} is not a list of numbers", "Write it like 1,4,16.") from None
    plan = BenchPlan(prompt_tokens, answer_tokens, counts, rounds=rounds)
    console = Terminal(stderr=True)
    with interrupts_end_now(EXIT_INTERRUPTED), console.status("starting") as status:
        # A spinner on a terminal; elsewhere a line for each run, so that a minute of measuring is not a minute of silence.
        tell = status.update if console.is_terminal else lambda run: console.print(run, markup=False)
        report = run_bench(settings, plan, tell)
    if as_json:
        json.dump(report.as_json(), sys.stdout, indent=2)
        print()
    else:
        show(Terminal(), report)


def show(console: Console, report: BenchReport) -> None:
    """Print a report for a person."""
    plan = report.plan
    over = f"medians of {plan.rounds} rounds" if plan.rounds > 1 else "one round"
    console.print(f"{report.model}, {report.weights} weights, {counted(report.threads, 'thread')}, {over}", markup=False)
    if report.load_average > BUSY:
        console.print(
            f"note: other programs were running (load average {report.load_average:.1f}): this machine can do better", style="yellow"
        )
    console.print(f"prefill of {plan.prefill_tokens} tokens: {report.prefill_per_s:.0f} tokens/s", markup=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("at once", "each, tokens/s", "all, tokens/s", "first token p50 / p99, ms", "between tokens p50 / p99, ms"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(
            str(row.concurrency),
            f"{row.sequence_decode_per_s:.0f}",
            f"{row.total_decode_per_s:.0f}",
            f"{row.first_token.p50_ms:.0f} / {row.first_token.p99_ms:.0f}",
            f"{row.between_tokens.p50_ms:.1f} / {row.between_tokens.p99_ms:.1f}",
        )
    console.print(table)
