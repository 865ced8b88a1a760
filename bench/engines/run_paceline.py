"""Paceline's engine, stepped in this process. Settings are weights formats; empty: the one nearest to the file's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker import Engine, Job, Times, serve

from paceline.backends.table import Kernels
from paceline.core.clock import SystemClock
from paceline.core.model import WeightsFormat
from paceline.machine.build import build_engine
from paceline.machine.settings import NodeSettings
from paceline.machine.speed import drive


class JobClock(SystemClock):
    def __init__(self, job: Job) -> None:
        self.monotonic = job.now


class PacelineEngine:
    def __init__(self, job: Job) -> None:
        self.built = build_engine(
            NodeSettings(
                job.model,
                WeightsFormat(job.setting) if job.setting else None,
                kv_tokens=job.sequences * job.context,
                context=job.context,
                device=Kernels(job.device) if job.device else None,
                threads=job.threads,
                max_running=job.sequences,
                prefix_cache=False,
            )
        )
        self._clock = JobClock(job)

    def run(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Times:
        timing = drive(self.built.engine, [tuple(prompt) for prompt in prompts], answer_tokens, self._clock)
        return Times(timing.started_s, timing.arrivals_s)


def load(job: Job) -> tuple[Engine, dict[str, Any]]:
    engine = PacelineEngine(job)
    return engine, {"summary": engine.built.summary, "numerics_id": engine.built.executor.numerics_id}


if __name__ == "__main__":
    serve(load)
