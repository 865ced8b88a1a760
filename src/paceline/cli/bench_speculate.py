"""`paceline bench speculate`, for a person and as JSON."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.table import Table

from paceline.cli.bench import BUSY
from paceline.cli.faults import EXIT_INTERRUPTED
from paceline.cli.interrupts import interrupts_end_now
from paceline.cli.terminal import Terminal, counted
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.node.draft_bench.exercises import Kind
from paceline.node.draft_bench.run import DraftBenchPlan, DraftReport, run_draft_bench
from paceline.node.settings import NodeSettings


def bench_speculate(
    settings: NodeSettings, *, draft: str, kinds: str, batches: str, answer_tokens: int, rounds: int, as_json: bool
) -> None:
    """Measure, then print a table or JSON.

    Raises:
        ConfigError: the plan makes no sense.
        UserError: the model can't be loaded.
    """
    plan = DraftBenchPlan(draft, _kinds(kinds), _counts(batches), answer_tokens, rounds)
    console = Terminal(stderr=True)
    with interrupts_end_now(EXIT_INTERRUPTED), console.status("starting") as status:
        tell = status.update if console.is_terminal else lambda run: console.print(run, markup=False)
        report = run_draft_bench(settings, plan, SystemClock(), tell)
    if as_json:
        json.dump(report.as_json(), sys.stdout, indent=2)
        print()
    else:
        show(Terminal(), report)


def _kinds(asked: str) -> tuple[Kind, ...]:
    try:
        return tuple(Kind(part.strip()) for part in asked.split(",")) if asked else tuple(Kind)
    except ValueError:
        raise ConfigError(f"--kinds {asked!r} names a kind that there is not", f"There are: {', '.join(Kind)}.") from None


def _counts(batches: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in batches.split(","))
    except ValueError:
        raise ConfigError(f"--streams {batches!r} is not a list of numbers", "Write it like 1,16.") from None


def show(console: Console, report: DraftReport) -> None:
    """Print a report for a person."""
    console.print(
        f"{report.model}, {report.weights} weights, {counted(report.threads, 'thread')}, {counted(report.plan.rounds, 'round')}, "
        f"drafts: {report.plan.draft}",
        markup=False,
    )
    if report.load_average > BUSY:
        console.print(
            f"note: other programs were running (load average {report.load_average:.1f}): this machine can do better", style="yellow"
        )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in (
        *("text", "answers", "at once", "without, tokens/s", "with, tokens/s", "with / without", "least to most"),
        *("right", "right in a draft", "steps saved", "bytes"),
    ):
        table.add_column(heading, justify="left" if heading in {"text", "answers"} else "right")
    for row in report.rows:
        left_out = f" ({row.left_out} loop)" if row.left_out else ""
        table.add_row(
            row.kind,
            f"{row.answers} {'that ship' if row.forced else 'of its own'}{left_out}",
            str(row.batch),
            f"{row.off_per_s:.0f}",
            f"{row.on_per_s:.0f}",
            f"{row.ratio:.2f}x",
            f"{row.least_ratio:.2f} to {row.most_ratio:.2f}",
            f"{row.acceptance:.0%}",
            f"{row.accepted_length:.1f}",
            f"{1 - row.on.steps / row.off.steps if row.off.steps else 0:.0%}",
            "the same" if row.same_bytes else "OTHERS",
        )
    console.print(table)
