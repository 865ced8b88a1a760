"""An engine under test, in a process of its own: reads a job a line from stdin, answers a line each, as JSON. Standard library only.

Law: every engine gets the same token ids and lengths, answers greedily, and reports raw time stamps; all arithmetic is the harness's.
Whatever a library prints goes to stderr, so that stdout carries the protocol alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Job:
    """What an engine is to be loaded for."""

    model: str
    setting: str
    """One of the engine's ways to run; the harness tries all and keeps the best for each scenario."""
    threads: int
    sequences: int
    """Most at once."""
    context: int
    """Longest prompt and answer together."""
    device: str = ""
    """Kernels of ours to run, as `--device` names them; empty: the processor's own."""
    processor_time: bool = False
    """Stamp tokens with what the process has computed so far, not with the time of day: of one thread, beside other work."""

    def now(self) -> float:
        return time.process_time() if self.processor_time else time.perf_counter()


@dataclass(frozen=True)
class Times:
    """When a run began, and when each token of each sequence was there, by its job's clock."""

    started_s: float
    arrivals_s: Sequence[Sequence[float]]


class Engine(Protocol):
    def run(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Times:
        """Answer all prompts at once in exactly `answer_tokens` tokens each."""
        ...


def serve(load: Callable[[Job], tuple[Engine, dict[str, Any]]]) -> None:
    """Answer jobs until stdin ends or `quit` comes."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            match job.pop("do"):
                case "load":
                    job = Job(**job)
                    _pin(job.threads)
                    engine, about = load(job)
                    answer = {"about": about}
                case "run":
                    assert engine is not None, "run before load"
                    times = engine.run(job["prompts"], job["answer_tokens"])
                    answer = {"started_s": times.started_s, "arrivals_s": [list(stamps) for stamps in times.arrivals_s]}
                case other:
                    assert other == "quit", other
                    return
        except Exception:  # noqa: BLE001  the harness is told, whatever it was
            answer = {"error": traceback.format_exc(limit=-4)}
        answers.write(json.dumps(answer) + "\n")


def _die_with_parent() -> None:
    """A suspended process doesn't notice that its harness was killed; Linux ends it then."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _pin(threads: int) -> None:
    """Keep to the first processors, one a thread, so that every engine has the same ones."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
