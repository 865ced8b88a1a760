"""Finds a pipeline's next route once it has none: over other nodes, or, if that is permitted, on this machine alone until others are back. Also the limits
of its waits, and how long batches may take before they count as stalled.

Laws:
- A search is bounded by silence: it lasts as long as nodes load further bytes, however many there are. One that found none is over, and the next request
  begins another, which ends at once where still none can, and waits for those that are getting ready.
- After a loss this machine loads the layers while it searches, if it may run alone: at once if no other machine has them, after `PipelineLimits.open_s`
  if others are loading them. The first route that is ready is used. At the start of a pipeline the search comes first, because no answer waits.
- What was loaded in vain is closed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from paceline.core.backoff import Backoff, Recent
from paceline.core.clock import PREPARE_S, Clock
from paceline.core.errors import (
    ExecutorUnavailable,
    PacelineError,
    PipelineError,
    PipelineStalled,
    ShardCorrupt,
    ShardUnavailable,
    StreamClosed,
    WeightsMismatch,
)
from paceline.core.ids import NodeId
from paceline.core.model import shard_id
from paceline.engine.local import LayerRunner, WireBits
from paceline.ways.pipeline.executor.route import (
    ActivationSink,
    ActivationSource,
    Opening,
    PipelineFault,
    Route,
    Router,
    RouteStage,
    StageReport,
)
from paceline.ways.pipeline.executor.stage import Stage, StageBatch


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    stall_s: float = 2.0
    """Without a batch coming out, beyond what its rows take. Raising it: a machine that hangs is noticed later."""
    search_s: float = 30.0
    """How long machines are looked for, or may load no further byte, before requests end with an error. Raising it: they wait longer where
    none come back."""
    prepare_s: float = PREPARE_S
    """How long machines may go on that have no bytes to count, before the first or behind the last."""
    open_s: float = 1.0
    """How long other machines may take to open a route after a loss before this machine loads the layers too, if it may run alone. Raising it: answers
    wait longer for machines that have much to load; lowering it: memory is taken here for nothing more often."""
    alone_s: float = 30.0
    """How long this machine goes on alone, once it has to, before it looks for others again. Raising it: machines that come back are used later, and
    those that come and go hold up answers less often."""
    row_s: float = 0.01
    """What a row may take in all stages, until rows were seen. The bound on a stall grows with the rows under way."""
    look_s: float = 0.25
    """How long one look for machines may hold up the engine's thread."""
    max_rows: int = 1024
    max_context: int = 1 << 20
    journal_bytes: int = 256 << 20
    """Of what went to the first stage, kept so that a loss costs this machine's own layers nothing. Raising it takes memory."""


SMALL = 8
"""Rows of a small batch at most."""
WEIGHT = 0.1
"""Of a new time. Raising it: estimates follow faster, and a machine that turns slow is taken for an ordinary one sooner."""
MEASURED_BYTES = 1 << 20
"""Of a batch whose way says how fast the link is: what is smaller lies in the system's buffers at once."""
MARGIN = 4.0
"""By what factor a batch may take longer than estimated. Raising it: a stall is noticed later."""


class BatchTimeouts:
    """How long batches of one pipeline may take.

    Law: a row of a small batch costs far more than one of a large batch, so each kind has its own estimate; until a large one was seen, what is known
    of small ones holds for it, which is more than enough. One slow batch moves an estimate by a tenth, so that a machine that turns slow is found.

    Args:
        row_s: seconds for a row of a small batch, as far as that is known beforehand.
    """

    def __init__(self, row_s: float = 0.0) -> None:
        self._small_s = row_s
        self._large_s = 0.0
        """0: not known."""
        self._byte_s = 0.0
        """On the way to the first stage; 0: faster than can be measured."""

    def took(self, n_rows: int, seconds: float) -> None:
        each_s = seconds / max(1, n_rows)
        if n_rows <= SMALL:
            self._small_s = _moved(self._small_s, each_s)
        else:
            self._large_s = _moved(self._large_s, each_s)

    def carried(self, n_bytes: int, seconds: float) -> None:
        """So long was the system at handing a batch to the network."""
        if n_bytes >= MEASURED_BYTES:
            self._byte_s = _moved(self._byte_s, seconds / n_bytes)

    def of(self, n_rows: int, hop_bytes: int = 0) -> float:
        """What a batch may take, in seconds.

        Args:
            hop_bytes: of its activations, over all links that it goes.
        """
        return MARGIN * (n_rows * ((n_rows > SMALL and self._large_s) or self._small_s) + hop_bytes * self._byte_s)


def _moved(known_s: float, new_s: float) -> float:
    return known_s + WEIGHT * (new_s - known_s) if known_s else new_s


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
        self._losses = Recent(after or 1, FORGET_S)
        self._lock = threading.Lock()
        self._loading: Future[Route] | None = None
        self._is_wanted = False
        """A load that nothing waits for any more goes on, because it can't be stopped half way. What it loaded is then closed."""

    def lost(self) -> None:
        self._losses.add(self._clock.monotonic())

    @property
    def is_due(self) -> bool:
        """Whether so many were lost that no others are to be looked for."""
        return self._after is not None and self._losses.is_full(self._clock.monotonic())

    @property
    def has_begun(self) -> bool:
        return self._loading is not None and self._is_wanted

    def wait(self, seconds: float) -> Route | None:
        """Load the route if no load is under way, and wait for it.

        Returns:
            The route, or None while it is being loaded.

        Raises:
            PacelineError: it can't be loaded.
        """
        with self._lock:
            self._is_wanted = True
            loading = self._loading
            if loading is None:
                loading = self._loading = Future()
                threading.Thread(target=self._run, args=(loading,), name="paceline-fallback", daemon=True).start()
        if not wait((loading,), seconds).done:
            return None
        self._loading = None
        if loading.exception() is not None:
            self._losses.clear()  # others are to be looked for after all
        try:
            return loading.result()
        except (MemoryError, OSError) as error:
            raise PacelineError(f"The layers can't be loaded here: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close what is loaded, or will be, unless `wait` asks for it before. Idempotent; does not wait."""
        with self._lock:
            self._is_wanted = False
            loading = self._loading
            if loading is None or not loading.done():
                return
            self._loading = None
        _discard(loading)

    def _run(self, loading: Future[Route]) -> None:
        try:
            loading.set_result(self._load())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            loading.set_exception(error)
        with self._lock:
            if self._is_wanted or self._loading is not loading:
                return
            self._loading = None
        _discard(loading)


def _discard(loading: Future[Route]) -> None:
    if loading.exception() is None:
        loading.result().close()


class LocalRoute:
    """A route that leaves this machine nowhere: the layers that others ran, loaded here. Same kernels, same bytes.

    Law: for one thread. Batches run when they are asked for, so that what the last one gave can be handed out meanwhile.

    Args:
        runner: of the layers, without embedding and head; closed with the route.
    """

    def __init__(self, own: NodeId, model_id: str, runner: LayerRunner[Any], *, max_rows: int, max_context: int, width: int) -> None:
        layers, kv_tokens = runner.layers, runner.n_blocks * runner.block_size
        self.stages = (RouteStage(own, layers, shard_id(model_id, layers), runner.numerics_id, runner.holds_identity, kv_tokens),)
        self.reports: Sequence[StageReport] = ()
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
        self._check_open()
        self._waiting.append((batch, np.array(x_TD)))

    def receive(self, deadline: float) -> tuple[StageBatch, WireBits]:
        """Run the oldest."""
        del deadline  # kernels in this thread can't be given up half way
        self._check_open()
        batch, x_TD = self._waiting.popleft()
        behind = batch.behind(self.stages[0].layers)
        return behind, self._stage.run(batch, x_TD)[: behind.n_rows]

    def fault(self, wait_s: float = 0.0) -> PipelineFault | None:
        del wait_s
        return None

    def suspect(self, received: int) -> PipelineFault:
        del received
        return PipelineFault(self._own, "pipeline_stalled", "this machine is slow")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self._runner.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed("this machine's own layers are closed")


logger = logging.getLogger(__name__)

TOLD = (WeightsMismatch, PipelineStalled)
"""Why machines that are there are of no use, by their codes; all else is that none are there."""
LOOK_AGAIN_S = 5.0
"""Between two looks for others while this machine goes on alone."""
ALONE_MOST_S = 600.0
"""See `PipelineLimits.alone_s`: doubled each time, up to this; and from the beginning again after so long with others."""


class Search:
    """For the engine's thread.

    Args:
        fallback: this machine alone; None: it may not.
        layers: that a route must run, for messages.
    """

    def __init__(self, router: Router, fallback: Fallback | None, layers: str, limits: PipelineLimits, clock: Clock) -> None:
        self._router, self._fallback, self._layers, self._limits, self._clock = router, fallback, layers, limits, clock
        self._until: float | None = None
        self._found_none = False
        """The search before this one."""
        self._answers_wait = False
        """A route was lost: this is not the start of a pipeline."""
        self._load_here_at = 0.0
        """From then on this machine loads the layers too, whatever others do."""
        self._not_here: PacelineError | None = None
        """Why this machine could not load the layers during this search."""
        self.opening: Opening | None = None
        """What the last look saw of a route on its way."""
        self._advanced = 0
        """Of that, when it was last seen to rise."""
        self._prepares_until: float | None = None
        """Set while machines have no bytes to count."""
        self._since = clock.monotonic()
        self.reason = self._hint = ""
        """Why no machines were found, as far as it is known, and what would help."""
        self._code = ShardUnavailable.code
        """Of that, as clients are told."""
        self._broke: PipelineFault | None = None
        """What the search is for: how the last route broke."""
        self.is_alone = False
        """The route found last is this machine's own."""
        self._pauses, self._back_at = Backoff(self._limits.alone_s, ALONE_MOST_S), -inf
        """For how long others were not looked for when this machine last went on alone, and when it no longer did."""
        self._again_at = 0.0

    @property
    def seconds(self) -> float:
        """Since there was a route."""
        return self._clock.monotonic() - self._since

    def lost(self, fault: PipelineFault) -> None:
        self._since, self._broke, self._answers_wait = self._clock.monotonic(), fault, True
        if fault.code == ShardCorrupt.code:
            self._router.forget_kv()  # of those behind it, too: it was computed from what is wrong
        self._router.quarantine(fault)
        if self._fallback is not None:
            self._fallback.lost()

    def others_are_back(self, fits: Callable[[Route], bool]) -> Route | None:
        """A route over others, where they can take over from this machine, which goes on alone. Takes no time.

        Args:
            fits: whether what goes on may go on over a route.
        """
        now = self._clock.monotonic()
        if not self.is_alone or now < self._again_at or (self._fallback is not None and self._fallback.is_due):
            return None
        try:
            route = self._router.find(0.0)
        except PipelineError:
            self._again_at = now + LOOK_AGAIN_S
            return None
        if isinstance(route, Opening):
            return None
        self._forget_opening()
        if (fault := route.fault()) is not None:  # it broke while nothing was asked of it
            route.close()
            self._router.forget_kv()
            self._router.quarantine(fault)
            self._again_at = now + LOOK_AGAIN_S
            return None
        if not fits(route):
            route.close()
            self._router.forget_kv()
            self._again_at = now + ALONE_MOST_S
            logger.info(
                "others could run layers %s again, but with other numerics, or less memory for answers than is needed now", self._layers
            )
            return None
        self._back_at, self.is_alone = now, False
        return route

    def look_for_route(self) -> Route | None:
        """A route, or None where it is worth looking again. Takes a moment.

        Raises:
            ExecutorUnavailable: it is not.
        """
        self.is_alone = False
        now, fallback = self._clock.monotonic(), self._fallback
        begins = self._until is None
        if self._until is None:
            self._until, self._not_here = now + self._limits.search_s, None
            self._load_here_at = now + self._limits.open_s
        if fallback is not None and fallback.is_due:
            self.reason = "they were lost too often"
            return self._alone(fallback, self._limits.look_s)
        self.reason, self._hint, self._code, any_left = "none answered in time", "", ShardUnavailable.code, True
        try:
            found = self._router.find(self._limits.look_s)
        except PipelineError as error:
            self.reason, self._hint, any_left = error.message, error.hint, False
            self._code = error.code if isinstance(error, TOLD) else ShardUnavailable.code
            self.opening = self._prepares_until = None
        else:
            if not isinstance(found, Opening):
                self._until, self._found_none, self._broke = None, False, None
                self._forget_opening()
                if fallback is not None:
                    fallback.close()
                return found
            self._heed(found)
        if fallback is not None and self._loads_here(fallback, any_left) and (route := self._alone(fallback, 0.0)) is not None:
            return route
        if self._clock.monotonic() < (self._prepares_until or self._until) and (any_left or not self._found_none):
            if begins and not any_left:
                logger.warning("looking for machines for layers %s for %g s: %s", self._layers, self._limits.search_s, self._said)
            return None
        if fallback is None and not self._found_none:
            logger.warning("no machines are left for layers %s: %s", self._layers, self._said)
        if fallback is not None and self._not_here is None:
            route = self._alone(fallback, self._limits.look_s)
            if route is not None or self._not_here is None:
                return route
        self._until, self._found_none = None, True
        raise self._unavailable(
            self.reason if self._not_here is None else f"{self.reason}; and not here: {self._not_here}"
        ) from self._not_here

    def lacks(self) -> str | None:
        """Why no request could be served now; None: one may. Any thread may look."""
        lacks = None if self._fallback is not None else self._router.lacks()
        return lacks and f"No machines are left for layers {self._layers}: {lacks}"

    def forget_kv(self) -> None:
        self._router.forget_kv()

    def close(self) -> None:
        """Idempotent; does not wait."""
        if self._fallback is not None:
            self._fallback.close()
        self._router.close()

    def _heed(self, opening: Opening) -> None:
        """Go on for as long as there is progress."""
        self.opening, now = opening, self._clock.monotonic()
        if opening.nodes:
            self.reason = f"{' and '.join(opening.nodes)} loaded nothing more ({opening.percent} % done)"
            self._code = PipelineStalled.code
        if opening.advanced > self._advanced:
            self._advanced = opening.advanced
            self._until = now + self._limits.search_s
        if not opening.counts_no_bytes:
            self._prepares_until = None
        elif self._prepares_until is None:
            self._prepares_until = now + self._limits.prepare_s

    @property
    def _said(self) -> str:
        """Why none were found, for the log."""
        return f"{self.reason}. {self._hint}" if self._hint else self.reason

    def _forget_opening(self) -> None:
        self.opening, self._advanced, self._prepares_until = None, 0, None

    def _loads_here(self, fallback: Fallback, any_left: bool) -> bool:
        """Return whether this machine is to load the layers now.

        Args:
            any_left: other machines may still open a route.
        """
        if self._not_here is not None or not self._answers_wait:
            return False
        return fallback.has_begun or not any_left or self._clock.monotonic() >= self._load_here_at

    def _alone(self, fallback: Fallback, wait_s: float) -> Route | None:
        """Return the route that stays here, once it is loaded; note in `_not_here` if it can't be."""
        try:
            route = fallback.wait(wait_s)
        except PacelineError as error:
            self._not_here = error
            logger.warning("layers %s can't run here: %s", self._layers, error)
            return None
        if route is not None:
            if self.opening is not None and self.opening.nodes:
                self.reason = f"{' and '.join(self.opening.nodes)} still loaded them ({self.opening.percent} % done)"
            logger.warning("no machines are left for layers %s (%s): they run here until others are back", self._layers, self.reason)
            self._until, self._found_none, self._broke, self.is_alone = None, False, None, True
            self._router.forget_kv()
            now = self._clock.monotonic()
            if now - self._back_at >= ALONE_MOST_S:
                self._pauses.reset()
            self._again_at = now + self._pauses.fail(now)
        return route

    def _unavailable(self, reason: str) -> ExecutorUnavailable:
        """What requests end with: that no machines are there, unless it is known why those that are there are of no use."""
        code, broke, self._broke = self._code, self._broke, None
        if code == ShardUnavailable.code and broke is not None and broke.code == PipelineStalled.code:
            code, reason = broke.code, f"{broke.message}; and in its place: {reason}"
        return ExecutorUnavailable(
            f"No machines are left for layers {self._layers}: {reason}", self._hint or "Start one that has them.", code=code
        )
