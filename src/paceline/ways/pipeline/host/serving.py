"""A node of a fleet that serves shards: the host, put together, and what the rest of the node sees of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.backends.memory import total_bytes
from paceline.backends.table import Kernels
from paceline.core.clock import Clock
from paceline.fleet.card import ModelOffer
from paceline.fleet.effects import Effect, Revoked
from paceline.fleet.eligibility import Use
from paceline.machine.cores import usable_cores
from paceline.machine.devices import local_devices
from paceline.machine.free_memory import FETCH_BYTES, load_bytes
from paceline.machine.weights import dial_through
from paceline.net.member.node import FleetNode, Service
from paceline.net.trust.certificates import Member
from paceline.net.trust.guard import PeerGuard
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home
from paceline.ways.pipeline.host.host import NodeShardHost
from paceline.ways.pipeline.host.limits import HostLimits
from paceline.ways.pipeline.host.loading import FleetWeights, load_layers
from paceline.ways.pipeline.host.meter import ShardMeter
from paceline.ways.pipeline.host.metrics import ShardMetrics
from paceline.ways.pipeline.host.offers import ShardOffers
from paceline.ways.pipeline.host.tensor_ends import tensor_ends
from paceline.ways.pipeline.host.warm import WarmShards
from paceline.ways.pipeline.service import shard_service

LOW_BYTES, LOW_PART = 128 << 20, 50
"""A machine with less memory free, in bytes or as a part of all it has, unloads idle layers."""
SHOW_S = 5.0
"""How often the card is told how busy shards are. What comes and goes, it is told at once."""


def anybody(caller: Member) -> None:
    """Every member of the fleet is served."""
    del caller


@dataclass(frozen=True, slots=True)
class Hosting:
    """How a node serves shards."""

    limits: HostLimits = field(default_factory=HostLimits)
    threads: int | None = None
    """None: one a core."""
    check_caller: Callable[[Member], None] = anybody
    """Raises NotTrusted for members that are not served."""


class ShowsShards(Protocol):
    """`capability.SelfPortrait`."""

    def show_shards(self, shards: tuple[ModelOffer, ...], memory_bytes: Sequence[int] | None) -> bool: ...


class ShardServing:
    """One node's shards. Made on the event loop, before the node listens.

    Args:
        fleet: the node.
        portrait: says what is loaded.
        hosting: as the person asked.
        home: models, and the caches of kernels and speeds.
        clock: all time.
        beside: models that lie elsewhere than in the home. More may be added while this lives.
    """

    def __init__(
        self,
        fleet: FleetNode,
        portrait: ShowsShards,
        hosting: Hosting,
        home: Home,
        clock: Clock,
        beside: Sequence[ModelLocation] = (),
    ) -> None:
        self._fleet, self._portrait = fleet, portrait
        threads = self._threads = hosting.threads or usable_cores()
        self._home = home
        self.meter = ShardMeter()
        self._offers = ShardOffers(home, threads)
        self._weights = FleetWeights(
            home, lambda: fleet.eligible(Use.GIVE_WEIGHTS), dial_through(fleet.pool, fleet.trust, fleet.gossip.voids), beside
        )
        devices = self._devices = local_devices(home)
        self._changed = asyncio.Event()
        warm = WarmShards(
            self._weights,
            load_layers,
            hosting.limits,
            devices=devices,
            load_bytes=self._load_bytes,
            low_bytes=max(LOW_BYTES, total_bytes() // LOW_PART),
            threads=threads,
            kernel_cache=home.kernels,
            meter=self.meter,
            clock=clock,
            on_change=self._changed.set,
        )
        self.host = NodeShardHost(warm, tensor_ends(fleet), hosting.limits, self.meter, clock, hosting.check_caller)
        self.metrics = ShardMetrics(self.host, self.meter)
        self._showing: asyncio.Task[None] | None = None
        fleet.listen(self._on_news)

    def _load_bytes(self, kernels: Kernels) -> int:
        """None of it is a GPU's memory."""
        return 0 if kernels is Kernels.CUDA else load_bytes(kernels, self._threads, self._home.kernels) + FETCH_BYTES

    def service(self, guard: PeerGuard) -> Service:
        """For `FleetNode.start`."""
        return shard_service(self.host, guard.peer)

    def start(self) -> None:
        """Say on the card that shards are served, and go on saying which."""
        self.host.start(self._fleet.background)
        self._showing = self._fleet.background.keep(self._show, "shard-offers")

    async def stop(self) -> None:
        """End every session and free everything. Bounded; idempotent."""
        if self._showing is not None:
            self._showing.cancel()
            await asyncio.gather(self._showing, return_exceptions=True)
            self._showing = None
        await self.host.close()
        await self._weights.close()

    async def _show(self) -> None:
        while True:
            self._changed.clear()
            warm = self.host.warm
            left = [max(0, warm.left_bytes(device)) for device in self._devices]
            if self._portrait.show_shards(self._offers.of(warm.shards), left):
                self._fleet.look_again()
            try:
                async with asyncio.timeout(SHOW_S):
                    await self._changed.wait()
            except TimeoutError:
                pass  # nothing came or went, but queues may be longer

    def _on_news(self, effect: Effect) -> None:
        if isinstance(effect, Revoked):
            self.host.revoked(effect.node_id)
