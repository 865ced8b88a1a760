"""Finds stages that compute plausible wrong numbers: now and then, rows of a prompt are computed again by other nodes that hold the layers.

Law: this node knows only what it sent and what came back, so the rows are replayed over a chain of other nodes, which must end with the same
bytes. No stage can tell such a batch from any other. Where the ends differ, each stage of the route is given its own input again, in a session like
any other: a stage that differs from the second node is left out, or the second node, where a third one sides with the stage. Where every stage
repeats the right bytes, the one that lied can't be known, and all of them are left out.
What is checked needs no KV from before: rows from position 0 of a sequence. Later rows are not checked.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.core.background import in_background_of
from paceline.core.errors import FleetError, PipelineError, ShardCorrupt
from paceline.core.ids import BatchId, NodeId, SequenceId, Trust
from paceline.core.model import BLOCK_TOKENS, WIDEST_BLOCK, LayerRange, LayerSpan
from paceline.engine.executor import Path
from paceline.engine.local import WireBits
from paceline.fleet.card import NodeCard
from paceline.ways.pipeline.cover import warm_cover
from paceline.ways.pipeline.executor.route import PipelineFault, Route
from paceline.ways.pipeline.executor.stage import StageBatch, check_activations
from paceline.ways.pipeline.routes.fleet_access import Wanted, choose
from paceline.ways.pipeline.routes.opening import FleetRoute, NotOpened, RouteOpener


class Holders:
    """Other nodes that could compute a route's layers once more. On the event loop.

    Args:
        left_out: the nodes that must take no part.
    """

    def __init__(
        self,
        cards: Callable[[], Sequence[NodeCard]],
        trust: Callable[[], Mapping[NodeId, Trust]],
        wanted: Wanted,
        left_out: Callable[[], frozenset[NodeId]],
    ) -> None:
        self._cards, self._trust, self._left_out = cards, trust, left_out
        self._wanted = replace(wanted, request=replace(wanted.request, pins=()))

    def chain(self, stages: Sequence[LayerSpan]) -> list[list[LayerSpan]]:
        """For each stage, other nodes that run its layers: nodes outside the route where they cover it, else any that has the layers loaded.

        Empty where there are not enough for all.
        """
        outside = self._left_out() | {stage.node_id for stage in stages}
        try:
            parts = choose(self._cards(), self._trust(), self._wanted, outside)
        except PipelineError:
            chain = [self.third(stage.layers, frozenset({stage.node_id})) for stage in stages]
            return chain if all(chain) else []
        return [[part for whole in parts if (part := _within(whole, stage.layers)) is not None] for stage in stages]

    def third(self, layers: LayerRange, but: frozenset[NodeId]) -> list[LayerSpan]:
        """Other nodes that have the layers loaded; empty where they don't cover."""
        return warm_cover(self._cards(), self._wanted.request, layers, self._trust(), self._left_out() | but)


def _within(part: LayerSpan, layers: LayerRange) -> LayerSpan | None:
    start, stop = max(part.layers.start, layers.start), min(part.layers.stop, layers.stop)
    return LayerSpan(part.node_id, LayerRange(start, stop)) if start < stop else None


logger = logging.getLogger(__name__)

MOST_ROWS = 256
"""Of a check. Raising it: more of a prompt is looked at, and second holders work more."""
MOST_BYTES = 1 << 20
"""Of the rows."""
CHECK_S = 60.0
"""For a whole check. One that takes longer is given up and says nothing."""


@dataclass(slots=True)
class _Sample:
    """Rows of one sequence in one batch."""

    route: FleetRoute
    batch_id: BatchId
    rows: slice
    sent_TD: WireBits
    came_TD: WireBits = field(default_factory=lambda: np.zeros((0, 0), np.uint16))


class SpotCheck:
    """A `ways.pipeline.executor.events.Inspector`.

    Args:
        one_in: of the batches that begin a sequence, how many are between two checks, on average.
        numerics_id: of this node: others give other bytes and can't be compared.
        leave_out: told of a fault, from the event loop.
    """

    def __init__(
        self,
        one_in: int,
        opener: RouteOpener,
        holders: Holders,
        numerics_id: str,
        leave_out: Callable[[PipelineFault], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._one_in, self._opener, self._holders = one_in, opener, holders
        self._numerics_id, self._leave_out, self._loop = numerics_id, leave_out, loop
        self._random = random.SystemRandom()
        self._sample: _Sample | None = None
        self._route: FleetRoute | None = None
        """In use."""
        self._running: Future[None] | None = None
        self._said_alone = False
        self.passed = 0
        self.failed = 0

    # ------------------------------------------------------------------------------------------------------ for the engine's thread

    def sent(self, route: Route, batch: StageBatch, x_TD: WireBits) -> None:
        if not isinstance(route, FleetRoute):  # one that stays here
            self._route = self._sample = None
            return
        if route is not self._route:
            self._route, self._sample = route, None
        if self._sample is not None or (self._running is not None and not self._running.done()):
            return
        rows = _beginning(batch, min(MOST_ROWS, MOST_BYTES // (2 * x_TD.shape[1])))
        if rows is None or any(stage.numerics_id != self._numerics_id for stage in route.stages) or self._random.randrange(self._one_in):
            return
        self._sample = _Sample(route, batch.batch_id, rows, np.array(x_TD[rows]))

    def came(self, batch: StageBatch, x_TD: WireBits) -> None:
        sample = self._sample
        if sample is None or sample.batch_id != batch.batch_id:
            return
        self._sample = None
        sample.came_TD = np.array(x_TD[sample.rows])
        self._running = in_background_of(self._loop, self._check(sample), "a spot check")

    def close(self) -> None:
        """Give up what is being checked."""
        if self._running is not None:
            self._running.cancel()

    # ---------------------------------------------------------------------------------------------------------- on the event loop

    async def _check(self, sample: _Sample) -> None:
        stages = [LayerSpan(stage.node_id, stage.layers) for stage in sample.route.stages]
        chain = self._holders.chain(stages)
        if not chain:
            if not self._said_alone:
                logger.info("no spot check: no other node could run the layers of %s", _names(stages))
            self._said_alone = True
            return
        try:
            async with asyncio.timeout(CHECK_S):
                right = [sample.sent_TD]
                for parts in chain:
                    right.append(await self._run(parts, right[-1]))
                if np.array_equal(sample.came_TD, right[-1]):
                    self.passed += 1
                    return
                self.failed += 1
                for fault in await self._blame(stages, chain, right):
                    self._act(fault)
        except (NotOpened, FleetError, TimeoutError) as error:
            logger.info("a spot check could not be made: %s", error or "it took too long")

    async def _blame(
        self, stages: Sequence[LayerSpan], chain: Sequence[Sequence[LayerSpan]], right: Sequence[WireBits]
    ) -> list[PipelineFault]:
        """The stages that differ once more; or all, where none does."""
        found: list[PipelineFault] = []
        for place, (stage, others) in enumerate(zip(stages, chain, strict=True)):
            again = await self._again([stage], right[place])
            if again is None or np.array_equal(again, right[place + 1]):
                continue
            third = self._holders.third(stage.layers, frozenset({stage.node_id, *(part.node_id for part in others)}))
            said = await self._again(third, right[place]) if third else None
            if said is not None and np.array_equal(said, again):
                # The second holder is the one who is wrong, and what was computed after it says nothing.
                return [_fault(part.node_id, stage.layers, f"{stage.node_id} and {_names(third)}") for part in others]
            found.append(_fault(stage.node_id, stage.layers, _names(others)))
        if found:
            return found
        return [_fault(stage.node_id, stage.layers, _names(others)) for stage, others in zip(stages, chain, strict=True)]

    async def _again(self, parts: Sequence[LayerSpan], x_TD: WireBits) -> WireBits | None:
        """`_run`; None where it can't be."""
        try:
            return await self._run(parts, x_TD)
        except (NotOpened, FleetError) as error:
            logger.info("%s can't be asked once more: %s", _names(parts), error)
            return None

    async def _run(self, parts: Sequence[LayerSpan], x_TD: WireBits) -> WireBits:
        """What layers make of the first rows of a sequence, in a session of its own.

        Raises:
            NotOpened, FleetError: no holder can say.
        """
        n_rows = len(x_TD)
        route = await self._opener.open(parts, blocks=-(-n_rows // WIDEST_BLOCK) * WIDEST_BLOCK // BLOCK_TOKENS)
        blocks = list(range(-(-n_rows // route.block_size)))
        batch = StageBatch(BatchId(1), [SequenceId(1)], [n_rows], [0], [int(Path.PROMPT)], [len(blocks)], blocks)

        def there_and_back() -> WireBits:
            until = time.perf_counter() + CHECK_S
            route.sink.send(batch, x_TD, until)
            _, y_TD = route.source.receive(until)
            check_activations(y_TD, n_rows, x_TD.shape[1])
            return np.array(y_TD)

        try:
            if any(stage.numerics_id != self._numerics_id for stage in route.stages):
                raise FleetError(f"{_names(parts)} computes with other numerics")
            return await asyncio.to_thread(there_and_back)
        finally:
            route.close()

    def _act(self, fault: PipelineFault) -> None:
        self._leave_out(fault)
        route = self._route
        if route is not None and any(stage.node_id == fault.node_id for stage in route.stages):
            route.accuse(fault)


def _beginning(batch: StageBatch, most: int) -> slice | None:
    """Rows of a sequence that begins in this batch."""
    start = 0
    for count, first, path in zip(batch.row_counts, batch.first_positions, batch.paths, strict=True):
        if first == 0 and path == Path.PROMPT:
            return slice(start, start + min(count, most))
        start += count
    return None


def _fault(node_id: NodeId, layers: LayerRange, others: str) -> PipelineFault:
    told = f"A spot check found that {node_id} computes other bytes for layers {layers.words} than {others}"
    return PipelineFault(node_id, ShardCorrupt.code, told)


def _names(parts: Sequence[LayerSpan]) -> str:
    return " and ".join(dict.fromkeys(part.node_id for part in parts))
