"""`paceline bench speculate`, for a person and as JSON."""

from __future__ import annotations

from rich.console import Console

from paceline.bench.draft.exercises import ExerciseKind
from paceline.bench.draft.run import DraftBenchPlan, DraftReport, run_draft_bench
from paceline.cli.bench import counts, note_load, print_report, telling
from paceline.cli.terminal import counted, table_of
from paceline.core.clock import SystemClock
from paceline.core.errors import ConfigError
from paceline.machine.settings import NodeSettings


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
    print_report(report, show, as_json=as_json)


def _kinds(asked: str) -> tuple[ExerciseKind, ...]:
    try:
        return tuple(ExerciseKind(part.strip()) for part in asked.split(",")) if asked else tuple(ExerciseKind)
    except ValueError:
        raise ConfigError(f"--kinds {asked!r} names a kind that there is not", f"There are: {', '.join(ExerciseKind)}.") from None


def show(console: Console, report: DraftReport) -> None:
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
