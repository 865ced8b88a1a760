"""What benches have in common: lists of counts, word of what runs, a report as JSON or as a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from paceline.cli.interrupts import interrupts_end_now
from paceline.cli.terminal import EXIT_INTERRUPTED, Terminal
from paceline.core.errors import ConfigError

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
