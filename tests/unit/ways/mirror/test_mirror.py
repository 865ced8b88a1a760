"""A way that no package of the product knows is planned, built and held to the executors' contract."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from tests.conformance.suites.executor import BLOCKS, VOCAB, Driver, ExecutorSuite
from tests.fakes.null_backend import NullRunner
from tests.unit.ways.mirror.executor import MirrorExecutor
from tests.unit.ways.mirror.price import MIRROR, Mirrored
from tests.unit.ways.pipeline.routes.test_choosing import CARDS

from paceline.core.errors import PlacementError, ShardCorrupt
from paceline.core.ids import NodeId
from paceline.engine.executor import Executor
from paceline.fleet.placement import explain, plan
from paceline.fleet.plan import PlanRequest
from paceline.node.ways import WAYS


def null() -> NullRunner:
    return NullRunner(n_blocks=2 * BLOCKS, vocab=VOCAB)


class TestMirror(ExecutorSuite):
    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        made = MirrorExecutor(null(), null())
        yield made
        made.close()


class Liar(NullRunner):
    """One bit of one logit is wrong."""

    def logits(self, x_TD: npt.NDArray[np.uint64], rows_R: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        found = super().logits(x_TD, rows_R).copy()
        found.view(np.uint32)[-1, -1] ^= 1
        return found


def test_a_bit_that_differs_is_found() -> None:
    driver = Driver(MirrorExecutor(null(), Liar(n_blocks=2 * BLOCKS, vocab=VOCAB)))
    driver.submit(driver.step([1, 2, 3], blocks=driver.blocks(3)))
    with pytest.raises(ShardCorrupt, match="other bytes on the second node"):
        driver.executor.collect(1e9)


def test_it_is_planned_like_any_other() -> None:
    ways = (*WAYS, Mirrored())
    made = plan(CARDS, PlanRequest("m", ways=frozenset({MIRROR})), ways)
    assert made.chosen.way == MIRROR
    assert len(made.chosen.stages) == 2
    assert any("plan: " in line for line in explain(made))
    assert plan(CARDS, PlanRequest("m"), ways).chosen.way != MIRROR, "it costs more than one of them alone"
    nowhere = PlanRequest("m", ways=frozenset({MIRROR}), orchestrator=NodeId("own"))
    with pytest.raises(PlacementError, match="No machine can run m"):
        plan(CARDS, nowhere, ways)
