"""A stage whose layers tensor ranks share: real processes behind real sockets give the bytes of one machine, and one of them that is lost is seen and replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.seeded_models import TINY, write_gguf
from tests.fleet.test_launch import gone
from tests.unit.net.member.nodes import in_loop, until
from tests.unit.ways.pipeline.host import hosts
from tests.unit.ways.pipeline.host.hosts import Bits, Net, User, batch_of, hosting, in_thread, rows_of, soon, wanted
from tests.unit.ways.pipeline.host.test_faults import loss_of

from paceline.backends import cpu
from paceline.backends.options import LoadOptions, LoadProgress
from paceline.core.errors import ShardUnavailable
from paceline.core.model import LayerRange, WeightsFormat
from paceline.core.weights import WeightSource
from paceline.engine.local import LayerRunner
from paceline.store.catalog import open_weights
from paceline.store.digests import DigestCache
from paceline.store.home import Home
from paceline.ways.pipeline.executor.stage import Stage, StageBatch
from paceline.ways.tensor.group import TensorGroup
from paceline.ways.tensor.loading import load_stage

pytestmark = pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")

STORED, LAYERS = WeightsFormat.STORED, LayerRange(1, TINY.n_layers)
BATCHES = (
    batch_of(1, rows=5, blocks=(3,)),
    batch_of(2, rows=9, first=5, blocks=()),
    batch_of(3, rows=1, first=14, blocks=(0,), path=1),
    batch_of(4, rows=16, blocks=(1,), sequence=2),
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightSource:
    monkeypatch.setattr(hosts, "SPEC", TINY)
    return open_weights(write_gguf(tmp_path / "tiny.gguf", TINY, "Q4_K_M"), DigestCache(Home.from_environment()))


class Groups:
    """`LoadsLayers` of a model in a file, whatever is found."""

    def __init__(self, model: WeightSource, *speeds: float) -> None:
        self._model, self._speeds = model, speeds
        self.made: list[TensorGroup] = []

    def __call__(self, source: WeightSource, options: LoadOptions, progress: LoadProgress) -> LayerRunner[Any]:
        self.made.append(load_stage(self._speeds, self._model, options, progress))
        return self.made[-1]


def alone(model: WeightSource, batches: Sequence[StageBatch]) -> list[tuple[Bits, Bits]]:
    """What goes into the layers of one machine, and what comes of it."""
    runner = cpu.load(model, LoadOptions(LAYERS, STORED, 8, edges=False, kernel_cache=Home.from_environment().kernels))
    stage = Stage(runner, LAYERS, base_block=0, n_blocks=8, max_rows=16, max_context=128, width=TINY.hidden)
    rows = [rows_of(batch.n_rows, batch.batch_id) for batch in batches]
    try:
        return [(x_TD, stage.run(batch, x_TD).copy()) for batch, x_TD in zip(batches, rows, strict=True)]
    finally:
        runner.close()


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (3.0, 1.0)], ids=str)
@in_loop
async def test_a_group_as_a_stage_gives_the_bytes_of_one_machine(model: WeightSource, speeds: tuple[float, ...]) -> None:
    expected = await in_thread(alone, model, BATCHES)
    net, groups = Net(), Groups(model, *speeds)
    async with hosting(net, "a", load=groups) as a, User(net) as user:
        route = await user.route((a, await user.open(a, wanted(1, TINY.n_layers, weights=STORED))))
        for batch, (x_TD, y_TD) in zip(BATCHES, expected, strict=True):
            assert (await route.run(batch, x_TD)).tobytes() == y_TD.tobytes()
        assert len(groups.made[0].processes) == 2
    assert gone({*groups.made[0].processes[1:]})


@in_loop
async def test_a_stage_that_loses_a_rank_ends_all_its_sessions_and_is_loaded_anew(model: WeightSource) -> None:
    """Whatever KV it had is void, that of sessions at rest and that of sessions that ended, too."""
    expected = await in_thread(alone, model, BATCHES)
    net, groups = Net(), Groups(model, 1.0, 1.0)
    asked = wanted(1, TINY.n_layers, weights=STORED, kv=b"k" * 16)
    async with hosting(net, "a", load=groups) as a, User(net) as user:
        rests = await user.open(a, wanted(1, TINY.n_layers, weights=STORED, kv=b"r" * 16))
        struck = await user.open(a, asked)
        resting, route = await user.route((a, rests)), await user.route((a, struck))
        await resting.run(*_first(expected))
        await route.run(*_first(expected))
        os.kill(groups.made[0].processes[1], signal.SIGKILL)
        await in_thread(route.sink.send, BATCHES[1], expected[1][0], soon())
        for stage in (struck, rests):
            loss = await loss_of(stage)
            assert (loss.code, loss.node_id) == (ShardUnavailable.code, None)
        await until(lambda: a.host.sessions == 0)
        again = await user.open(a, wanted(1, TINY.n_layers, weights=STORED, kv=asked.kv))
        assert again.opened.resumed is False
        route = await user.route((a, again))
        for batch, (x_TD, y_TD) in zip(BATCHES, expected, strict=True):
            assert (await route.run(batch, x_TD)).tobytes() == y_TD.tobytes()
        assert len(groups.made) == 2
        await until(lambda: gone({*groups.made[0].processes[1:]}))


def _first(expected: list[tuple[Bits, Bits]]) -> tuple[StageBatch, Bits]:
    return BATCHES[0], expected[0][0]
