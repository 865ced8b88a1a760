"""What every `Route` of a pipeline must do, whatever its activations travel over.

Subclass `RouteSuite` in a test module that has a fixture `case` (a `RouteCase`): a route that is open, over stages that hold KV of at least 8 blocks.
The suite closes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from paceline.core.errors import TensorStreamError
from paceline.core.ids import BatchId, SequenceId
from paceline.engine.local import WireBits
from paceline.ways.pipeline.executor.route import Route
from paceline.ways.pipeline.executor.stage import StageBatch

BOUND_S = 60.0
"""Longest wait for a batch; reached only when a test fails."""


@dataclass(frozen=True)
class RouteCase:
    """A route to be looked at.

    Args:
        width: of a row, in bf16.
        waits: `receive` waits for what others compute. A route that computes when it is asked never waits.
    """

    route: Route
    width: int
    waits: bool = True


def batch_of(batch_id: int, rows: int = 2, sequence: int = 1, block: int = 0) -> StageBatch:
    """The first rows of a sequence."""
    return StageBatch(BatchId(batch_id), [SequenceId(sequence)], [rows], [0], [0], [1], [block])


def soon() -> float:
    return time.monotonic() + BOUND_S


class RouteSuite:
    @pytest.fixture
    def route(self, case: RouteCase) -> Iterator[Route]:
        yield case.route
        case.route.close()

    def bits(self, case: RouteCase, rows: int, seed: int = 0) -> WireBits:
        """Residuals of a size that models have."""
        values = np.random.default_rng(seed).standard_normal((rows, case.width)).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def there_and_back(self, route: Route, batch: StageBatch, x_TD: WireBits) -> WireBits:
        route.sink.send(batch, x_TD, soon())
        answered, y_TD = route.source.receive(soon())
        assert answered.batch_id == batch.batch_id
        return np.array(y_TD)

    def test_its_stages_follow_one_another(self, case: RouteCase, route: Route) -> None:
        assert route.stages
        assert route.block_size >= 1
        for stage in route.stages:
            assert len(stage.layers)
            assert stage.kv_tokens >= 0
            assert stage.node_id
        for before, behind in pairwise(route.stages):
            assert before.layers.stop == behind.layers.start

    def test_batches_come_back_in_order_with_a_row_for_each(self, case: RouteCase, route: Route) -> None:
        alone = [self.there_and_back(route, batch_of(1 + n, 2 + n, 1 + n, n), self.bits(case, 2 + n, n)) for n in range(2)]
        for n in range(2):
            route.sink.prepare(batch_of(3 + n, 2 + n, 3 + n, 2 + n), case.width)
            route.sink.send(batch_of(3 + n, 2 + n, 3 + n, 2 + n), self.bits(case, 2 + n, n), soon())
        for n in range(2):
            answered, y_TD = route.source.receive(soon())
            assert answered.batch_id == 3 + n
            assert y_TD.shape == (2 + n, case.width)
            assert np.array_equal(y_TD, alone[n])

    def test_what_was_sent_may_be_written_over(self, case: RouteCase, route: Route) -> None:
        expected = self.there_and_back(route, batch_of(1), self.bits(case, 2))
        x_TD = self.bits(case, 2)
        route.sink.send(batch_of(2, sequence=2, block=1), x_TD, soon())
        x_TD[:] = 0
        assert np.array_equal(route.source.receive(soon())[1], expected)

    def test_of_a_batch_that_only_fills_kv_no_rows_come_back(self, case: RouteCase, route: Route) -> None:
        filling = replace(batch_of(1), fills_to=route.stages[-1].layers.stop)
        assert self.there_and_back(route, filling, self.bits(case, 2)).shape == (0, case.width)

    def test_while_all_is_well_nobody_is_at_fault(self, case: RouteCase, route: Route) -> None:
        self.there_and_back(route, batch_of(1), self.bits(case, 2))
        assert route.fault() is None

    def test_who_is_suspected_is_one_of_its_stages(self, case: RouteCase, route: Route) -> None:
        assert route.suspect(0).node_id in {stage.node_id for stage in route.stages}

    def test_closing_it_ends_whoever_waits(self, case: RouteCase, route: Route) -> None:
        ended: list[TensorStreamError] = []

        def wait() -> None:
            try:
                route.source.receive(soon())
            except TensorStreamError as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        if case.waits:
            waiting.start()
        route.close()
        route.close()
        if not case.waits:
            waiting.start()
        waiting.join(BOUND_S)
        assert len(ended) == 1
        with suppress(TensorStreamError):
            route.sink.prepare(batch_of(9), case.width)
        with pytest.raises(TensorStreamError):
            route.sink.send(batch_of(9), self.bits(case, 2), soon())
