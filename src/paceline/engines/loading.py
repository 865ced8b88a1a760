"""How long an engine's load may take, and what is tried next if a GPU's memory is too small. Time is an argument."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

SHARES: Final = (0.75, 0.5, 0.25, 0.0)
"""Shares of a model's layers on the GPU, tried in turn when its memory is too small. More of them: a better fit, and more loads until one is found."""


@dataclass(frozen=True, slots=True)
class LoadPatience:
    """How long things may take, in seconds."""

    silent_s: float = 120.0
    """A load without output, growing memory or bytes read, while the engine uses no processor. Raising it: a load that hangs is given up later."""
    working_s: float = 600.0
    """The same while the engine uses processors: GPU kernels are compiled at the first start, which says nothing and takes minutes."""
    longest_s: float = 3600.0
    """A whole load, whatever it shows. Raising it: an engine that talks without end is given up later; lowering it: models on slow disks never load."""
    grace_s: float = 5.0
    """From SIGTERM to SIGKILL when the engine is stopped. Raising it: running answers may end; a hung engine holds up its node."""
    look_s: float = 0.25
    """Between two looks at a load. Raising it: readiness is noticed later; lowering it: more processor time for looking."""


@dataclass(frozen=True, slots=True)
class LoadSigns:
    """Signs of a load so far. Each number only matters if it grows."""

    output: int = 0
    memory: int = 0
    read: int = 0
    processor_s: float = 0.0


class LoadWatch:
    """Decides from a load's signs whether it still makes progress. Times are seconds of one monotonic clock."""

    def __init__(self, patience: LoadPatience, now: float) -> None:
        self._patience, self._began_s = patience, now
        self._progress_s = self._worked_s = now
        self._most = LoadSigns()

    def look(self, signs: LoadSigns, now: float) -> str | None:
        """Take the signs of this moment. Returns why the load is given up; None: it goes on."""
        most = self._most
        # A megabyte more, not a byte: an idle process's memory also varies.
        if signs.output > most.output or signs.memory >= most.memory + (1 << 20) or signs.read > most.read:
            self._progress_s = self._worked_s = now
        elif signs.processor_s > most.processor_s + 0.02:
            self._worked_s = now
        self._most = LoadSigns(
            max(signs.output, most.output),
            max(signs.memory, most.memory),
            max(signs.read, most.read),
            max(signs.processor_s, most.processor_s),
        )
        silent_s, idle_s = now - self._progress_s, now - self._worked_s
        if now - self._began_s > self._patience.longest_s:
            return f"it was not ready after {self._patience.longest_s:.0f} s"
        if idle_s > self._patience.silent_s or silent_s > self._patience.working_s:
            return f"it showed no progress for {silent_s:.0f} s"
        return None


def fewer_layers(layers: int | None, n_layers: int) -> int | None:
    """Return the next lower number of layers to try on the GPU; None: no lower one is left.

    Args:
        layers: the number that was too large; None: the engine chose it.
        n_layers: layers of the model; 0: the engine uses no GPU.
    """
    now = n_layers if layers is None else min(layers, n_layers)
    return next((lower for share in SHARES if (lower := int(n_layers * share)) < now), None)


def signs_of(pid: int, n_output: int) -> LoadSigns:
    """Return the signs of a load by the guard `pid`: sums over its descendants."""
    memory, read, processor_s = 0, 0, 0.0
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error), process.oneshot():
                memory += process.memory_info().rss
                times = process.cpu_times()
                processor_s += times.user + times.system
                if hasattr(process, "io_counters"):  # not on macOS
                    read += process.io_counters().read_bytes
    return LoadSigns(n_output, memory, read, processor_s)
