"""A plugin of pytest that ends a run with the seconds that each test file took: by the clock, and of the processor with its child processes.

    python -m pytest -p tools.file_times

PACELINE_TEST_KEEP_TIMES=FILE writes the seconds by the clock there, as JSON: tests/sampling.py reads them.
Where xdist runs the tests in several processes, each reports to the first one at its end.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

LEAST_S = 1.0
"""By the clock; files that took less are summed up in one line."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileTimes())


class FileTimes:
    """Of one run, in seconds."""

    def __init__(self) -> None:
        self._clock_s: Counter[str] = Counter()
        self._processor_s: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Time a test, with the fixtures that it is the first or the last to need."""
        clock_s, processor_s = time.perf_counter(), sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self._clock_s[item.location[0]] += time.perf_counter() - clock_s
            self._processor_s[item.location[0]] += sum(os.times()[:4]) - processor_s

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the first process."""
        if (told := getattr(session.config, "workeroutput", None)) is not None:
            told["file_times"] = (dict(self._clock_s), dict(self._processor_s))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Hear from another; one that crashed tells nothing."""
        clock_s, processor_s = getattr(node, "workeroutput", {}).get("file_times", ({}, {}))
        self._clock_s.update(clock_s)
        self._processor_s.update(processor_s)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line per file, the slowest first."""
        if keep := os.environ.get("PACELINE_TEST_KEEP_TIMES"):
            kept = {name: round(took, 1) for name, took in sorted(self._clock_s.items()) if took >= LEAST_S}
            Path(keep).write_text(json.dumps(kept, indent=0) + "\n")
        terminalreporter.section("seconds by file: clock, processor")
        slow = [(name, clock_s) for name, clock_s in self._clock_s.most_common() if clock_s >= LEAST_S]
        quick = self._clock_s.keys() - {name for name, _ in slow}
        for name, clock_s in slow:
            terminalreporter.line(f"{clock_s:8.1f} {self._processor_s[name]:8.1f}  {name}")
        clock_s, processor_s = (sum(took[name] for name in quick) for took in (self._clock_s, self._processor_s))
        terminalreporter.line(f"{clock_s:8.1f} {processor_s:8.1f}  {len(quick)} files of less than {LEAST_S:g} s each")
