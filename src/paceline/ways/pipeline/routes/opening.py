"""Opens routes: a session with each machine that is to take part, connected one to the next, from this node and back to it.

Law: a route that can't be opened leaves no session behind, and `NotOpened` says who was in the way.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import grpc.aio

from paceline.core.background import Background
from paceline.core.errors import FleetError, ShardUnavailable, WeightsMismatch
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, WIDEST_BLOCK
from paceline.core.trust import Trust
from paceline.fleet.card import NodeCard
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.ways.pipeline.client import RemoteStage, open_stage, tensor_addresses
from paceline.ways.pipeline.executor.links import ActivationSink
from paceline.ways.pipeline.executor.route import RouteStage
from paceline.ways.pipeline.executor.sessions import SESSION_ID_BYTES, NextStage, StageLoading, StageRequest
from paceline.ways.pipeline.host.ends import TensorEnds, opened_in_thread
from paceline.ways.pipeline.routes.choosing import Part
from paceline.ways.pipeline.routes.fleet_route import FleetRoute
from paceline.ways.pipeline.routes.stage_loads import StageLoads

CONNECT_S = 5.0


class SeesFleet(Protocol):
    """What pipelines need of their node."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def addresses(self) -> tuple[str, ...]: ...
    @property
    def background(self) -> Background: ...
    def cards(self) -> Sequence[NodeCard]: ...
    def trust(self) -> dict[NodeId, Trust]: ...
    def channel(self, node_id: NodeId) -> grpc.aio.Channel: ...
    def order(self, addresses: Sequence[str]) -> tuple[str, ...]: ...
    def wait_for_news(self, seconds: float) -> None: ...


class NotOpened(Exception):
    """A route can't be had as chosen."""

    def __init__(self, refusals: Mapping[NodeId, FleetError]) -> None:
        super().__init__("; ".join(f"{node_id}: {error.message}" for node_id, error in refusals.items()))
        self.refusals = refusals


class Opener:
    """For the event loop.

    Args:
        request: what every stage is asked for, but for its layers and the session's id.
        block_size: tokens that this node's KV keeps together.
    """

    def __init__(
        self,
        fleet: SeesFleet,
        ends: TensorEnds,
        request: StageRequest,
        width: int,
        block_size: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._fleet, self._ends, self._request = fleet, ends, request
        self._width, self._block_size, self._loop = width, block_size, loop
        self.least_blocks = request.least_blocks
        """Fewer KV blocks than these are of no use, at present."""

    async def open(
        self, parts: Sequence[Part], *, blocks: int | None = None, loads: StageLoads | None = None, kv: Mapping[Part, bytes] | None = None
    ) -> FleetRoute:
        """A route over these machines. Those that load are not waited for once another refuses: what they load stays with them for a while.

        Args:
            parts: in the order of their layers.
            blocks: of KV to lease from each, of 16 tokens, no more and no fewer; None: as many as are to be had, up to the request's.
            loads: told how far each is.
            kv: names of their KV, by which they keep it and go on with it; None: it ends with the route.

        Raises:
            NotOpened: a machine is in the way.
        """
        names = kv or {}
        opening = [
            asyncio.create_task(self._open(part, blocks, loads, names.get(part, b"")), name=f"open-{part.node_id}") for part in parts
        ]
        try:
            await asyncio.wait(opening, return_when=asyncio.FIRST_EXCEPTION)
            refusals: dict[NodeId, FleetError] = {}
            for part, task in zip(parts, opening, strict=True):
                error = task.exception() if task.done() else None
                if isinstance(error, FleetError):
                    refusals[part.node_id] = error
                elif error is not None:
                    raise error
            if refusals:
                raise NotOpened(refusals)
            return await self._connect(parts, [task.result() for task in opening])
        except BaseException:
            # Cancelled, or refused by one, some may be open already and others not.
            for task in opening:
                task.cancel()
            ended = await asyncio.gather(*opening, return_exceptions=True)
            await asyncio.gather(*(each.close() for each in ended if isinstance(each, RemoteStage)), return_exceptions=True)
            raise

    async def _open(self, part: Part, blocks: int | None, loads: StageLoads | None, kv: bytes) -> RemoteStage:
        asked = self._request
        request = replace(
            asked,
            session_id=os.urandom(SESSION_ID_BYTES),
            layers=part.layers,
            n_blocks=blocks or asked.n_blocks,
            least_blocks=blocks or self.least_blocks,
            kv=kv,
        )

        def loading(news: StageLoading) -> None:
            if loads is not None:
                loads.told(part, news)

        stage = await open_stage(self._fleet.channel(part.node_id), part.node_id, request, loading)
        if loads is not None:
            loads.opened(part)
        return stage

    async def _connect(self, parts: Sequence[Part], sessions: Sequence[RemoteStage]) -> FleetRoute:
        """Tell each whom it sends to, and open this node's ends.

        Raises:
            NotOpened: a machine can't, and which.
        """
        dtype = self._request.dtype
        ticket = os.urandom(TICKET_BYTES)
        block_size = self._block_size
        for session in sessions:
            with _blaming(session):
                block_size = max(block_size, _block_size(session))
        ways = [self._way(session, block_size) for session in sessions]
        back = NextStage(self._fleet.node_id, tensor_addresses(self._fleet.addresses, self._ends.port), ticket, block_size)
        try:
            expected = self._ends.expect(ticket, dtype, self._width)
        except FleetError as error:
            raise NotOpened({self._fleet.node_id: error}) from error
        until = time.perf_counter() + CONNECT_S
        sink: ActivationSink | None = None
        try:
            nexts = [*sessions[1:], sessions[-1]]
            await asyncio.gather(*map(_connected, sessions, [*ways[1:], back], nexts))
            with _blaming(sessions[0]):
                sink = await opened_in_thread(partial(self._ends.way(ways[0], dtype), until))
            with _blaming(sessions[-1]):
                incoming = await opened_in_thread(partial(expected.accept, until))
        except BaseException:
            expected.close()
            if sink is not None:
                sink.close()
            raise
        stages = [
            RouteStage(
                part.node_id,
                part.layers,
                f"{self._request.model_id}:{part.layers}",
                session.opened.numerics_id,
                session.opened.holds_identity,
                session.opened.n_blocks * BLOCK_TOKENS,
                session.opened.resumed,
            )
            for part, session in zip(parts, sessions, strict=True)
        ]
        return FleetRoute(stages, block_size, sessions, sink, incoming, self._loop)

    def _way(self, session: RemoteStage, block_size: int) -> NextStage:
        """Where a stage takes activations."""
        opened = session.opened
        card = next((card for card in self._fleet.cards() if card.node_id == session.node_id), None)
        addresses = () if card is None else self._fleet.order(card.addresses)
        return NextStage(session.node_id, tensor_addresses(addresses, opened.tensor_port), opened.ticket, block_size)


def _block_size(session: RemoteStage) -> int:
    """Tokens that a stage keeps together.

    Raises:
        WeightsMismatch: more than leases are asked for by, or no power of two: they would be no whole blocks.
    """
    tokens = session.opened.block_size
    if tokens > WIDEST_BLOCK or tokens.bit_count() != 1:
        raise WeightsMismatch(f"{session.node_id} keeps KV in blocks of {tokens} tokens; powers of two up to {WIDEST_BLOCK} go together")
    return tokens


async def _connected(session: RemoteStage, to: NextStage, following: RemoteStage) -> None:
    """Tell a stage whom it sends to. One that can't reach the next says so, and the next is in the way.

    Raises:
        NotOpened: one of them is in the way.
    """
    with _blaming(session):
        try:
            await session.connect(to)
        except ShardUnavailable:
            with _blaming(following):
                raise


@contextmanager
def _blaming(session: RemoteStage) -> Generator[None]:
    """What goes wrong inside is held against a session.

    Raises:
        NotOpened: something did.
    """
    try:
        yield
    except FleetError as error:
        raise NotOpened({session.node_id: error}) from error
