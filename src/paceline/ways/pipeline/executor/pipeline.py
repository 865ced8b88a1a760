"""The executor whose layers are spread over machines: this one embeds, runs its own first layers, and turns what comes back into logits.

Laws:
- Batches go through the stages in order, several at a time; each is complete in itself, so a stage that falls away is replaced by telling the
  engine (`ExecutorLost`), which says what live sequences held: those who lost KV compute it anew, those before them what makes their inputs, those behind
  nothing.
- Nothing that a stage sends is believed unseen: number of rows, width, finite and bounded values.
- Every wait is bounded by `PipelineLimits`; a search for machines that finds none ends with `ExecutorUnavailable`, and a later request starts
  another; or, where there is a fallback, with all layers here, until others are back.

Shapes: T rows of a batch, R rows with logits, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import numpy as np

from paceline.core.clock import Clock
from paceline.core.errors import (
    ExecutorLost,
    ExecutorUnavailable,
    PipelineError,
    ShardCorrupt,
    ShardUnavailable,
    StreamClosed,
    StreamCorrupt,
    StreamStalled,
    TensorStreamError,
    TensorTooLarge,
)
from paceline.core.following import is_same_arithmetic
from paceline.core.generation import Notice
from paceline.core.ids import BatchId, BlockId, NodeId, SequenceId
from paceline.core.model import LayerSpan
from paceline.engine.executor import HeldSequence, StepBatch, StepOutput
from paceline.engine.local import Int32, LayerRunner, WireBits, logits_rows, token_ids
from paceline.ways.pipeline.executor.events import Inspector, PipelineWatch, RouteEvents
from paceline.ways.pipeline.executor.restoring import Journal, Lacks, Restoring
from paceline.ways.pipeline.executor.route import Opening, PipelineFault, Route, Router, RouteStage
from paceline.ways.pipeline.executor.search import BatchTimeouts, Fallback, PipelineLimits, Search
from paceline.ways.pipeline.executor.stage import Stage, StageBatch, check_activations, without_tokens

WORD_S = 0.5
"""How long to wait for word of why a stream closed. Raising it holds up a failover where no word comes."""


@dataclass(slots=True)
class PipelineTimes:
    """What an orchestrator's machine did with its time, in seconds since it began."""

    batches: int = 0
    own_s: float = 0.0
    """Embedding, its own layers, logits."""
    waiting_s: float = 0.0
    """For what comes back."""
    away_s: float = 0.0
    """Batches were on their way through the stages, each counted: computed, carried, waiting their turn."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    batch: StageBatch
    rows_R: Int32
    sent_at: float


class PipelineExecutor:
    """An `Executor` over a route.

    Args:
        head: embedding, final norm, head, and the layers this machine runs itself: those from 0 on, maybe none.
        router: finds routes through the layers that `head` lacks.
        inspector: is shown what goes out and comes back.
        fallback: this machine alone, where no others are left; None: requests end with an error.
        exact: stages that compute other bytes than the head take over from no others.
        promises: rows cross between stages as they are, so that equal kernels give the bytes of one machine.
        on_opening: told how far the machines of the first route are with their layers, some times a second; what it raises ends this.

    Raises:
        ExecutorUnavailable: there is no route, for as long as the limits allow looking for one, and machines load nothing more.
    """

    def __init__(
        self,
        head: LayerRunner[Any],
        n_layers: int,
        router: Router,
        limits: PipelineLimits,
        clock: Clock,
        inspector: Inspector | None = None,
        fallback: Fallback | None = None,
        watch: PipelineWatch | None = None,
        on_opening: Callable[[Opening], None] | None = None,
        *,
        exact: bool = True,
        promises: bool = True,
    ) -> None:
        self._head, self._limits, self._clock = head, limits, clock
        self._inspector = inspector
        remote = f"{head.layers.stop} to {n_layers - 1}"
        self._search = Search(router, fallback, remote, limits, clock)
        self._events = RouteEvents(remote, watch or PipelineWatch(), clock)
        self.block_size, self.one_path = head.block_size, head.one_path
        self._journal: Journal | None = None
        self._lacks = Lacks()
        self._restoring: Restoring | None = None
        self._holds = False
        """Some of what was computed before the route that is in use stands."""
        self.n_blocks, self.holds_identity = head.n_blocks, head.holds_identity
        self._exact, self._promises = exact, promises
        self._mixture: str | None = None
        """Layers and numerics of the stages, if any differ from the head's; empty: none does. None: there was no route yet. KV computed by one mixture is
        void under another.
        """
        self.depth = 1
        self.times = PipelineTimes()
        self._width = head.to_wire(head.embed(np.zeros(1, np.int32))).shape[1]
        self.route: Route | None = None
        """The one in use; None while one is looked for."""
        self._own: Stage | None = None
        self._pending: deque[_InFlight] = deque()
        self._received = 0
        self._timeouts = BatchTimeouts(limits.row_s)
        while not self.ready():
            if on_opening is not None and self._search.opening is not None:
                on_opening(self._search.opening)

    @property
    def pipeline_id(self) -> str:
        return self._events.pipeline_id

    @property
    def numerics_id(self) -> str:
        """See `Executor.numerics_id`: the head's, if all stages have it too."""
        return self._head.numerics_id if self._promises and not self._mixture else ""

    @property
    def failovers(self) -> int:
        return self._events.failovers

    @property
    def is_alone(self) -> bool:
        """Whether this machine runs all layers, for want of others. Any thread may look."""
        return self._search.is_alone

    @property
    def stages(self) -> Sequence[RouteStage]:
        """Of the route in use; none while one is looked for."""
        return () if self.route is None else self.route.stages

    @property
    def lacks(self) -> str | None:
        """Machines for the layers of a route that broke, while none are in view: requests alone begin a search. Any thread may look."""
        route = self.route
        return None if route is not None and route.fault() is None else self._search.lacks()

    def forget_inputs(self, blocks: Iterable[BlockId]) -> None:
        """These blocks are filled otherwise than by batches."""
        if self._journal is not None:
            self._journal.forget(blocks)

    # ------------------------------------------------------------------------------------------------------------- as an Executor

    def ready(self) -> bool:
        if self.route is not None:
            return True
        try:
            route = self._search.look_for_route()
        except ExecutorUnavailable as error:
            self._events.aborted(error)
            raise
        if route is None:
            if self._search.opening is not None:
                self._events.opening(self._search.opening)
            return False
        if self._search.is_alone:
            self._events.fell_back(self._search.reason)
        else:
            self._events.found(route, self._search.seconds)
        self._take(route)
        return True

    def recall(self, batch_id: BatchId) -> None:
        """Nothing: what is on its way through others comes back."""

    @property
    def advanced(self) -> int:
        return self.times.batches

    def reset(self) -> None:
        # Others hold tables of sequences that are gone: a new route begins with none.
        self._pending.clear()
        self._search.forget_kv()
        self._lacks, self._restoring, self._own = Lacks(), None, None
        route, self.route = self.route, None
        if route is not None:
            route.close()

    def notices(self) -> Sequence[Notice]:
        return self._events.take()

    def submit(self, batch: StepBatch) -> None:
        if self._search.is_alone and (others := self._search.others_are_back(partial(self._fits, batch))) is not None:
            raise self._given_back(others)
        self._lacks.clear()  # the engine goes on
        self._send(batch, without_tokens(batch), None)

    def restore(self, held: Sequence[HeldSequence]) -> Collection[SequenceId] | None:
        self._in_use()
        work = self._restoring
        if work is None:
            if not self._holds or not held:
                return ()
            spans = [stage.layers for stage in self.stages]
            work = self._restoring = Restoring(
                held, self._head.layers, spans, self._lacks, self.block_size, self._limits.max_rows, self._journal
            )
        while len(self._pending) < self.depth and (step := work.next()) is not None:
            self._send(step.batch, without_tokens(step.batch, work.fills_to), step.bits_TD)
        if self._pending:
            work.came(self._receive(inf)[0].batch)
            return None
        self._restoring = None
        self._lacks.clear()
        return work.sequences

    def _send(self, batch: StepBatch, stage_batch: StageBatch, bits_TD: WireBits | None) -> None:
        """Have a batch go through the stages.

        Args:
            bits_TD: what goes to the first; None: it is to be computed.
        """
        route, times, clock = self._in_use(), self.times, self._clock
        began = clock.monotonic()
        rows_R = logits_rows(batch)
        try:
            route.sink.prepare(stage_batch, self._width)
        except TensorStreamError as error:
            raise self._lost(error) from error
        if bits_TD is None:
            x_TD = self._head.embed(token_ids(batch))
            if self._own is not None:
                x_TD = self._own.run_activations(stage_batch, x_TD)
            bits_TD = self._head.to_wire(x_TD)
            if self._journal is not None and not stage_batch.fills_to:  # what is restored from it must stay
                self._journal.note(batch, bits_TD)
        if self._inspector is not None and not stage_batch.fills_to:
            self._inspector.sent(route, stage_batch, bits_TD)
        now = clock.monotonic()
        times.own_s += now - began
        try:
            # The stage that takes it has those before it to compute, and then maybe this one: it need not be read in one go.
            route.sink.send(stage_batch, bits_TD, now + self._allowed_s(stage_batch))
        except TensorStreamError as error:
            raise self._lost(error) from error
        self._timeouts.carried(bits_TD.nbytes, clock.monotonic() - now)
        self._pending.append(_InFlight(stage_batch, rows_R, now))

    def collect(self, deadline: float) -> StepOutput:
        oldest, bits_TD = self._receive(deadline)
        if self._inspector is not None:
            self._inspector.came(oldest.batch, bits_TD)
        now, times = self._clock.monotonic(), self.times
        self._timeouts.took(oldest.batch.n_rows, now - oldest.sent_at)
        logits_RV = self._head.logits(self._head.from_wire(bits_TD), oldest.rows_R)
        times.away_s += now - oldest.sent_at
        if self.route is not None and not self._search.is_alone:
            self._events.stepped(self.route, now - oldest.sent_at)
        times.own_s += self._clock.monotonic() - now
        return StepOutput(BatchId(oldest.batch.batch_id), logits_RV)

    def _receive(self, deadline: float) -> tuple[_InFlight, WireBits]:
        """The oldest batch that is on its way, and what came of it."""
        route, oldest = self._in_use(), self._pending[0]
        began = self._clock.monotonic()
        bound = min(deadline, began + self._allowed_s())
        try:
            answered, bits_TD = route.source.receive(bound)
            self._check(oldest.batch, answered, bits_TD)
        except (TensorStreamError, ShardCorrupt) as error:
            raise self._lost(error) from error
        self._pending.popleft()
        self._received += 1
        self.times.batches += 1
        self.times.waiting_s += self._clock.monotonic() - began
        return oldest, bits_TD

    def close(self) -> None:
        if self.route is not None:
            self.route.close()
            self.route = None
        self._pending.clear()
        if self._inspector is not None:
            self._inspector.close()
        self._search.close()
        self._head.close()

    # -------------------------------------------------------------------------------------------------------------------- inside

    def _fits(self, batch: StepBatch, route: Route) -> bool:
        """Whether live sequences, and their bytes, can go on over a route, without need."""
        same = all(
            (not self._exact or self._is_like(stage)) and stage.holds_identity >= self._head.holds_identity for stage in route.stages
        )
        kv_tokens = min(stage.kv_tokens for stage in route.stages) // route.block_size * route.block_size
        return same and kv_tokens >= batch.most_blocks * self.block_size

    def _given_back(self, others: Route) -> ExecutorLost:
        """Let go of the layers that this machine took over, as others have them again."""
        assert self.route is not None, "it runs them"
        self._events.restored()
        self.route.close()
        void = _spans(self.route, None)
        self._take(others)
        return ExecutorLost("other machines run these layers again", void)

    def _is_like(self, stage: RouteStage) -> bool:
        """Return whether a stage's kernels compute the head's bytes."""
        return is_same_arithmetic(self._head.numerics_id, stage.numerics_id)

    def _mix(self, route: Route) -> bool:
        """Note what numerics a route has. Returns whether they changed, so that no KV of before stands."""
        is_mixed = not all(map(self._is_like, route.stages))
        mixture = " ".join(f"{stage.layers} {stage.numerics_id}" for stage in route.stages) if is_mixed else ""
        before, last, self._mixture = self.numerics_id, self._mixture, mixture
        if last in {None, mixture}:
            return False
        self._events.numerics_changed(route, before, self.numerics_id)
        return True

    def _take(self, route: Route) -> None:
        changed = self._mix(route)
        self.route = route
        head, own, limits = self._head, self._head.layers, self._limits
        n_blocks = min(*(stage.kv_tokens for stage in route.stages), head.n_blocks * head.block_size) // route.block_size
        holds_identity = head.holds_identity and all(stage.holds_identity for stage in route.stages)
        resumed = [stage.resumed for stage in route.stages]
        self._holds = (
            not changed
            and (self._own is not None or True in resumed)
            and None not in resumed
            and (self.block_size, self.holds_identity) == (route.block_size, holds_identity)
            and self.n_blocks <= n_blocks
        )
        self._lacks.begin(stage.layers for stage in route.stages if not stage.resumed)
        if not self._holds:
            self.block_size, self.n_blocks, self.holds_identity = route.block_size, n_blocks, holds_identity
            self._own = self._journal = None
        if len(own) and self._own is None:
            self._journal = Journal(limits.journal_bytes, self.block_size, self._width)
            self._own = Stage(
                head,
                own,
                base_block=0,
                n_blocks=self.n_blocks * self.block_size // head.block_size,
                max_rows=limits.max_rows,
                max_context=limits.max_context,
                width=self._width,
            )
            self._own.take_blocks_of(self.block_size)
        # Alone, there is no machine to work meanwhile.
        self.depth = 1 if self._search.is_alone else len(route.stages) + bool(own)
        self._received = 0

    def _allowed_s(self, *more: StageBatch) -> float:
        """How long nothing may come, or be taken: what is on its way has to be computed and carried first, and `more` batches with it."""
        hops = len(self.stages) + 1
        batches = (*(waiting.batch for waiting in self._pending), *more)
        return self._limits.stall_s + sum(self._timeouts.of(batch.n_rows, hops * 2 * self._width * batch.n_rows) for batch in batches)

    def _in_use(self) -> Route:
        """The route, unless something was heard of it that ends it.

        Raises:
            ExecutorLost: it broke.
        """
        route = self.route
        if route is None:
            raise ExecutorLost("the pipeline has no route", ())
        fault = route.fault()
        if fault is not None:
            raise self._lost(None)
        return route

    def _check(self, sent: StageBatch, answered: StageBatch, bits_TD: Any) -> None:
        if answered.batch_id != sent.batch_id:
            raise ShardCorrupt(f"Batch {answered.batch_id} came back where {sent.batch_id} was due")
        check_activations(bits_TD, 0 if sent.fills_to else sent.n_rows, self._width)

    def _lost(self, error: PipelineError | TensorStreamError | None) -> ExecutorLost:
        """Close the route, leave out who broke it, and say which layers are gone."""
        route = self.route
        assert route is not None, "only a route in use is lost"
        # A stream that closed says little; whose fault it was is heard from the stages themselves a moment later.
        fault = route.fault(WORD_S if isinstance(error, StreamClosed) else 0.0)
        if fault is None and isinstance(error, ShardCorrupt | StreamCorrupt | TensorTooLarge):
            fault = PipelineFault(route.stages[-1].node_id, ShardCorrupt.code, str(error))
        if fault is None:
            fault = route.suspect(self._received)
            if not isinstance(error, StreamStalled) and error is not None:
                fault = PipelineFault(fault.node_id, ShardUnavailable.code, str(error))
        self._events.lost(fault)
        self.route = self._restoring = None
        self._pending.clear()
        route.close()
        self._search.lost(fault)
        return ExecutorLost(fault.message, _spans(route, fault.node_id))


def _spans(route: Route, node_id: NodeId | None) -> tuple[LayerSpan, ...]:
    """The spans whose KV is void once a node of a route is lost; None: any of them, so all."""
    return tuple(LayerSpan(stage.node_id, stage.layers) for stage in route.stages if node_id in {None, stage.node_id})
