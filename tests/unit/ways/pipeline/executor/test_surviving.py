"""Whichever machines are lost, and whenever: answers are those of an undisturbed pipeline, and no stage is ever asked for what it does not hold.

Stages are hashes of what their KV really holds, and a machine that dies loses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.fakes.engines import VOCAB, VOCABULARY, UnsteadySource
from tests.fakes.null_backend import NullRunner
from tests.fakes.pipelines import Machine, MemoryRouter

from paceline.core.clock import SystemClock
from paceline.core.generation import GenerationRequest, SamplingParams
from paceline.core.ids import RequestId
from paceline.core.model import LayerRange
from paceline.engine.config import EngineConfig
from paceline.engine.drafting import DraftingConfig
from paceline.engine.engine import Engine
from paceline.engine.local import RowPlan
from paceline.ways.pipeline.executor.pipeline import PipelineExecutor
from paceline.ways.pipeline.executor.search import PipelineLimits

WIDTH, N_LAYERS, BLOCK = 4, 6, 4
FINITE = np.uint64(0x3FFF_3FFF_3FFF_3FFF)
"""Bits of bf16 that are finite, however they are set."""


class Layers(NullRunner):
    """Some layers of a model, each like the others."""

    def __init__(self, layers: LayerRange, n_blocks: int) -> None:
        super().__init__(n_blocks=n_blocks, block_size=BLOCK, vocab=VOCAB)
        self.layers = layers

    def run_layers(self, x_TD: Any, plan: RowPlan, part: LayerRange | None = None) -> Any:
        return super().run_layers(x_TD, plan, part) & FINITE


def asked(chance: Random) -> list[GenerationRequest]:
    """Some begin alike, and some of those longer than a block."""
    shared = [chance.randrange(1, VOCAB) for _ in range(24)]
    return [
        GenerationRequest(
            RequestId(f"r{number}"),
            (*shared[: chance.choice((0, 6, 13, 24))], *(chance.randrange(1, VOCAB) for _ in range(chance.randint(1, 9)))),
            chance.randint(4, 24),
            SamplingParams(temperature=chance.choice((0.0, 0.9)), seed=number),
            ignore_eos=True,
        )
        for number in range(chance.randint(3, 9))
    ]


class Lab:
    """A pipeline, whose machines die at batches drawn from a seed, and are there again at a later look."""

    def __init__(self, own: int, splits: Sequence[LayerRange], n_blocks: int, journal_bytes: int) -> None:
        runners = [Layers(LayerRange(0, N_LAYERS), n_blocks) for _ in range(len(splits) + 2)]
        self.machines = [Machine(f"m{place}", runner, WIDTH) for place, runner in enumerate(runners)]
        for machine, runner in zip(self.machines, runners, strict=True):
            machine.on_death = runner.wipe
        self.router = MemoryRouter(self.machines, splits)
        limits = PipelineLimits(stall_s=20.0, search_s=20.0, look_s=0.0, max_rows=16, journal_bytes=journal_bytes)
        self.executor = PipelineExecutor(Layers(LayerRange(0, own), n_blocks), N_LAYERS, self.router, limits, SystemClock())

    def run(
        self, requests: Sequence[GenerationRequest], *, prefix_cache: bool, drafting: DraftingConfig | None = None
    ) -> dict[str, list[int]]:
        config = EngineConfig(max_context=64, max_running=6, prefill_chunk=10, prefix_cache=prefix_cache, max_losses=100)
        engine = Engine(self.executor, VOCABULARY, config, SystemClock(), drafting=drafting)
        for request in requests:
            engine.add(request)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        while engine.has_work:
            for chunk in engine.step():
                assert chunk.error is None
                tokens[chunk.request_id].extend(chunk.token_ids)
            engine.check_invariants()
        self.router.close()
        assert not [error for machine in self.machines for error in machine.refused]
        return tokens


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(60))
def test_bytes_are_those_of_a_pipeline_that_lost_nothing(seed: int) -> None:
    chance = Random(seed)
    requests = asked(chance)
    own = chance.choice((0, 1, 2))
    cuts = sorted(chance.sample(range(own + 1, N_LAYERS), chance.randint(0, 2)))
    splits = [LayerRange(start, stop) for start, stop in zip((own, *cuts), (*cuts, N_LAYERS), strict=True)]
    calm = Lab(own, splits, 200, 0)
    expected = calm.run(requests, prefix_cache=False)
    journal_bytes = chance.choice((0, 2 * WIDTH * BLOCK * chance.randint(1, 40), 1 << 20))
    lab = Lab(own, splits, chance.choice((18, 40, 200)), journal_bytes)

    def doom(_: int) -> None:
        for machine in lab.machines:
            if not machine.alive and chance.random() < 0.7:
                machine.alive = True
                lab.router.quarantined.discard(machine.node_id)
            if machine.alive:
                machine.dies_at = chance.randint(1, 40) if chance.random() < 0.5 else None
        # Once in a while there is an end of it.
        if lab.router.looks > 25:
            for machine in lab.machines:
                machine.alive, machine.dies_at = True, None
                lab.router.quarantined.clear()

    lab.router.on_look = doom
    for machine in lab.machines[: len(splits)]:
        machine.dies_at = chance.randint(1, 12)
    truths = [[*request.prompt_ids, *expected[request.request_id]] for request in requests]
    source = UnsteadySource(lambda sequence: truths[sequence], chance, VOCAB)
    drafting = chance.choice((None, DraftingConfig("knowing", {"knowing": source})))
    assert lab.run(requests, prefix_cache=chance.random() < 0.7, drafting=drafting) == expected
    assert len(lab.router.routes) > 1
