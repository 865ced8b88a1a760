"""How fast this machine reads its memory: what decoding is bound by, and what speeds are guessed from before they are measured.

Law: all cores that a step would use read together, through the caches, for about 0.1 s in all; the best of some passes counts. The result
is kept until the machine starts again, or, where other programs were busy meanwhile, until it is asked for again: then the better counts.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.machine.cores import usable_cores
from paceline.store.home import Home, read_json_object, write_cache

SIZE = 64 << 20
"""Bytes read in a pass: more than most caches hold. Raising it takes memory, and time to fill it."""
BUDGET_S = 0.05
"""For all passes. Filling the memory before them takes about as long."""
_PIECE = 1 << 18
"""Copied at a time, into a buffer that stays in the second-level cache."""


def memory_rate(home: Home, threads: int | None = None, measure: Callable[[int], float] | None = None) -> float:
    """Bytes a second.

    Args:
        threads: default: as many as a step uses.
        measure: default: `stream_rate`.
    """
    threads = threads or usable_cores()
    machine = _identity(threads)
    kept = read_json_object(home.memory_rate) or {}
    said = kept.get("bytes_per_s") if kept.get("machine") == machine else None
    before = float(said) if isinstance(said, int | float) and 0 < said < 1e15 else 0.0
    if before and kept.get("disturbed") is not True:
        return before
    disturbed = is_disturbed()
    rate = max(before, (measure or stream_rate)(threads))
    write_cache(home.memory_rate, json.dumps({"machine": machine, "bytes_per_s": rate, "disturbed": disturbed}).encode())
    return rate


def is_disturbed() -> bool:
    """Whether other programs have been busy for the last minute, so that what is measured now is too low."""
    return os.getloadavg()[0] > max(1.0, (os.cpu_count() or 1) / 4)


def stream_rate(threads: int) -> float:
    """Bytes a second that so many threads read together."""
    words = SIZE // 8 // threads
    with ThreadPoolExecutor(threads, "memory-rate") as pool:
        # Each thread touches what it reads first, so that the pages are near it.
        parts = list(pool.map(lambda _: np.ones(words, np.uint64), range(threads)))
        list(pool.map(_read, parts))
        best, spent = 0.0, 0.0
        while spent < BUDGET_S:
            began = time.perf_counter()
            list(pool.map(_read, parts))
            took = max(time.perf_counter() - began, 1e-9)
            best, spent = max(best, threads * words * 8 / took), spent + took
    return best


def _read(words: npt.NDArray[np.uint64]) -> None:
    piece = np.empty(_PIECE // 8, np.uint64)
    for start in range(0, len(words) - len(piece) + 1, len(piece)):
        np.copyto(piece, words[start : start + len(piece)])


def _identity(threads: int) -> str:
    """This machine since it started, as far as the system says, and the threads."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {platform.machine()} {boot} {threads}"
