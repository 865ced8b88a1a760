"""Promises 1 and 2 at the sizes people run: a 1B's widths, contexts of thousands of tokens, every form weights are held in. Stages, batches and losses change no byte.

`make test` runs some layers of one form in a shorter context; PACELINE_SIZES=whole runs the whole shape to a context of 8,192, as `make bench-size` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.pipelines import Machine, MemoryRouter
from tests.fakes.seeded_models import shape, write_folder, write_gguf
from tests.identity.test_matrix import needs_kernels
from tests.identity.test_pipeline import run
from tests.sampling import ALL

from paceline.core.clock import SystemClock
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.model import BLOCK_TOKENS, LayerRange
from paceline.engine.executor import Executor
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.search import PipelineLimits

pytestmark = [needs_kernels, pytest.mark.sampled(1, by="subject"), pytest.mark.timeout(3600 if os.environ.get("PACELINE_SIZES") else 300)]

WHOLE = os.environ.get("PACELINE_SIZES") == "whole"
SPEC = shape("llama-1b") if WHOLE else shape("llama-1b", n_layers=3, vocab=4096)
LONG = 8192 if WHOLE else 2100 if ALL else 700
FORMATS = {
    "q4_k_m": ("Q4_K_M", LONG), "q6_k": ("Q6_K", LONG if WHOLE else 200), "q8_0": ("Q8_0", LONG if WHOLE else 200), "bf16": ("BF16", LONG if WHOLE else 200),
}  # fmt: skip
"""File types, and the longest context in each."""
ANSWER = 12
SPLITS = {1: [(0, 3)], 2: [(0, 1), (1, 3)], 3: [(0, 1), (1, 2), (2, 3)]}
ROUTES = {"2 stages, one dies": (2, 5, 16), "3 stages, batch 1": (3, None, 1)}
if WHOLE:
    ROUTES |= {"1 stage": (1, None, 16), "3 stages, one dies": (3, 7, 1)}
"""Stages, the batch at which one dies, and sequences side by side."""


class Subject:
    """One file on one node, and the parts of it that nodes of a pipeline hold."""

    def __init__(self, path: Path, context: int) -> None:
        self.context = context
        self.setup = set_up(NodeSettings(str(path), context=context, kv_tokens=4 * context, threads=2))
        everything = self.setup.opened.spec.all_layers
        self.n_layers = len(everything)
        self.n_blocks = 4 * context // BLOCK_TOKENS
        self.whole = self._load(everything, edges=True)
        self.head = self._load(LayerRange(0, 0), edges=True)
        self.others = [self._load(everything, edges=False) for _ in range(2)]
        self.alone = self.run(LocalExecutor(self.whole), 1)

    def _load(self, layers: LayerRange, *, edges: bool) -> LayerRunner[Any]:
        return self.setup.load(layers, self.n_blocks, 512 + 32, edges=edges)

    def run(self, executor: Executor, batch: int) -> dict[str, tuple[int, ...]]:
        return run(executor, self.setup.opened, batch, requests(self.setup.opened.spec.vocab, self.context), self.context)

    def close(self) -> None:
        for runner in (self.whole, self.head, *self.others):
            runner.close()


def requests(vocab: int, context: int) -> list[GenerationRequest]:
    """One that fills the context, and shorter ones beside it; greedy and seeded by turns."""
    rng = np.random.default_rng(11)
    made: list[GenerationRequest] = []
    for i, length in enumerate([context - ANSWER, context // 3, *(int(each) for each in rng.integers(2, 90, 6))]):
        sampling = SamplingParams(temperature=0.0) if i % 2 == 0 else SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=i)
        prompt = tuple(rng.integers(64, vocab, length).tolist())
        made.append(GenerationRequest(RequestId(f"r{i}"), prompt, ANSWER, sampling, ignore_eos=True))
    return made


@pytest.fixture(scope="module", params=FORMATS.values(), ids=FORMATS.keys())
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, paceline_home: object) -> Iterator[Subject]:
    types, context = request.param
    folder = tmp_path_factory.mktemp("sizes")
    # What GGUF holds as bf16 is mostly shared as safetensors.
    path = write_folder(folder / "model", SPEC) if types == "BF16" else write_gguf(folder / "model.gguf", SPEC, types)
    subject = Subject(path, context)
    yield subject
    subject.close()


@pytest.mark.parametrize(("stages", "dies_at", "batch"), ROUTES.values(), ids=ROUTES.keys())
def test_same_tokens(subject: Subject, stages: int, dies_at: int | None, batch: int) -> None:
    scale = subject.n_layers / 3
    spans = [LayerRange(round(start * scale), round(stop * scale)) for start, stop in SPLITS[stages]]
    # Runners may serve several machines of a route: each runs other layers.
    machines = [Machine(f"m{place}", subject.others[place % 2], SPEC.hidden) for place in range(stages + 1)]
    locks = {id(machine.runner): machine.lock for machine in machines}
    for machine in machines:
        machine.lock = locks[id(machine.runner)]
    machines[-2].dies_at = dies_at
    router = MemoryRouter(machines, spans)
    executor = PipelineExecutor(subject.head, subject.n_layers, router, PipelineLimits(stall_s=120.0), SystemClock())
    assert subject.run(executor, batch) == subject.alone
    assert executor.failovers == (dies_at is not None)
    router.close()
