from __future__ import annotations

import math
from io import StringIO

from rich.console import Console

from paceline.bench.engine import BenchPlan, BenchReport, DecodeRow
from paceline.cli.bench import show
from paceline.machine.speed import Spread


def test_the_table_shows_rates_and_waits() -> None:
    row = DecodeRow(16, 50.4, 806.4, 700.0, Spread.of([0.1, 0.1]), Spread.of([0.02, 0.02]))
    report = BenchReport("tiny", "int4", 2, "abc", BenchPlan(concurrency=(16,)), 1234.0, (row,), load_average=3.0)
    console = Console(file=StringIO(), width=200)
    show(console, report)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    for part in ("1234", "806", "50", "100 / 100", "20.0 / 20.0", "load average 3.0"):
        assert part in shown


def test_answers_that_never_ran_all_at_once_have_no_rate_together() -> None:
    row = DecodeRow(16, 50.4, math.nan, 700.0, Spread.of([0.1, 0.1]), Spread.of([0.02, 0.02]))
    console = Console(file=StringIO(), width=200)
    show(console, BenchReport("tiny", "int4", 2, "abc", BenchPlan(concurrency=(16,)), 1234.0, (row,), load_average=0.0))
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "nan" not in shown
    assert "a longer --answer lets all run at once" in shown
