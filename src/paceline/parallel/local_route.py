"""A route that leaves this machine nowhere: the layers that others ran, loaded here. Same kernels, same bytes.

Law: for one thread. Batches run when they are asked for, so that what the last one gave can be handed out meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from paceline.core.ids import NodeId
from paceline.engine.local import LayerRunner, WireBits
from paceline.parallel.links import ActivationSink, ActivationSource, Rehearse
from paceline.parallel.route import Fault, RouteStage
from paceline.parallel.stage import Stage
from paceline.parallel.stage_batch import StageBatch


class LocalRoute:
    """A `Route` of one stage.

    Args:
        model_id: for the shard's name.
        runner: of the layers, without embedding and head; closed with the route.
        max_context: positions of a sequence at most.
    """

    def __init__(self, own: NodeId, model_id: str, runner: LayerRunner[Any], *, max_rows: int, max_context: int, width: int) -> None:
        layers, kv_tokens = runner.layers, runner.n_blocks * runner.block_size
        self.stages = (RouteStage(own, layers, f"{model_id}:{layers}", runner.numerics_id, runner.holds_identity, kv_tokens),)
        self.sink: ActivationSink = self
        self.source: ActivationSource = self
        self.block_size = runner.block_size
        self._runner, self._own = runner, own
        self._stage = Stage(runner, layers, base_block=0, n_blocks=runner.n_blocks, max_rows=max_rows, max_context=max_context, width=width)
        self._waiting: deque[tuple[StageBatch, WireBits]] = deque()
        self._closed = False

    def prepare(self, batch: StageBatch, width: int) -> None:
        """There is nothing to prepare."""

    def send(self, batch: StageBatch, x_TD: WireBits, deadline: float) -> None:
        """Keep it until it is asked for."""
        del deadline
        self._waiting.append((batch, np.array(x_TD)))

    def receive(self, deadline: float, rehearse: Rehearse | None = None) -> tuple[StageBatch, WireBits]:
        """Run the oldest."""
        del deadline, rehearse  # kernels in this thread can't be given up half way
        batch, x_TD = self._waiting.popleft()
        return batch, self._stage.run(batch, x_TD)

    def fault(self, wait_s: float = 0.0) -> Fault | None:
        del wait_s
        return None

    def suspect(self, received: int) -> Fault:
        del received
        return Fault(self._own, "pipeline_stalled", "this machine is slow")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._runner.close()
