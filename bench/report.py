"""A comparison as a table for people. The JSON has it all; the table has what is compared."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(report: dict[str, Any]) -> None:
    """Rates, ratios and targets, one line an engine and scenario, on stderr: stdout carries the JSON."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=True, highlight=False, width=150)
    title = f"{report['model']['name']}, {report['threads']} threads, {report['machine']['processor']}"
    table = Table(title=title, box=None, pad_edge=False, header_style="dim", title_justify="left")
    for heading in ("scenario", "engine", "setting", "tok/s", "rounds", "others", "ours / theirs", "at least", "reach"):
        table.add_column(heading, justify="left" if heading in {"scenario", "engine", "setting"} else "right")
    for row in report["rows"]:
        for which, (name, engine) in enumerate(row["engines"].items()):
            ratio = row["ratios"].get(name)
            others = [share for share in engine["bystanders"] if share is not None]
            table.add_row(
                "" if which else row["scenario"]["name"],
                name,
                engine["setting"],
                f"{engine['median']:.0f}",
                f"{min(engine['rounds']):.0f}..{max(engine['rounds']):.0f}",
                f"{max(others):.0%}" if others else "?",
                f"{ratio['ratio']:.2f}x" if ratio else "",
                f"{ratio['at_least']}x" if ratio and ratio["at_least"] else "",
                f"{ratio['reach_for']}x" if ratio and ratio["reach_for"] else "",
            )
    console.print(table)
    for name, reason in report["failed"].items():
        console.print(f"{name} failed: {reason}", markup=False)
