"""A node of a fleet that serves shards: the host, put together as the node's settings say, what its card says of the shards, and their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.backends.cpu.shares import RANK_BYTES
from paceline.backends.memory import total_bytes
from paceline.backends.options import DeviceKind
from paceline.backends.table import Kernels
from paceline.core.background import came_within, end_tasks
from paceline.core.clock import Clock
from paceline.core.ids import NodeId, Trust
from paceline.core.stats import Metrics, Row, counter, gauge, histogram
from paceline.fleet.card import ModelOffer, Role, ShardState
from paceline.fleet.eligibility import TrustPolicy, Use
from paceline.fleet.messages import Effect, Revoked
from paceline.machine.capability import WarmModel, shard_offer
from paceline.machine.config_file import PipelineSettings
from paceline.machine.devices import local_devices, usable_cores
from paceline.machine.kv_spans import KvMover
from paceline.machine.kv_tier import KvDiskLimits
from paceline.machine.sizing import FETCH_BYTES, load_bytes
from paceline.machine.speed import Speed, SpeedCache, SpeedKey
from paceline.machine.weights import dial_through
from paceline.net.member.node import FleetNode, Service
from paceline.net.trust.certificates import Member
from paceline.net.trust.guard import PeerGuard
from paceline.store.catalog import ModelLocation
from paceline.store.home import Home
from paceline.ways.pipeline.host.ends import tensor_ends
from paceline.ways.pipeline.host.host import NodeShardHost, shard_service
from paceline.ways.pipeline.host.loading import FleetWeights, LoadsLayers, load_layers
from paceline.ways.pipeline.host.session import HostLimits
from paceline.ways.pipeline.host.session_kv import StageDisk
from paceline.ways.pipeline.host.shard import Shard
from paceline.ways.pipeline.host.warm import WarmShards
from paceline.ways.pipeline.meter import ShardMeter


class ShardOffers:
    """Remembers the whole models' speeds, so that a card costs no look at the disk."""

    def __init__(self, home: Home, threads: int) -> None:
        self._speeds, self._threads = SpeedCache(home), threads
        self._known: dict[SpeedKey, Speed | None] = {}

    def of(self, shards: Iterable[Shard]) -> tuple[ModelOffer, ...]:
        """One offer a shard: those in memory, then those on their way, of weights that were found."""
        found = (shard for shard in shards if shard.loaded is not None or shard.meter.progress[1])
        return tuple(map(self._offer, sorted(found, key=lambda shard: shard.loaded is None)))

    def _offer(self, shard: Shard) -> ModelOffer:
        loaded = shard.loaded
        if loaded is None:
            done, total = shard.meter.progress
            state = ShardState(shard.layers, shard.max_streams, loaded_percent=20 * done // total * 5)
            return ModelOffer(shard.model.name, Role.SHARD, str(shard.weights), digest=shard.model.digest, shard=state)
        key = SpeedKey(shard.model.digest, shard.weights, self._threads)
        if key not in self._known:
            self._known[key] = self._speeds.find(key)
        runner = loaded.runner
        known = self._known[key] or Speed(0.0, 0.0, "", holds_identity=False, vocabulary="")
        speed = replace(known, numerics_id=runner.numerics_id, holds_identity=runner.holds_identity)
        model = WarmModel(replace(shard.model, name=loaded.name), loaded.shape, loaded.spec.max_context, loaded.size_bytes, speed)
        state = ShardState(shard.layers, shard.max_streams, len(shard.claims), shard.queue_depth, loaded.memory_bytes)
        return shard_offer(model, state)


# fmt: off
ROWS: tuple[Row[NodeShardHost], ...] = (
    histogram("paceline_shard_latency_ms", "Milliseconds from a batch's arrival at this machine's layers to its departure.",
            lambda host: host.meter.latency.all(), "shard_id"),
    gauge("paceline_shards_loaded", "Ranges of layers in memory for other machines.",
            lambda host: sum(shard.loaded is not None for shard in host.warm.shards)),
    gauge("paceline_shard_memory_bytes", "What they take, weights and KV.", lambda host: host.warm.used_bytes),
    gauge("paceline_shard_sessions", "Sessions of other machines on them.", lambda host: host.sessions),
    gauge("paceline_shard_queue_depth", "Batches that wait.",
            lambda host: sum(shard.queue_depth for shard in host.warm.shards if shard.loaded is not None)),
    counter("paceline_shard_sessions_opened", "Sessions that began.", lambda host: host.meter.sessions_opened),
    counter("paceline_shard_sessions_refused", "Sessions refused for want of room.", lambda host: host.meter.sessions_refused),
    counter("paceline_shard_loads", "Times that layers were loaded.", lambda host: host.meter.loads),
    counter("paceline_shard_kv_disk_blocks", "KV blocks of other machines' prompts on this disk, by what became of them.",
            lambda host: host.kept_blocks, "what"),
    counter("paceline_shard_evictions", "Times that layers were freed.", lambda host: host.meter.evictions),
)
# fmt: on


def shard_metrics(host: NodeShardHost) -> Metrics[NodeShardHost]:
    return Metrics(ROWS, lambda: host)


LOW_BYTES, LOW_PART = 128 << 20, 50
"""A machine with less memory free, in bytes or as a part of all it has, unloads idle layers."""
SHOW_S = 5.0
"""How often the card is told how busy shards are. What comes and goes, it is told at once."""


def every_member(caller: Member) -> None:
    del caller


@dataclass(frozen=True, slots=True)
class Hosting:
    limits: HostLimits = field(default_factory=HostLimits)
    threads: int | None = None
    """None: one a core."""
    check_caller: Callable[[Member], None] = every_member
    """Raises NotTrusted for members that are not served."""
    kv_disk_bytes: int = 0
    """For KV of members' prompts and answers, on this machine's disk; 0: none is kept."""
    load: LoadsLayers = load_layers
    ranks: int = 1
    """Processes that this shares each layer among."""


class ShowsShards(Protocol):
    """`capability.CapabilityReport`, or what a node makes of it."""

    def show_shards(self, shards: tuple[ModelOffer, ...], memory_bytes: Sequence[int] | None) -> bool: ...


class ShardServing:
    """One node's shards. Made on the event loop, before the node listens.

    Args:
        home: models, and the caches of kernels and speeds.
        beside: models that lie elsewhere than in the home. More may be added while this lives.
        mover: of KV between stages and other nodes.
        bytes_of_ranks: as `beside` of `WarmShards`, for the tensor ranks that run here.
    """

    def __init__(
        self,
        fleet: FleetNode,
        portrait: ShowsShards,
        hosting: Hosting,
        home: Home,
        clock: Clock,
        beside: Sequence[ModelLocation] = (),
        mover: KvMover | None = None,
        bytes_of_ranks: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._fleet, self._portrait = fleet, portrait
        threads = self._threads = hosting.threads or usable_cores()
        self._home, self._ranks = home, hosting.ranks
        self.meter = ShardMeter()
        self._offers = ShardOffers(home, threads)
        self._weights = FleetWeights(
            home, lambda: fleet.eligible(Use.GIVE_WEIGHTS), dial_through(fleet.pool, fleet.trust, fleet.gossip.voids), beside
        )
        devices = self._devices = local_devices(home)
        self._changed = asyncio.Event()
        warm = WarmShards(
            self._weights,
            hosting.load,
            hosting.limits,
            devices=devices,
            load_bytes=self._load_bytes,
            low_bytes=max(LOW_BYTES, total_bytes() // LOW_PART),
            threads=threads,
            kernel_cache=home.kernels,
            meter=self.meter,
            clock=clock,
            on_change=self._changed.set,
            beside=bytes_of_ranks,
        )
        disk = StageDisk(home.kv, KvDiskLimits(hosting.kv_disk_bytes)) if hosting.kv_disk_bytes else None
        self.host = NodeShardHost(warm, tensor_ends(fleet), hosting.limits, self.meter, clock, hosting.check_caller, disk, mover)
        self.metrics = shard_metrics(self.host)
        self._showing: asyncio.Task[None] | None = None
        fleet.listen(self._on_effect)

    def _load_bytes(self, kernels: Kernels) -> int:
        """None of it is a GPU's memory."""
        if kernels.device is not DeviceKind.CPU:
            return 0
        return load_bytes(kernels, self._threads, self._home.kernels) + FETCH_BYTES + (self._ranks - 1) * RANK_BYTES

    def left_bytes(self) -> int:
        """What further layers for others may take of the memory that processors use."""
        return min((self.host.warm.left_bytes(device) for device in self._devices if device.kernels.device is DeviceKind.CPU), default=0)

    def service(self, guard: PeerGuard) -> Service:
        return shard_service(self.host, guard.peer)

    def start(self) -> None:
        """Say on the card that shards are served, and go on saying which."""
        self.host.start(self._fleet.background)
        self._showing = self._fleet.background.keep(self._show, "shard-offers")

    async def stop(self) -> None:
        """End every session and free everything. Bounded; idempotent."""
        await end_tasks(self._showing)
        await self.host.close()
        await self._weights.close()

    async def _show(self) -> None:
        while True:
            self._changed.clear()
            warm = self.host.warm
            left = [max(0, warm.left_bytes(device)) for device in self._devices]
            if self._portrait.show_shards(self._offers.of(warm.shards), left):
                self._fleet.look_again()
            await came_within(self._changed, SHOW_S)  # where nothing came or went, queues may be longer

    def _on_effect(self, effect: Effect) -> None:
        if isinstance(effect, Revoked):
            self.host.revoked(effect.node_id)


def hosting_of(settings: PipelineSettings, threads: int | None, kv_disk_bytes: int = 0) -> Hosting | None:
    """How shards are served; None where they are not."""
    host = settings.host
    if not host.serve_shards:
        return None
    limits = HostLimits(
        max_streams=host.max_concurrent_streams,
        memory_bytes=None if host.shard_max_memory_mb is None else host.shard_max_memory_mb << 20,
        idle_s=host.shard_eviction_idle_seconds,
        stall_s=settings.stall_seconds,
    )
    return Hosting(limits, threads, only_from(host.min_caller_trust), kv_disk_bytes)


def only_from(least: Trust) -> Callable[[Member], None]:
    """A check that lets in callers of a level, or more."""
    policy = TrustPolicy(caller=least)

    def check(caller: Member) -> None:
        policy.check(caller, Use.HAVE_LAYERS_RUN, _checked_before)

    return check


def _checked_before(node_id: NodeId, issued_at: int) -> bool:
    """Revocations: the guard of the node's port has looked."""
    del node_id, issued_at
    return False
