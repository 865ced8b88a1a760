"""`paceline bench`: how fast this machine runs a model."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.bench_report import counts, note_load, print_report, table_of, telling
from paceline.cli.terminal import counted
from paceline.node.bench import BenchPlan, BenchReport, run_bench
from paceline.node.sampled import Sampled
from paceline.node.settings import NodeSettings


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
