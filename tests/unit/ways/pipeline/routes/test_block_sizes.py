"""Machines that keep KV in blocks of different sizes run one model: over real sessions, with prefix hits, preemption and a loss, to the same bytes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.null_backend import ByteVocabulary
from tests.fakes.pipelines import Machine, MemoryRouter
from tests.unit.net.member.nodes import BOUND_S, in_loop
from tests.unit.ways.pipeline.executor.test_pipeline import Run
from tests.unit.ways.pipeline.host.hosts import SPEC, Hosting, Net, User, hosting, in_thread, wanted
from tests.unit.ways.pipeline.routes.test_spot_check import Eyes, part

from paceline.backends import cpu, torch
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.core.clock import SystemClock
from paceline.core.errors import PipelineError, ShardUnavailable
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import NodeId, RequestId
from paceline.core.model import LayerRange, LayerSpan, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.local import LayerRunner, LocalExecutor
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.route import Opening, PipelineFault
from paceline.ways.pipeline.executor.search import PipelineLimits
from paceline.ways.pipeline.host.loading import LoadsLayers
from paceline.ways.pipeline.routes.opening import FleetRoute, NotOpened, RouteOpener

OWN = LayerRange(0, 2)
TOKENS = 512
"""Of KV, everywhere."""
SHARED = tuple(range(1, 90)) + tuple(range(1, 60))
"""The beginning of all prompts: more than a block of the widest."""


def loads(block_size: int) -> LoadsLayers:
    """Layers through torch, with KV in blocks of that size: as a backend does that has a size of its own."""

    def load(source: WeightSource, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
        n_blocks = options.n_blocks * options.block_size // block_size
        return torch.load(source, replace(options, block_size=block_size, n_blocks=n_blocks), progress)

    return load


def load_here(load: Callable[..., LayerRunner[Any]], layers: LayerRange) -> LayerRunner[Any]:
    return load(SeededWeights(SPEC), LoadOptions(layers, WeightsFormat.BF16, TOKENS // 16))


@pytest.fixture(scope="module")
def torch_alone() -> dict[str, list[int]]:
    """What one node says."""
    whole = load_here(torch.load, SPEC.all_layers)
    tokens = run_all(LocalExecutor(whole), prefix_cache=False).tokens
    whole.close()
    return tokens


def queue() -> list[GenerationRequest]:
    """Prompts that begin alike, and short ones whose answers outgrow the blocks there are."""
    prompts = [(*SHARED, *range(1, 4 + 9 * i)) if i % 2 else tuple(range(i + 1, i + 9)) for i in range(7)]
    return [
        GenerationRequest(
            RequestId(f"r{i}"), prompt, 24 if i % 2 else 160, SamplingParams(temperature=0.9 if i % 3 else 0.0, seed=i), ignore_eos=True
        )
        for i, prompt in enumerate(prompts)
    ]


def run_all(executor: Any, *, prefix_cache: bool = True) -> Run:
    run = Run(executor)
    config = EngineConfig(max_context=256, max_running=8, prefill_chunk=64, prefix_cache=prefix_cache)
    run.engine = Engine(executor, ByteVocabulary(SPEC.vocab), config, SystemClock())
    run.all(queue())
    return run


class Routes:
    """A `Router` over hosts that were started here: each route in its turn."""

    def __init__(self, opener: RouteOpener, routes: list[list[LayerSpan]], loop: asyncio.AbstractEventLoop) -> None:
        self.opener, self.routes, self.loop = opener, routes, loop
        self.opened: list[FleetRoute] = []
        self.names: dict[LayerSpan, bytes] = {}

    def find(self, wait_s: float) -> FleetRoute | Opening:
        del wait_s
        if not self.routes:
            raise ShardUnavailable("No machine is left")
        parts = self.routes.pop(0)
        self.names = {part: self.names.get(part) or secrets.token_bytes(16) for part in parts}
        opening = asyncio.run_coroutine_threadsafe(self.opener.open(parts, kv=self.names), self.loop)
        self.opened.append(opening.result(BOUND_S))
        return self.opened[-1]

    def lacks(self) -> None: ...

    def forget_kv(self) -> None: ...

    def quarantine(self, fault: PipelineFault) -> None: ...

    def close(self) -> None:
        for route in self.opened:
            route.close()


async def over_hosts(head: LayerRunner[Any], sizes: tuple[int, int, int], kills: int) -> tuple[Run, PipelineExecutor, list[int]]:
    """Run over hosts a and b; b is killed after some steps, and c takes its place. Each has blocks of the size given."""
    net, loop = Net(), asyncio.get_running_loop()
    async with (
        hosting(net, "a", load=loads(sizes[0])) as a,
        hosting(net, "b", load=loads(sizes[1])) as b,
        hosting(net, "c", load=loads(sizes[2])) as c,
        User(net) as user,
    ):
        hosts: dict[NodeId, Hosting] = {host.node_id: host for host in (a, b, c)}
        asked = wanted(2, 6, weights=WeightsFormat.BF16, n_blocks=TOKENS // 16, least_blocks=16, max_rows=128)
        opener = RouteOpener(Eyes(user, hosts), user.ends, asked, SPEC.hidden, head.block_size, loop)
        routes = Routes(opener, [[part("a", 2, 4), part("b", 4, 6)], [part("a", 2, 4), part("c", 4, 6)]], loop)
        limits = PipelineLimits(stall_s=BOUND_S, search_s=BOUND_S, max_rows=128)
        executor = await in_thread(PipelineExecutor, head, SPEC.n_layers, routes, limits, SystemClock())
        seen = [executor.block_size]
        steps = 0
        submit = executor.submit

        def counted(batch: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == kills:
                asyncio.run_coroutine_threadsafe(b.host.close(), loop).result(BOUND_S)
            submit(batch)

        executor.submit = counted  # type: ignore[method-assign]
        run = await in_thread(run_all, executor)
        seen.append(executor.block_size)
        assert [stage.resumed for stage in executor.stages] == [True, False]
        await in_thread(routes.close)
        return run, executor, seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("sizes", "seen"), [((16, 128, 64), [128, 64]), ((32, 16, 128), [32, 128]), ((64, 64, 16), [64, 64])])
def test_any_sizes_give_the_bytes_of_one_node(torch_alone: dict[str, list[int]], sizes: tuple[int, int, int], seen: list[int]) -> None:
    head = load_here(torch.load, OWN)

    @in_loop
    async def check() -> None:
        run, executor, found = await over_hosts(head, sizes, kills=150)
        assert run.tokens == torch_alone
        assert (executor.failovers, found) == (1, seen)
        stats = run.engine.stats()
        assert stats.preemptions > 0
        assert stats.prefix_hits_tokens > 0
        assert executor.n_blocks * executor.block_size == TOKENS

    check()
    head.close()


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
def test_compiled_kernels_and_torch_meet_whatever_their_blocks() -> None:
    head = load_here(cpu.load, OWN)
    rest = torch.load(SeededWeights(SPEC), LoadOptions(LayerRange(2, 6), WeightsFormat.BF16, TOKENS // 16, edges=False))
    router = MemoryRouter([Machine("alike", rest, SPEC.hidden)], [LayerRange(2, 6)])
    alike = PipelineExecutor(head, SPEC.n_layers, router, PipelineLimits(stall_s=BOUND_S, max_rows=128), SystemClock())
    expected = run_all(alike, prefix_cache=False).tokens
    router.close()

    @in_loop
    async def check() -> None:
        run, executor, seen = await over_hosts(head, (16, 128, 32), kills=150)
        assert run.tokens == expected
        assert (executor.failovers, seen) == (1, [128, 32])

    check()
    for runner in (head, rest):
        runner.close()


@in_loop
async def test_blocks_that_go_with_no_others_are_refused_and_their_machine_is_blamed() -> None:
    net = Net()
    async with hosting(net, "a") as a, hosting(net, "b") as b, User(net) as user:
        opener = RouteOpener(Eyes(user, {a.node_id: a, b.node_id: b}), user.ends, wanted(0, 6), SPEC.hidden, 16, asyncio.get_running_loop())
        await (await user.open(b, wanted(3, 6))).close()
        b.runner.block_size = 48
        with pytest.raises(NotOpened, match="blocks of 48") as refused:
            await opener.open([part("a", 0, 3), part("b", 3, 6)])
        assert isinstance(refused.value.refusals[b.node_id], PipelineError)
        assert {**refused.value.refusals}.keys() == {"b"}
