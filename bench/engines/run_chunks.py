"""Paceline's engine, a step a run: the first run names a prompt, and each run computes one chunk of it. For measuring at a position."""

from __future__ import annotations

import runpy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker import Engine, Job, Times, serve

import paceline
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId

ENGINE = Path(paceline.__file__).parents[2] / "bench" / "engines" / "run_paceline.py"
"""How the tree that is measured builds its engine: an earlier one has its modules elsewhere."""


class ChunkEngine:
    def __init__(self, job: Job) -> None:
        self.paceline = runpy.run_path(str(ENGINE))["PacelineEngine"](job)
        self._asked = 0

    def run(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Times:
        engine = self.paceline.built.engine
        for prompt in prompts:
            self._asked += 1
            sampling = SamplingParams(temperature=0.0)
            engine.add(
                GenerationRequest(RequestId(f"chunks-{self._asked}"), tuple(prompt), answer_tokens, sampling, ignore_eos=True, draft="off")
            )
        started_s = time.perf_counter()
        if engine.has_work:
            engine.step()
        return Times(started_s, [[time.perf_counter()]])


def load(job: Job) -> tuple[Engine, dict[str, Any]]:
    engine = ChunkEngine(job)
    return engine, {"summary": engine.paceline.built.summary}


if __name__ == "__main__":
    serve(load)
