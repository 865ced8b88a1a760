"""Promise 1 on the real model: how work is batched, cut, cached, preempted or threaded changes no byte of an answer.

Every scenario must give each request the tokens it gets alone, on one thread, uncached, in one prefill chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backends import cpu
from paceline.backends.options import LoadOptions
from paceline.backends.table import Kernels, fastest_on_processors
from paceline.core.clock import SystemClock
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.model import WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.machine.kv_tier import DiskTier, KvDiskLimits, Wakeup
from paceline.machine.setup import load_runner
from paceline.store.catalog import OpenedModel, open_model
from paceline.store.home import Home

BLOCKS = 400
ANSWER = 24
FEW_LAYERS = 6

pytestmark = pytest.mark.timeout(600)  # the first run on a machine compiles kernels

PROCESSORS = fastest_on_processors() if cpu.runs_here() else Kernels.AVX2
needs_kernels = pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")


@dataclass(frozen=True)
class Kind:
    kernels: Kernels
    weights: WeightsFormat
    layers: int = FEW_LAYERS
    """The model's first ones: every layer is like another."""


@dataclass(frozen=True)
class Scenario:
    batch: int = 16
    chunk: int = 512
    every: int = 0
    """Steps between arrivals; 0: all at once."""
    prefix_cache: bool = False
    rounds: int = 1
    blocks: int = BLOCKS
    threads: int = 2
    disk: bool = False
    """Each round is another engine, over what the one before left on a disk."""


SCENARIOS = {
    "one-at-a-time-2-threads": Scenario(batch=1),
    "batch-4": Scenario(batch=4),
    "batch-16": Scenario(),
    "batch-16-1-thread": Scenario(threads=1),
    "mixed-arrivals": Scenario(every=2),
    "chunks-of-3": Scenario(chunk=3),
    "chunks-of-17": Scenario(chunk=17, every=1),
    "chunks-of-64": Scenario(chunk=64),
    "prefix-hits": Scenario(prefix_cache=True, rounds=2),
    "from-disk": Scenario(prefix_cache=True, rounds=2, disk=True),
    "from-disk-one-at-a-time": Scenario(prefix_cache=True, rounds=2, disk=True, batch=1, threads=1),
    "preempted": Scenario(blocks=22),
    "preempted-with-prefix-cache": Scenario(blocks=22, prefix_cache=True, rounds=2, chunk=64, every=1),
}


KINDS = {
    "cpu-int4": Kind(PROCESSORS, WeightsFormat.INT4),
    "cpu-int4-all-layers": Kind(PROCESSORS, WeightsFormat.INT4, layers=30),
    "cpu-int8": Kind(PROCESSORS, WeightsFormat.INT8),
    "cpu-bf16": Kind(PROCESSORS, WeightsFormat.BF16),
}
SHORT = ("batch-16", "prefix-hits", "preempted")
"""What whole models and the other formats run; their conformance suite covers rows, chunks and threads too."""
RUN = dict.fromkeys(KINDS, SHORT) | {"cpu-int4": tuple(SCENARIOS)}


def matrix() -> Iterator[Any]:
    """Every scenario on the default kernels and format, fewer on the others; grouped, so that each is loaded once."""
    for kind_id, kind in KINDS.items():
        marks = [needs_kernels, pytest.mark.whole("every layer is like another")] if kind.layers > FEW_LAYERS else [needs_kernels]
        for scenario_id in RUN[kind_id]:
            yield pytest.param(kind, SCENARIOS[scenario_id], id=f"{kind_id}-{scenario_id}", marks=marks)


class Shallow:
    """A `WeightSource` of a model's first layers."""

    def __init__(self, whole: WeightSource, n_layers: int) -> None:
        self.spec, self.digest = replace(whole.spec, n_layers=n_layers), whole.digest
        self.names, self.nbytes, self.type_of, self.read = whole.names, whole.nbytes, whole.type_of, whole.read


class Loaded:
    """One kind of kernels on the bundled model, on one thread and on two."""

    def __init__(self, kind: Kind, model: OpenedModel) -> None:
        self.kind = kind
        self.model = model
        self.runners: dict[int, LayerRunner[Any]] = {}
        weights = Shallow(model.weights, kind.layers)
        for threads in (1, 2):
            options = LoadOptions(
                layers=weights.spec.all_layers,
                weights=kind.weights,
                n_blocks=BLOCKS,
                threads=threads,
                kernel_cache=Home.from_environment().kernels,
            )
            self.runners[threads] = load_runner(kind.kernels, weights, options)
        self.queue = requests(model)
        self.alone = self.run(Scenario(batch=1, threads=1))[0]

    def run(self, scenario: Scenario, folder: Path = Path()) -> tuple[dict[str, tuple[int, ...]], Engine]:
        """Tokens of every request in the last round.

        Args:
            folder: on the disk, where the scenario has one.
        """
        runner = self.runners[scenario.threads]

        class Cramped(LocalExecutor[Any]):
            def __init__(self) -> None:
                super().__init__(runner)
                self.n_blocks = scenario.blocks

            def close(self) -> None:
                """The runner outlives the engines of this test."""

        config = EngineConfig(
            max_context=1024,
            max_running=scenario.batch,
            prefill_chunk=scenario.chunk,
            step_budget_s=3600.0,  # chunks are the scenario's, however busy the machine is
            prefix_cache=scenario.prefix_cache,
        )
        wakeup, tier, engine = Wakeup(), None, Engine(Cramped(), self.model.tokenizer, config, SystemClock())
        tokens: dict[str, tuple[int, ...]] = {}
        for _ in range(scenario.rounds):
            if scenario.disk:
                tier = DiskTier(runner, self.model.weights.digest, folder, KvDiskLimits(1 << 30), SystemClock(), wakeup.came)
                engine = Engine(Cramped(), self.model.tokenizer, config, SystemClock(), wait=wakeup.wait, kv=tier)
            tokens = {}
            queue = list(self.queue)
            if not scenario.every:
                for request in queue:
                    engine.add(request)
                queue = []
            step = 0
            while queue or engine.has_work:
                if queue and step % scenario.every == 0:
                    engine.add(queue.pop(0))
                for chunk in engine.step():
                    tokens[chunk.request_id] = tokens.get(chunk.request_id, ()) + chunk.token_ids
                step += 1
            engine.check_invariants()
            if tier is not None:
                tier.close()
        return tokens, engine

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()


def requests(model: OpenedModel) -> list[GenerationRequest]:
    """Sixteen prompts of 2 to 110 tokens, some with a common beginning; greedy and seeded by turns."""
    rng = np.random.default_rng(7)
    shared = model.tokenizer.encode("The quick brown fox jumps over the lazy dog, and then it goes to sleep under a very old tree. " * 2)
    made: list[GenerationRequest] = []
    for i in range(16):
        own = rng.integers(100, 40_000, int(rng.integers(2, 70))).tolist()
        prompt = (shared + own) if i % 4 == 0 else own
        greedy = i % 2 == 0
        sampling = (
            SamplingParams(temperature=0.0) if greedy else SamplingParams(temperature=0.9, top_p=0.95, top_k=60, seed=1000 + i, logprobs=2)
        )
        made.append(GenerationRequest(RequestId(f"r{i}"), tuple(prompt), ANSWER, sampling, ignore_eos=True))
    return made


class Shelf:
    """Keeps the kind loaded last."""

    def __init__(self) -> None:
        self.loaded: Loaded | None = None

    def get(self, kind: Kind) -> Loaded:
        if self.loaded is None or self.loaded.kind != kind:
            self.close()
            self.loaded = Loaded(kind, open_model("smollm2-135m"))
        return self.loaded

    def close(self) -> None:
        if self.loaded is not None:
            self.loaded.close()


@pytest.fixture(scope="module")
def shelf(paceline_home: object) -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "scenario"), list(matrix()))
def test_same_tokens(shelf: Shelf, kind: Kind, scenario: Scenario, tmp_path: Path) -> None:
    loaded = shelf.get(kind)
    if not loaded.runners[1].holds_identity:
        pytest.skip("on this processor these kernels don't hold identity, and say so")
    tokens, engine = loaded.run(scenario, tmp_path)
    assert tokens == loaded.alone
    assert all(len(answer) == ANSWER for answer in tokens.values())
    stats = engine.stats()
    assert stats.blocks_in_use == 0
    assert (stats.preemptions > 0) == (scenario.blocks < BLOCKS)
    assert (stats.prefix_hits_tokens > 0) == scenario.prefix_cache
    assert (stats.prefix_fetched_tokens > 0) == scenario.disk
    # The matrix would hold trivially if sampling drew nothing.
    assert len(set(tokens.values())) == len(tokens)
