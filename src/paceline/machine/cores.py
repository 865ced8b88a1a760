"""How many threads a step should be shared among: one a physical core that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(system: Path = Path("/sys")) -> int:
    """Physical cores within this process's affinity and its container's quota.

    Two threads on one core take turns on its one multiplier, so hardware threads are not counted. Where the system doesn't
    say which share a core (macOS), every processor counts.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    processors = os.sched_getaffinity(0)
    topology = system / "devices/system/cpu"
    cores = {_siblings(topology / f"cpu{number}/topology/thread_siblings_list", number) for number in processors}
    return max(1, min(len(cores), _quota(system / "fs/cgroup/cpu.max")))


def _siblings(path: Path, number: int) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return str(number)


def _quota(path: Path) -> int:
    """Processors' worth of time a container may use; as many as there are where it is not limited."""
    unlimited = os.cpu_count() or 1
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return unlimited
    return unlimited if quota == "max" else max(1, math.floor(int(quota) / int(period)))
