"""Promises 1 and 2 on the real model: any number of stages gives the bytes of one machine, and so does the loss of any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.pipelines import Machine, MemoryRouter
from tests.identity.test_matrix import Shallow, requests

from paceline.backends.options import LoadOptions
from paceline.backends.table import choose
from paceline.core.clock import SystemClock
from paceline.core.generation import GenerationRequest
from paceline.core.model import LayerRange, WeightsFormat
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.executor import Executor
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.machine.setup import load_runner
from paceline.store.catalog import OpenedModel, open_model
from paceline.store.home import Home
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.search import PipelineLimits

pytestmark = pytest.mark.timeout(600)  # the first run on a machine compiles kernels

BLOCKS = 400
LAYERS = 9
"""Of the bundled model's 30: every layer is like another."""
HERE = 3
"""Layers of the orchestrator that has some."""
ROUTES: dict[str, list[tuple[int, int]]] = {
    "1 stage": [(0, LAYERS)],
    "2 stages": [(0, 4), (4, LAYERS)],
    "3 stages": [(0, 3), (3, 4), (4, LAYERS)],
    "2 stages and layers here": [(HERE, 6), (6, LAYERS)],
}


class Fleet:
    """Layers of the bundled model on four machines, and its head with some layers and with none."""

    def __init__(self) -> None:
        self.model: OpenedModel = open_model("smollm2-135m")
        self.weights = Shallow(self.model.weights, LAYERS)
        self.n_layers = LAYERS
        everything = LayerRange(0, self.n_layers)
        self.others = [self._load(everything, edges=False) for _ in range(2)]
        self.heads = {0: self._load(LayerRange(0, 0)), HERE: self._load(LayerRange(0, HERE))}
        self.whole = self._load(everything)
        self.alone = run(LocalExecutor(self.whole), self.model, 1)

    def close(self) -> None:
        for runner in (*self.others, *self.heads.values(), self.whole):
            runner.close()

    def _load(self, layers: LayerRange, *, edges: bool = True) -> LayerRunner[Any]:
        options = LoadOptions(layers, WeightsFormat.INT4, BLOCKS, edges=edges, kernel_cache=Home.from_environment().kernels)
        return load_runner(choose(self.weights.spec, WeightsFormat.INT4), self.weights, options)


def run(
    executor: Executor, model: OpenedModel, batch: int, queue: list[GenerationRequest] | None = None, context: int = 1024
) -> dict[str, tuple[int, ...]]:
    engine = Engine(executor, model.tokenizer, EngineConfig(max_context=context, max_running=batch, prefix_cache=batch > 1), SystemClock())
    for request in requests(model) if queue is None else queue:
        engine.add(request)
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for chunk in engine.step():
            tokens[chunk.request_id] = tokens.get(chunk.request_id, ()) + chunk.token_ids
    engine.check_invariants()
    return tokens


@pytest.fixture(scope="module")
def fleet(paceline_home: object) -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("dies_at", [None, 15])
@pytest.mark.parametrize("route", ROUTES)
def test_same_tokens(fleet: Fleet, route: str, dies_at: int | None, batch: int) -> None:
    spans = [LayerRange(*span) for span in ROUTES[route]]
    # Runners may serve several machines of a route: each runs other layers, and machines that replace them write the same KV.
    machines = [Machine(f"m{place}", fleet.others[place % 2], fleet.model.spec.hidden) for place in range(len(spans) + 1)]
    locks = {id(machine.runner): machine.lock for machine in machines}
    for machine in machines:
        machine.lock = locks[id(machine.runner)]
    machines[-2].dies_at = dies_at
    router = MemoryRouter(machines, spans)
    head = fleet.heads[spans[0].start]
    executor = PipelineExecutor(head, fleet.n_layers, router, PipelineLimits(stall_s=60.0), SystemClock())
    queue = requests(fleet.model) if batch == 16 else requests(fleet.model)[:2]
    tokens = run(executor, fleet.model, batch, queue)
    assert tokens == {request.request_id: fleet.alone[request.request_id] for request in queue}
    assert executor.failovers == (dies_at is not None)
    router.close()
