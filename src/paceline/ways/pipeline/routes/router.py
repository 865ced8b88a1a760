"""Finds routes through the fleet: asks the view who could, opens sessions with them, and takes others where they refuse.

Law: an attempt that fails leaves no session behind. A node that broke a route is left out for a while that depends on how; who starts anew is not
the one who broke it. One that only stalled is asked again sooner where there is no other: it may have slept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, replace

from paceline.core.clock import Clock
from paceline.core.errors import FleetError, PipelineError, PipelineStalled, ShardCorrupt, ShardUnavailable
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, LayerSpan
from paceline.fleet.card import NodeCard
from paceline.ways.pipeline.executor.route import Opening
from paceline.ways.pipeline.executor.search import TOLD
from paceline.ways.pipeline.executor.sessions import KV_NAME_BYTES, PipelineFault
from paceline.ways.pipeline.routes.ahead import SpareKeeper, still_there
from paceline.ways.pipeline.routes.choosing import Wanted, choose
from paceline.ways.pipeline.routes.meter import PipelineMeter
from paceline.ways.pipeline.routes.opening import FleetRoute, NotOpened, RouteOpener, SeesFleet, StageLoads

logger = logging.getLogger(__name__)

QUARANTINE_S = {ShardCorrupt.code: 600.0, PipelineStalled.code: 30.0}
"""How long a node that broke a route is left out, unless it starts anew."""
GONE_S = 3.0
"""The same for one that just went away: it may be back."""
LAST_RESORT_S = 4.0
"""The same for one that stalled, where no other node has the layers. Raising it: answers wait longer for a machine that was asleep for a moment."""


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """A node that broke a route."""

    instance: bytes
    """Of the process that did."""
    until: float
    in_need_until: float
    """The same where there is no other node."""


class FleetRouter:
    """A `ways.pipeline.executor.route.Router`. `find` is for the engine's thread, `quarantine` for any.

    Args:
        spares: asked to load what a route's machines have; None: none are.
        ahead: the route to try first: its machines have begun to load.
    """

    def __init__(
        self,
        fleet: SeesFleet,
        opener: RouteOpener,
        wanted: Wanted,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        meter: PipelineMeter,
        spares: SpareKeeper | None = None,
        ahead: Sequence[LayerSpan] = (),
    ) -> None:
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
        self._left_out: dict[NodeId, _LeftOut] = {}
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
            self._fleet.wait_for_news(max(0.0, until - self._clock.monotonic()))
            raise
        if self._kv_asked is not self._kv:
            route.close()
            return self._loads.opening
        self.route = route
        self._kv = self._kv_opened
        self._loads.end()
        self._last = tuple(LayerSpan(stage.node_id, stage.layers) for stage in route.stages)
        if self._spares is not None:
            self._spares.keep(self._last, self.excluded)
        return route

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
            known = self._left_out.get(fault.node_id)
            self._left_out[fault.node_id] = _LeftOut(instance, now + span_s, now + in_need_s)
        found_before = known is not None and known.instance == instance and known.until > now
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
                said = "; ".join(f"{node_id}: {refusal.message}" for node_id, refusal in refusals.items())
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
        """Who is left out now. On the event loop.

        Args:
            in_need: there is no other node.
        """
        now, instances = self._clock.monotonic(), {card.node_id: card.instance for card in self._fleet.cards()}
        with self._lock:
            self._left_out = {
                node_id: out
                for node_id, out in self._left_out.items()
                if out.until > now and instances.get(node_id, out.instance) == out.instance
            }
            return frozenset(node_id for node_id, out in self._left_out.items() if not in_need or out.in_need_until > now)

    def _choose(self, cards: Sequence[NodeCard], exclude: frozenset[NodeId]) -> list[LayerSpan]:
        ahead, self._ahead = self._ahead, ()
        if ahead and still_there(ahead, cards, self._wanted, exclude):
            return list(ahead)
        wanted = replace(self._wanted, kv_tokens=self._opener.least_blocks * BLOCK_TOKENS)
        return choose(cards, self._fleet.trust(), self._fleet.node_id, wanted, exclude, self._last)
