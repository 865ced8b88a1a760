"""Every executor of this repository under the one suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.conformance.suites.executor import BLOCKS, VOCAB, ExecutorSuite
from tests.conformance.test_routes import routes_over
from tests.fakes.executors import InOrderExecutor
from tests.fakes.null_backend import NullRunner
from tests.fakes.pipelines import Machine, MemoryRouter
from tests.unit.ways.pipeline.host.hosts import SPEC as HOSTED
from tests.unit.ways.pipeline.routes.test_spot_check import part

from paceline.backends import cpu
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.bench.exercises import ForcedExecutor
from paceline.core.clock import SystemClock
from paceline.core.errors import ShardUnavailable
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange, ModelSpec, RopeSpec, WeightsFormat
from paceline.engine.executor import Executor
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.route import PipelineFault
from paceline.ways.pipeline.executor.search import Fallback, LocalRoute, PipelineLimits
from paceline.ways.pipeline.routes.opening import FleetRoute

SPEC = ModelSpec(
    model_type="llama", n_layers=4, hidden=64, n_heads=3, n_kv_heads=1, head_dim=32, ffn=96, vocab=96, max_context=256, rms_eps=1e-5,
    rope=RopeSpec(10000.0), tied_head=True,
)  # fmt: skip
LIMITS = PipelineLimits(stall_s=30.0, search_s=5.0, look_s=0.01)


def load(layers: LayerRange, *, edges: bool = True) -> LayerRunner[Any]:
    options = LoadOptions(layers, WeightsFormat.INT4, 2 * BLOCKS, edges=edges)
    return cpu.load(SeededWeights(SPEC), options)


def pipeline(own: int, *splits: LayerRange) -> Executor:
    machines = [Machine(name, load(span, edges=False), SPEC.hidden) for name, span in zip("abc", splits, strict=False)]
    return PipelineExecutor(load(LayerRange(0, own)), SPEC.n_layers, MemoryRouter(machines, splits), LIMITS, SystemClock())


def left_alone() -> Executor:
    """A pipeline with no machines, which runs the others' layers here."""

    def fall_back() -> LocalRoute:
        runner = load(LayerRange(1, SPEC.n_layers), edges=False)
        return LocalRoute(NodeId("here"), "m", runner, max_rows=1024, max_context=1 << 20, width=SPEC.hidden)

    router = MemoryRouter([], [LayerRange(1, SPEC.n_layers)])
    with pytest.raises(ShardUnavailable):
        router.find(0.0)
    limits = PipelineLimits(stall_s=30.0, search_s=0.0, look_s=0.01)
    return PipelineExecutor(
        load(LayerRange(0, 1)), SPEC.n_layers, router, limits, SystemClock(), fallback=Fallback(fall_back, None, SystemClock())
    )


def null(**options: bool) -> NullRunner:
    return NullRunner(n_blocks=2 * BLOCKS, vocab=VOCAB, **options)


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "local, null": lambda: LocalExecutor(null()),
    "local, null of one path": lambda: LocalExecutor(null(one_path=True)),
    "local, kernels": lambda: LocalExecutor(load(SPEC.all_layers)),
    "in order, of depth 3": lambda: InOrderExecutor(null(), 3),
    "forced": lambda: ForcedExecutor(LocalExecutor(null())),
    "pipeline of two stages": lambda: pipeline(0, LayerRange(0, 2), LayerRange(2, 4)),
    "pipeline with own layers": lambda: pipeline(1, LayerRange(1, 3), LayerRange(3, 4)),
    "pipeline left alone": left_alone,
}


class OpenedRouter:
    """`Router` that opens a route over the same hosts each time."""

    def __init__(self, opened: Callable[[], FleetRoute]) -> None:
        self._opened, self._routes = opened, list[FleetRoute]()

    def find(self, wait_s: float) -> FleetRoute:
        del wait_s
        self.close()
        self._routes.append(self._opened())
        return self._routes[-1]

    def lacks(self) -> None: ...

    def forget_kv(self) -> None:
        """Routes of this one keep none."""

    def quarantine(self, fault: PipelineFault) -> None:
        raise AssertionError(fault)

    def close(self) -> None:
        for route in self._routes:
            route.close()


class TestExecutors(ExecutorSuite):
    @pytest.fixture(params=EXECUTORS)
    def executor(self, request: pytest.FixtureRequest) -> Iterator[Executor]:
        made = EXECUTORS[request.param]()
        yield made
        made.close()


class TestPipelineOverFleet(ExecutorSuite):
    """Over hosts' real sessions and tensor streams, with mutual TLS on loopback."""

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        backend = cpu.load
        own = LoadOptions(LayerRange(0, 2), WeightsFormat.BF16, 2 * BLOCKS)
        with routes_over([part("a", 2, 4), part("b", 4, 6)], backend, n_blocks=2 * BLOCKS, max_rows=256) as opened:
            made = PipelineExecutor(backend(SeededWeights(HOSTED), own), HOSTED.n_layers, OpenedRouter(opened), LIMITS, SystemClock())
            yield made
            made.close()
