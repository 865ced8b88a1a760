"""Measures this node's links as `fleet.links` asks: empty calls for the round trip, full ones for the bandwidth, TCP connects for the network alone."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc.aio

from paceline.core.background import Background, came_within, end_tasks
from paceline.core.clock import Clock
from paceline.core.errors import FleetError
from paceline.fleet.card import Link, NodeCard
from paceline.fleet.links import LinkWatch, Measure, figures, peers_to_measure
from paceline.net.channels import ChannelPool, Purpose
from paceline.net.exchange_codec import MemberOpener
from paceline.net.rpc_faults import unless_closed
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceStub

logger = logging.getLogger(__name__)

PINGS = 5
"""Empty calls of a measurement; the shortest counts."""
AGAIN = 0.25
"""Fraction of the timeout below which a full call is made a second time; the shorter call counts. TCP starts slowly, and a machine may be busy. Raising
it: slow links are measured twice too; lowering it: figures of links of middling speed are less steady."""
CONNECTS, CONNECT_S = 3, 1.0
"""TCP connects of a measurement, the shortest of which counts, and seconds that each may take."""


def connect_s(address: str) -> float | None:
    """Return the seconds that TCP takes to connect to host:port: one round trip between two kernels. Blocks. None: it does not connect."""
    host, _, port = address.rpartition(":")
    times = list[float]()
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        for _ in range(CONNECTS):
            with socket.socket(family, kind, protocol) as end:
                end.settimeout(CONNECT_S)
                began = time.perf_counter()
                end.connect(place)
                times.append(time.perf_counter() - began)
    except (OSError, ValueError) as error:
        logger.debug("%s does not connect: %s", address, error)
    return min(times, default=None)


class LinkDriver:
    """One node's link measurements, between `start` and `close`.

    Args:
        changed: told the links whenever they show something new.
    """

    def __init__(
        self, pool: ChannelPool, opener: MemberOpener, clock: Clock, background: Background, changed: Callable[[tuple[Link, ...]], None]
    ) -> None:
        self._pool, self._opener, self._clock, self._background, self._changed = pool, opener, clock, background, changed
        self._watch = LinkWatch(random.Random(secrets.randbits(64)))
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def links(self) -> tuple[Link, ...]:
        """The best way to each node that was measured."""
        return self._watch.links

    def start(self) -> None:
        self._task = self._background.keep(self._run, "fleet-links")

    def see(self, own: NodeCard, cards: Sequence[NodeCard]) -> None:
        before = self._watch.links
        self._watch.set_peers(peers_to_measure(own, cards), self._clock.monotonic())
        if self._watch.links != before:
            self._changed(self._watch.links)
        self._wake.set()

    async def close(self) -> None:
        """Stop. Idempotent."""
        await end_tasks(self._task)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            for asked in self._watch.tick(self._clock.monotonic()):
                if await self._measure(asked):
                    self._changed(self._watch.links)
            due = self._watch.next_due_s()
            await came_within(self._wake, None if due is None else max(0.0, due - self._clock.monotonic()))

    async def _measure(self, asked: Measure) -> bool:
        """Do what was asked, and hand back what came of it. True where a link shows something new."""
        try:
            channel = self._pool.get(Purpose.MEASURE, asked.address, self._opener.proven(asked.node_id))
            async with asyncio.timeout(asked.timeout_s):
                stub = CapabilityServiceStub(channel)
                await self._call(stub, 0)  # which dials, where that has to be
                pings = [await self._call(stub, 0) for _ in range(PINGS)]
                full_s = await self._call(stub, asked.payload_bytes) if asked.payload_bytes else None
                if full_s is not None and full_s < asked.timeout_s * AGAIN:
                    with suppress(TimeoutError):  # a slower second call changes nothing
                        async with asyncio.timeout(full_s):
                            full_s = min(full_s, await self._call(stub, asked.payload_bytes))
        except (grpc.aio.AioRpcError, FleetError, TimeoutError) as error:
            logger.debug("the link to %s at %s was not measured: %s", asked.node_id, asked.address, error)
            return self._watch.failed(asked.id, self._clock.monotonic())
        rtt_s, rate = (min(pings), None) if full_s is None else figures(pings, 2 * asked.payload_bytes, full_s)
        network_s = await asyncio.to_thread(connect_s, asked.address)
        known_s = None if network_s is None else min(rtt_s, network_s)
        return self._watch.measured(asked.id, self._clock.monotonic(), rtt_s, rate, known_s)

    async def _call(self, stub: CapabilityServiceStub, payload_bytes: int) -> float:
        began = self._clock.monotonic()
        request = wire.MeasureLinkRequest(response_bytes=payload_bytes, payload=bytes(payload_bytes))
        with unless_closed("a peer"):
            await stub.MeasureLink(request, wait_for_ready=True)
        return self._clock.monotonic() - began
