"""This machine alone, in place of those that were lost: the layers that others ran are loaded here, beside the thread that waits for them.

Law: nothing is loaded before it is wanted, and what was loaded in vain is closed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.ids import NodeId
from paceline.engine.local import LayerRunner, WireBits
from paceline.ways.pipeline.executor.links import ActivationSink, ActivationSource, Rehearse
from paceline.ways.pipeline.executor.route import Fault, Route, RouteStage
from paceline.ways.pipeline.executor.stage import Stage
from paceline.ways.pipeline.executor.stage_batch import StageBatch

FORGET_S = 600.0
"""A loss so long ago does not count any more. Raising it: machines that go away now and then are given up on sooner."""


class Fallback:
    """For the engine's thread.

    Args:
        load: the route that stays here; may take its time.
        after: losses that end the search for other machines; None: the search lasts its time.
    """

    def __init__(self, load: Callable[[], Route], after: int | None, clock: Clock) -> None:
        self._load, self._after, self._clock = load, after, clock
        self._losses: deque[float] = deque(maxlen=after or 1)
        self._loading: Future[Route] | None = None

    def lost(self) -> None:
        """A route over other machines broke."""
        self._losses.append(self._clock.monotonic())

    @property
    def is_due(self) -> bool:
        """Whether so many were lost that no others are to be looked for."""
        return len(self._losses) == self._after and self._clock.monotonic() - self._losses[0] < FORGET_S

    @property
    def has_begun(self) -> bool:
        """Whether it is being loaded."""
        return self._loading is not None

    def wait(self, seconds: float) -> Route | None:
        """The route, or None while it is being loaded.

        Raises:
            PacelineError: it can't be had.
        """
        if self._loading is None:
            self._loading = Future()
            threading.Thread(target=self._run, args=(self._loading,), name="paceline-fallback", daemon=True).start()
        if not wait((self._loading,), seconds).done:
            return None
        loading, self._loading = self._loading, None
        if loading.exception() is not None:
            self._losses.clear()  # others are to be looked for after all
        try:
            return loading.result()
        except (MemoryError, OSError) as error:
            raise PacelineError(f"The layers can't be loaded here: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Idempotent; does not wait."""
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.add_done_callback(_discard)

    def _run(self, loading: Future[Route]) -> None:
        try:
            loading.set_result(self._load())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            loading.set_exception(error)


def _discard(loading: Future[Route]) -> None:
    if loading.exception() is None:
        loading.result().close()


class LocalRoute:
    """A route that leaves this machine nowhere: the layers that others ran, loaded here. Same kernels, same bytes.

    Law: for one thread. Batches run when they are asked for, so that what the last one gave can be handed out meanwhile.

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
        behind = batch.behind(self.stages[0].layers)
        return behind, self._stage.run(batch, x_TD)[: behind.n_rows]

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
