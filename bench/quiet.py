"""How much of the machine other programs took while something was measured. Linux says; elsewhere nothing is known.

Law: a measurement that others disturbed is taken again, within bounds, and what was kept says how disturbed it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ATTEMPTS = 3
"""How often a measurement that others disturbed is taken, at most."""


class Bystanders:
    """Processor time used by processes other than those named, since this was made, as a share of the whole machine."""

    def __init__(self, pids: list[int], proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._pids = [*pids, os.getpid()]
        self._began_s = time.perf_counter()
        self._busy_s = self._busy()
        self._own_s = self._own()

    def share(self) -> float | None:
        """0 where the machine was otherwise idle; None where it can't be known."""
        if self._busy_s is None:
            return None
        wall_s = time.perf_counter() - self._began_s
        busy_s = (self._busy() or 0.0) - self._busy_s
        own_s = self._own() - self._own_s
        return max(0.0, (busy_s - own_s) / (wall_s * (os.cpu_count() or 1)))

    def _busy(self) -> float | None:
        try:
            fields = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _idle, _wait, irq, soft, steal = map(int, fields)
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")

    def _own(self) -> float:
        return sum(map(self._used, self._pids))

    def _used(self, pid: int) -> float:
        try:
            fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Patience:
    """Seconds that may be spent, in all, waiting for the machine to be quiet."""

    def __init__(self, budget_s: float, limit: float) -> None:
        self.left_s = budget_s
        self.limit = limit
        """Share of the machine others may take in a measurement that counts as undisturbed."""

    def wait(self) -> None:
        """Return when the machine is quiet, or patience has run out."""
        while self.left_s > 0:
            before = Bystanders([])
            time.sleep(0.25)
            self.left_s -= 0.25
            share = before.share()
            if share is None or share <= self.limit:
                return


def least_disturbed(run: Callable[[], T], pid: int, patience: Patience) -> tuple[T, float | None]:
    """Measure, again while others disturb it and patience lasts, and keep the least disturbed result and the share others took."""
    taken: list[tuple[T, float | None]] = []
    for _ in range(ATTEMPTS):
        patience.wait()
        began_s = time.perf_counter()
        around = Bystanders([pid])
        taken.append((run(), around.share()))
        share = taken[-1][1]
        if share is None or share <= patience.limit or patience.left_s <= 0:
            break
        patience.left_s -= time.perf_counter() - began_s
    return min(taken, key=lambda each: each[1] or 0.0)


def prefer(pid: int, nice: int) -> None:
    """Give a process that leads a session of its own, and what it will start, another priority; below 0 needs privileges.

    Linux weighs sessions against each other before it looks at the processes inside, so the session is told too.
    """
    if nice == 0:
        return
    os.setpriority(os.PRIO_PROCESS, pid, nice)
    session = Path(f"/proc/{pid}/autogroup")
    if session.exists():
        session.write_text(str(nice))
