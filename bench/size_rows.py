"""What a part of `size.py` found, as rows of one table: the figure, what it stands beside, what was asked and what to reach for."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    measured: str
    """With its unit, its range, and what it stands beside."""
    asked: str
    reach: str
    held: bool | None
    """Whether what was asked was measured; None where a row only informs."""
    conditions: str
    """How the machine was, what was done, what was left out."""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """The raw numbers."""

    def print(self, machine: str) -> None:
        verdict = {True: "held", False: "MISSED", None: "-"}[self.held]
        print(
            f"{verdict:7} {self.what}: {self.measured}\n        asked {self.asked}; reach {self.reach}; {self.conditions}\n        on {machine}",
            flush=True,
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def spread(values: Sequence[float], unit: str, digits: int = 2) -> str:
    """Median and range."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f} {unit}"
    return f"{median(values):.{digits}f} {unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine(threads: int) -> str:
    """Processor, cores, threads used, memory, and how busy it was as this was asked."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_int8") if unit in known.get("flags", "").split()]
        name = f"{known.get('model name', '?')} (family {known.get('cpu family', '?')}, model {known.get('model', '?')}; {' '.join(units)})"
    except OSError:
        name = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return f"{name}, {os.cpu_count()} processors, {threads} threads used, {memory:.0f} GiB, load {os.getloadavg()[0]:.1f}"
