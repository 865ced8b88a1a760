"""Finds routes through the fleet: asks the view which nodes could take part, opens sessions with them, and takes others where they refuse. Has the nodes
of a pipeline load their layers ahead, and spare nodes the spans of a pipeline before they are needed, so that a loss costs no load.

Laws:
- An attempt that fails leaves no session behind.
- A node that broke a route is left out for a while that depends on how; a node that starts anew is not the one that broke it. One that only stalled is
  asked again sooner where there is no other: it may have slept.
- Loads ahead and spares lease nothing, and their host decides whether it has the memory. While a route is looked for, spares are left alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import replace

from paceline.core.background import in_background_of, tell_loop
from paceline.core.backoff import LeftOut
from paceline.core.clock import Clock
from paceline.core.errors import FleetError, PipelineError, PipelineStalled, PlacementError, ShardCorrupt, ShardUnavailable
from paceline.core.following import is_same_arithmetic
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, LayerRange, LayerSpan, ModelRef
from paceline.fleet.card import NodeCard
from paceline.ways.pipeline.client import warm_layers
from paceline.ways.pipeline.cover import spares_for
from paceline.ways.pipeline.executor.route import KV_NAME_BYTES, Opening, PipelineFault, StageLoading, StageRequest
from paceline.ways.pipeline.executor.search import TOLD
from paceline.ways.pipeline.meter import PipelineMeter
from paceline.ways.pipeline.routes.fleet_access import FleetAccess, Wanted, choose
from paceline.ways.pipeline.routes.opening import FleetRoute, NotOpened, RouteOpener, StageLoads, refusals_said

logger = logging.getLogger(__name__)


def begin_loads(
    fleet: FleetAccess, request: StageRequest, wanted: Wanted, loop: asyncio.AbstractEventLoop, planned: tuple[LayerSpan, ...] = ()
) -> tuple[LayerSpan, ...]:
    """Ask the machines that will run a pipeline, as things are now, to load their layers. For any thread.

    Args:
        request: what every stage is asked for, but for its layers.
        planned: which these are; none: it is planned now.

    Returns:
        What they were asked for; nothing where no machine can take part now.
    """
    try:
        parts = planned or tuple(choose(fleet.cards(), fleet.trust(), wanted, frozenset()))
    except PipelineError as error:
        logger.info("no machine loads ahead: %s", error.message)
        return ()

    async def ask(part: LayerSpan) -> None:
        try:
            await ask_to_load(fleet, request, part.node_id, part.layers)
        except FleetError as error:
            logger.info("%s does not load ahead: %s", part.node_id, error.message)

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, parts))

    in_background_of(loop, ask_all(), f"loads of {request.model_id} ahead")
    return parts


async def ask_to_load(fleet: FleetAccess, request: StageRequest, node_id: NodeId, layers: LayerRange) -> StageLoading | None:
    """Ask a machine to load layers that it may be asked to run. On the event loop.

    Args:
        request: what every stage is asked for, but for its layers.

    Returns:
        How far it is; None: it has them.

    Raises:
        FleetError: it does not, or can't be asked.
    """
    return await warm_layers(fleet.channel(node_id), node_id, replace(request, layers=layers))


def still_there(parts: Iterable[LayerSpan], cards: Sequence[NodeCard], wanted: Wanted, exclude: Collection[NodeId]) -> bool:
    """Whether all machines that load ahead may run a pipeline, now that it is known what kernels compute here."""
    by_id = {card.node_id: card for card in cards}
    return all(part.node_id in by_id and part.node_id not in exclude and _same_bytes(by_id[part.node_id], wanted) for part in parts)


def _same_bytes(card: NodeCard, wanted: Wanted) -> bool:
    request = wanted.request
    if not request.numerics_id:
        return True
    own = {offer.numerics_id for offer in card.models if offer.model == ModelRef(request.model, request.weights)}
    return own <= {"", request.numerics_id}


ASK_S = 10.0
"""Between two asks of a spare, which keep its layers from being idle. Raising it: a machine that joins becomes a spare later."""


class SpareKeeper:
    """Of one pipeline.

    Args:
        request: what every stage is asked for, but for its layers.
    """

    def __init__(self, fleet: FleetAccess, request: StageRequest, wanted: Wanted, loop: asyncio.AbstractEventLoop) -> None:
        self._fleet, self._request, self._wanted, self._loop = fleet, request, wanted, loop
        self._keeping: asyncio.Task[None] | None = None
        """The event loop's alone."""
        self._said: dict[NodeId, str] = {}

    def keep(self, parts: Sequence[LayerSpan], excluded: Callable[[], frozenset[NodeId]]) -> None:
        """There is a route over these machines. For any thread.

        Args:
            excluded: machines that may be no spares now; called on the event loop.
        """
        tell_loop(self._loop, self._begin, tuple(parts), excluded)

    def stop(self) -> None:
        """There is none. For any thread; idempotent."""
        tell_loop(self._loop, self._end)

    async def load_spares(self, parts: Sequence[LayerSpan], exclude: frozenset[NodeId] = frozenset()) -> dict[NodeId, bool]:
        """Ask the spares for a route over these machines to have its spans loaded. On the event loop.

        Returns:
            Whether each has.
        """
        taken = frozenset(part.node_id for part in parts)
        request = replace(self._wanted.request, pins=(), exclude=exclude)
        try:
            spares = spares_for(self._fleet.cards(), request, [part.layers for part in parts], taken, self._fleet.trust())
        except PlacementError as error:
            logger.debug("no spares: %s", error)
            return {}
        have: dict[NodeId, bool] = {}
        for spare in spares:
            try:
                loading = await ask_to_load(self._fleet, self._request, spare.node_id, spare.layers)
            except FleetError as error:
                self._say(spare.node_id, f"is no spare for layers {spare.layers.words}: {error.message}")
                continue
            have[spare.node_id] = loading is None
            self._say(spare.node_id, f"{'has' if loading is None else 'loads'} layers {spare.layers.words} as a spare")
        return have

    def _say(self, node_id: NodeId, words: str) -> None:
        if self._said.get(node_id) != words:
            self._said[node_id] = words
            logger.info("%s %s", node_id, words)

    def _begin(self, parts: Sequence[LayerSpan], excluded: Callable[[], frozenset[NodeId]]) -> None:
        self._end()
        self._keeping = self._fleet.background.keep(lambda: self._keep(parts, excluded), f"spares of {self._request.model_id}")

    def _end(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    async def _keep(self, parts: Sequence[LayerSpan], excluded: Callable[[], frozenset[NodeId]]) -> None:
        while True:
            await self.load_spares(parts, excluded())
            await asyncio.sleep(ASK_S)


QUARANTINE_S = {ShardCorrupt.code: 600.0, PipelineStalled.code: 30.0}
"""How long a node that broke a route is left out, unless it starts anew."""
GONE_S = 3.0
"""The same for one that just went away: it may be back."""
LAST_RESORT_S = 4.0
"""The same for one that stalled, where no other node has the layers. Raising it: answers wait longer for a machine that was asleep for a moment."""


class FleetRouter:
    """A `ways.pipeline.executor.route.Router`. `find` is for the engine's thread, `quarantine` for any.

    Args:
        spares: asked to load what a route's machines have; None: none are.
        ahead: the route to try first: its machines have begun to load.
        numerics_id: numerics id of this machine. If all stages of the last route had it, machines that have it too replace a lost one first: other numerics
            would change the words of answers under way.
    """

    def __init__(
        self,
        fleet: FleetAccess,
        opener: RouteOpener,
        wanted: Wanted,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        meter: PipelineMeter,
        spares: SpareKeeper | None = None,
        ahead: Sequence[LayerSpan] = (),
        numerics_id: str = "",
    ) -> None:
        self._numerics_id, self._was_like = numerics_id, False
        self._fleet, self._opener, self._wanted, self._loop, self._clock, self._meter = fleet, opener, wanted, loop, clock, meter
        self.route: FleetRoute | None = None
        """The last that was found."""
        self._attempt: Future[FleetRoute] | None = None
        self._loads = StageLoads(clock)
        self._spares, self._ahead = spares, tuple(ahead)
        self._last: tuple[LayerSpan, ...] = ()
        """Of the last route, while it is not known whether another can be had."""
        self._kv: dict[LayerSpan, bytes] = {}
        """Names of what the stages of the last route keep. Another dictionary takes its place once that is of no use."""
        self._kv_asked = self._kv
        """What there was of it when the attempt began."""
        self._kv_opened = self._kv
        """Of the route that it opened."""
        self._instances: dict[NodeId, bytes] = {}
        """Of the processes that were asked last."""
        self._lock = threading.Lock()
        self._left_out: LeftOut[tuple[NodeId, bytes], float] = LeftOut()
        """Processes that broke a route, and until when they are left out even where no other node has the layers."""
        self._closed = False

    # -------------------------------------------------------------------------------------------------------- as a Router

    def find(self, wait_s: float) -> FleetRoute | Opening:
        until = self._clock.monotonic() + wait_s
        if self._closed:
            raise ShardUnavailable("This node is stopping")
        if self._attempt is None:
            self._kv_asked = self._kv
            self._attempt = asyncio.run_coroutine_threadsafe(self._find(), self._loop)
        # Not by its TimeoutError: a route that is opened just then would be lost, and open for ever.
        if not wait((self._attempt,), max(0.0, wait_s)).done:
            return self._loads.opening
        attempt, self._attempt = self._attempt, None
        try:
            route = attempt.result()
        except CancelledError as error:
            raise ShardUnavailable("This node is stopping") from error
        except PipelineError:
            # No node can now. One may as soon as there is news, and those left out may in a while.
            self._fleet.wait_for_change(max(0.0, until - self._clock.monotonic()))
            raise
        if self._kv_asked is not self._kv:
            route.close()
            return self._loads.opening
        self.route = route
        self._kv = self._kv_opened
        self._loads.end()
        self._last = tuple(LayerSpan(stage.node_id, stage.layers) for stage in route.stages)
        self._was_like = self._numerics_id != "" and all(is_same_arithmetic(self._numerics_id, stage.numerics_id) for stage in route.stages)
        if self._spares is not None:
            self._spares.keep(self._last, self.excluded)
        return route

    def lacks(self) -> str | None:
        try:
            self._plan(self._fleet.cards(), self.excluded(in_need=True))
        except PipelineError as error:
            return str(error)
        return None

    def forget_kv(self) -> None:
        self._kv = {}

    def quarantine(self, fault: PipelineFault) -> None:
        if self._spares is not None:
            self._spares.stop()
        if fault.node_id is None:
            return
        now, span_s = self._clock.monotonic(), QUARANTINE_S.get(fault.code, GONE_S)
        in_need_s = LAST_RESORT_S if fault.code == PipelineStalled.code else span_s
        instance = self._instances.get(fault.node_id, b"")
        with self._lock:
            found_before = (fault.node_id, instance) in self._left_out.now(now)
            self._left_out.add((fault.node_id, instance), now + span_s, now + in_need_s)
        if fault.code == ShardCorrupt.code and not found_before:
            self._meter.corrupt()

    def close(self) -> None:
        self._closed = True
        if self._spares is not None:
            self._spares.stop()
        attempt, self._attempt = self._attempt, None
        if attempt is not None and not attempt.cancel() and attempt.done() and attempt.exception() is None:
            attempt.result().close()

    # ------------------------------------------------------------------------------------------------------------- inside

    async def _find(self) -> FleetRoute:
        refusals: dict[NodeId, FleetError] = {}
        while True:
            cards = self._fleet.cards()
            self._instances = {card.node_id: card.instance for card in cards}
            try:
                try:
                    parts = self._choose(cards, self.excluded() | refusals.keys())
                except PipelineError:
                    parts = self._choose(cards, self.excluded(in_need=True) | refusals.keys())
            except PipelineError as error:
                if not refusals:
                    raise
                said = refusals_said(refusals)
                # Where all refuse for one reason, it is the reason.
                kind = next((kind for kind in TOLD if all(isinstance(refusal, kind) for refusal in refusals.values())), ShardUnavailable)
                raise kind(f"{error.message} ({said})", error.hint) from error
            self._loads.begin(parts)
            try:
                kv = {part: self._kv_asked.get(part) or os.urandom(KV_NAME_BYTES) for part in parts}
                route = await self._opener.open(parts, loads=self._loads, kv=kv)
                self._kv_opened = kv
                return route
            except NotOpened as error:
                for node_id, refusal in error.refusals.items():
                    refusals[node_id] = refusal
                    logger.info("%s does not run its layers: %s", node_id, refusal.message)

    def excluded(self, *, in_need: bool = False) -> frozenset[NodeId]:
        """Who is left out now. Any thread may look.

        Args:
            in_need: there is no other node.
        """
        now, instances = self._clock.monotonic(), {card.node_id: card.instance for card in self._fleet.cards()}
        with self._lock:
            left_out = self._left_out.now(now).items()
        return frozenset(
            node_id
            for (node_id, instance), in_need_until in left_out
            if instances.get(node_id, instance) == instance and (not in_need or in_need_until > now)
        )

    def _choose(self, cards: Sequence[NodeCard], exclude: frozenset[NodeId]) -> list[LayerSpan]:
        ahead, self._ahead = self._ahead, ()
        if ahead and still_there(ahead, cards, self._wanted, exclude):
            return list(ahead)
        return self._plan(cards, exclude)

    def _plan(self, cards: Sequence[NodeCard], exclude: frozenset[NodeId]) -> list[LayerSpan]:
        request, trust = replace(self._wanted.request, kv_tokens=self._opener.least_blocks * BLOCK_TOKENS), self._fleet.trust()
        if self._last and self._was_like:
            like = replace(request, exact=True, numerics_id=self._numerics_id)
            with suppress(PipelineError):
                return choose(cards, trust, replace(self._wanted, request=like), exclude, self._last)
        return choose(cards, trust, replace(self._wanted, request=request), exclude, self._last)
