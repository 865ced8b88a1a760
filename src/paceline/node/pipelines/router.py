"""Finds routes through the fleet: asks the view who could, opens sessions with them, and takes others where they refuse.

Law: an attempt that fails leaves no session behind. Whoever broke a route is left out for a while that depends on how; who starts anew is not
the one who broke it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Protocol

import grpc.aio

from paceline.core.clock import Clock
from paceline.core.errors import FleetError, PipelineError, ShardUnavailable, WeightsMismatch
from paceline.core.ids import NodeId
from paceline.core.trust import Trust
from paceline.fleet.card import NodeCard
from paceline.node.pipelines.choosing import Part, Wanted, choose
from paceline.node.pipelines.fleet_route import FleetRoute
from paceline.node.shards.ends import TensorEnds
from paceline.parallel.route import Fault, RouteStage
from paceline.parallel.sessions import NextStage, StageLoading, StageRequest
from paceline.transport.shard_client import RemoteStage, open_stage, tensor_addresses

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
QUARANTINE_S = {"shard_corrupt": 600.0, "pipeline_stalled": 30.0}
"""How long a node that broke a route is left out, unless it starts anew."""
GONE_S = 3.0
"""The same for one that just went away: it may be back."""
MOST_REFUSALS = 16


class SeesFleet(Protocol):
    """What a router needs of its node."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def addresses(self) -> tuple[str, ...]: ...
    def cards(self) -> Sequence[NodeCard]: ...
    def trust(self) -> dict[NodeId, Trust]: ...
    def channel(self, node_id: NodeId) -> grpc.aio.Channel: ...
    def order(self, addresses: Sequence[str]) -> tuple[str, ...]: ...
    def wait_for_news(self, seconds: float) -> None: ...


class FleetRouter:
    """A `parallel.route.Router`. `find` and `quarantine` are for the engine's thread.

    Args:
        fleet: this node.
        ends: its tensor port.
        wanted: what for.
        request: what every stage is asked for, but for its layers and the session's id.
        width: of a row.
        block_size: of this node's KV.
        loop: the node's.
        clock: all time.
        on_loading: told of weights on their way, and whose.
    """

    def __init__(
        self,
        fleet: SeesFleet,
        ends: TensorEnds,
        wanted: Wanted,
        request: StageRequest,
        width: int,
        block_size: int,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_loading: Callable[[NodeId, StageLoading], None] | None = None,
    ) -> None:
        self._fleet, self._ends, self._wanted, self._request = fleet, ends, wanted, request
        self._width, self._block_size, self._loop = width, block_size, loop
        self._clock, self._on_loading = clock, on_loading
        self.route: FleetRoute | None = None
        """The last that was found."""
        self._attempt: Future[FleetRoute] | None = None
        self._instances: dict[NodeId, bytes] = {}
        """Of the processes that were asked last."""
        self._left_out: dict[NodeId, tuple[bytes, float]] = {}
        self._closed = False

    # -------------------------------------------------------------------------------------------------------- as a Router

    def find(self, wait_s: float) -> FleetRoute | None:
        until = self._clock.monotonic() + wait_s
        if self._closed:
            raise ShardUnavailable("This node is stopping")
        if self._attempt is None:
            self._attempt = asyncio.run_coroutine_threadsafe(self._find(), self._loop)
        try:
            route = self._attempt.result(max(0.0, wait_s))
        except TimeoutError:
            if not self._attempt.done():
                return None
            self._attempt = None
            return None
        except CancelledError as error:
            self._attempt = None
            raise ShardUnavailable("This node is stopping") from error
        except PipelineError:
            self._attempt = None
            # Nobody can now. Somebody may as soon as there is news, and whoever is left out in a while.
            self._fleet.wait_for_news(max(0.0, until - self._clock.monotonic()))
            raise
        self._attempt, self.route = None, route
        return route

    def quarantine(self, fault: Fault) -> None:
        if fault.node_id is None:
            return
        until = self._clock.monotonic() + QUARANTINE_S.get(fault.code, GONE_S)
        self._left_out[fault.node_id] = (self._instances.get(fault.node_id, b""), until)

    def close(self) -> None:
        self._closed = True
        attempt, self._attempt = self._attempt, None
        if attempt is not None and not attempt.cancel() and attempt.done() and attempt.exception() is None:
            attempt.result().close()

    # ------------------------------------------------------------------------------------------------------------- inside

    async def _find(self) -> FleetRoute:
        refusals: dict[NodeId, str] = {}
        while True:
            cards = self._fleet.cards()
            self._instances = {card.node_id: card.instance for card in cards}
            exclude = self._excluded() | refusals.keys()
            try:
                parts = choose(cards, self._fleet.trust(), self._fleet.node_id, self._wanted, frozenset(exclude))
            except PipelineError as error:
                if not refusals:
                    raise
                said = "; ".join(f"{node_id}: {why}" for node_id, why in refusals.items())
                raise ShardUnavailable(f"{error.message} ({said})", error.hint) from error
            opened = await asyncio.gather(*(self._open(part) for part in parts), return_exceptions=True)
            sessions = [each for each in opened if isinstance(each, RemoteStage)]
            try:
                for part, each in zip(parts, opened, strict=True):
                    if isinstance(each, FleetError):
                        refusals[part.node_id] = each.message
                        logger.info("%s does not run layers %d to %d: %s", part.node_id, part.layers.start, part.layers.stop - 1, each)
                    elif isinstance(each, BaseException):
                        raise each
                if len(sessions) == len(parts):
                    return await self._connect(parts, sessions)
            except FleetError as error:
                culprit = next((session for session in sessions if session.lost.done()), sessions[0])
                refusals[culprit.node_id] = error.message
                await _close(sessions)
            except BaseException:
                await _close(sessions)
                raise
            else:
                await _close(sessions)

    async def _open(self, part: Part) -> RemoteStage:
        request = self._request_for(part)
        on_loading = self._on_loading

        def loading(news: StageLoading) -> None:
            if on_loading is not None:
                on_loading(part.node_id, news)

        return await open_stage(self._fleet.channel(part.node_id), part.node_id, request, loading)

    async def _connect(self, parts: Sequence[Part], sessions: Sequence[RemoteStage]) -> FleetRoute:
        """Tell each whom it sends to, and open this node's ends.

        Raises:
            FleetError: somebody can't.
        """
        dtype = self._request.dtype
        ticket = os.urandom(32)
        back = NextStage(self._fleet.node_id, tensor_addresses(self._fleet.addresses, self._ends.port), ticket)
        ways = [self._way(session) for session in sessions]
        expected = self._ends.expect(ticket, dtype, self._width)
        until = time.perf_counter() + CONNECT_S
        try:
            await asyncio.gather(*(session.connect(to) for session, to in zip(sessions, [*ways[1:], back], strict=True)))
            sink = await asyncio.to_thread(self._ends.way(ways[0], dtype), until)
        except BaseException:
            expected.close()
            raise
        try:
            incoming = await asyncio.to_thread(expected.accept, until)
        except BaseException:
            sink.close()
            raise
        stages = [
            RouteStage(
                part.node_id, part.layers, f"{self._wanted.model_id}:{part.layers.start}-{part.layers.stop - 1}", session.opened.numerics_id
            )
            for part, session in zip(parts, sessions, strict=True)
        ]
        return FleetRoute(self._fleet.node_id, stages, sessions, sink, incoming, self._loop)

    def _way(self, session: RemoteStage) -> NextStage:
        """Where a stage takes activations.

        Raises:
            WeightsMismatch: its blocks are others than this node's.
        """
        opened = session.opened
        if opened.block_size != self._block_size:
            raise WeightsMismatch(
                f"{session.node_id} keeps KV in blocks of {opened.block_size} tokens, and this node of {self._block_size}"
            )
        card = next((card for card in self._fleet.cards() if card.node_id == session.node_id), None)
        addresses = () if card is None else self._fleet.order(card.addresses)
        return NextStage(session.node_id, tensor_addresses(addresses, opened.tensor_port), opened.ticket)

    def _request_for(self, part: Part) -> StageRequest:
        return replace(self._request, session_id=os.urandom(16), layers=part.layers)

    def _excluded(self) -> set[NodeId]:
        now = self._clock.monotonic()
        self._left_out = {
            node_id: (instance, until)
            for node_id, (instance, until) in self._left_out.items()
            if until > now and self._instances.get(node_id, instance) == instance
        }
        return set(self._left_out)


async def _close(sessions: Sequence[RemoteStage]) -> None:
    await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
