"""Layers of a model in this machine's memory, or on their way there, and who uses them. All of this happens on the event loop.

A claim is a stream in use: from the moment a caller asks for the layers until nothing of their session runs any more. So the bound of streams
holds while weights load, and a shard without claims may be evicted at any time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ShardUnavailable
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, LayerRange, ModelRef, ModelSpec, shard_id
from paceline.engine.local import LayerRunner
from paceline.fleet.card import ModelShape
from paceline.ways.pipeline.executor.route import StageRequest
from paceline.ways.pipeline.executor.stage import Stage
from paceline.ways.pipeline.host.loading import LoadMeter
from paceline.ways.pipeline.host.session import FairLock, Lease, Place, Session

KEPT_BACK = 16
"""Blocks, of 16 tokens, for a session that comes later, where the first would take all: a short answer, or the prompt rows of a spot check. Raising it shortens the
context of a session that is alone."""


KvName = tuple[NodeId, bytes]
"""The caller, and what it calls it."""


class Leases:
    """Which lease has which blocks of a pool."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._held: list[Lease] = []

    @property
    def free(self) -> int:
        return self.n_blocks - sum(lease.n_blocks for lease in self._held)

    def take(self, wanted: int, least: int, kept_back: int) -> Lease | None:
        """Lease adjacent blocks: as many as are wanted, or what is free; sessions that come later get the rest.

        Args:
            kept_back: for sessions that may still come, if they leave this one half.

        Returns:
            None where there are not as many as `least` together.
        """
        base, room = self._widest_gap()
        if room < least:
            return None
        lease = Lease(base, min(room, wanted, max(least, self.free - kept_back, self.free // 2)))
        self._held.append(lease)
        self._held.sort(key=lambda held: held.base)
        return lease

    def give_back(self, lease: Lease) -> None:
        self._held.remove(lease)

    def _widest_gap(self) -> tuple[int, int]:
        """First block and size of the widest run that is free."""
        gaps: list[tuple[int, int]] = []
        at = 0
        for lease in self._held:
            gaps.append((at, lease.base - at))
            at = lease.base + lease.n_blocks
        gaps.append((at, self.n_blocks - at))
        return max(gaps, key=lambda gap: gap[1])


@dataclass(frozen=True, slots=True)
class LoadedLayers:
    name: str
    """The model's, on this machine."""
    spec: ModelSpec
    shape: ModelShape
    runner: LayerRunner[Any]
    max_rows: int
    memory_bytes: int
    """Weights, KV, and room for rows."""
    size_bytes: int
    """Of the whole model's weights as far as they are in files here."""


class ShardClaim:
    """One stream in use. Its identity is what counts.

    Args:
        kv: under which the session's KV is kept; None: it is not.
    """

    def __init__(self, kv: KvName | None = None) -> None:
        self.kv = kv
        self.session: Session | None = None


class Shard:
    def __init__(self, request: StageRequest, max_streams: int, now: float) -> None:
        self.model, self.weights, self.layers = request.model, request.weights, request.layers
        self.max_streams = max_streams
        self.claims: set[ShardClaim] = set()
        self.used_at = now
        self.lock = FairLock()
        self.loading: asyncio.Task[None] | None = None
        self.meter = LoadMeter()
        self.promised_bytes = 0
        """What it is to take, once that is known."""
        self.loaded: LoadedLayers | None = None
        self.leases = Leases(0)
        self._kept: dict[KvName, tuple[Place, float]] = {}
        """KV of sessions that have ended, and until when it is kept. The oldest first."""
        self.gone = False
        """Evicted, or never to be loaded."""
        self.change = asyncio.Event()
        """Set when a claim is released; the caller that waits clears it."""

    @property
    def shard_id(self) -> str:
        return shard_id(self.model.digest[:12] if self.loaded is None else self.loaded.name, self.layers)

    @property
    def is_idle(self) -> bool:
        return self.loaded is not None and not self.claims

    @property
    def is_loading(self) -> bool:
        return self.loading is not None and not self.loading.done()

    @property
    def is_full(self) -> bool:
        return len(self.claims) >= self.max_streams

    @property
    def is_ending(self) -> bool:
        """A stream is about to become free."""
        return any(claim.session is not None and claim.session.stopping for claim in self.claims)

    @property
    def queue_depth(self) -> int:
        return sum(claim.session.waiting for claim in self.claims if claim.session is not None)

    @property
    def memory_bytes(self) -> int:
        """What it takes, or is about to."""
        return self.promised_bytes if self.loaded is None else self.loaded.memory_bytes

    @property
    def coming_bytes(self) -> int:
        """What of that the system still calls free, while it loads."""
        return max(0, self.promised_bytes - self.meter.packed.done) if self.loaded is None else 0

    def holds(self, model: ModelRef, layers: LayerRange) -> bool:
        mine = self.layers
        return self.model == model and mine.start <= layers.start and layers.stop <= mine.stop

    def suits(self, request: StageRequest) -> bool:
        """Whether it is large enough for a request, were it the only one."""
        loaded = self.loaded
        return loaded is None or (
            loaded.max_rows >= request.max_rows and self.leases.n_blocks >= _own_blocks(request.least_blocks, loaded.runner)
        )

    def end(self, claim: ShardClaim, until: float | None) -> None:
        """A stream is over: its KV is kept for the session that goes on with it, or given back.

        Args:
            until: when it is kept, on the monotonic clock; None: it is not.
        """
        self.claims.discard(claim)
        session, name = claim.session, claim.kv
        if session is None:
            return
        # A session that takes long to end may find its name taken.
        taken = name in self._kept or any(other.kv == name and other.session is not None for other in self.claims)
        if until is None or name is None or taken or not session.holds_kv:
            self.leases.give_back(session.place.lease)
        else:
            self._kept[name] = session.place, until

    def stop(self, name: KvName) -> None:
        """End the session that has this KV: its caller goes on with another."""
        for claim in self.claims:
            if claim.kv == name and claim.session is not None:
                claim.session.stop()

    def drop_kept(self, now: float) -> None:
        """What no session went on with in time."""
        for name, (_, until) in tuple(self._kept.items()):
            if until <= now:
                self._drop(name)

    def resume(self, request: StageRequest, name: KvName) -> Place | None:
        """What the last session of this name left; None: nothing, or nothing that fits. Its lease is to be given back."""
        place, _ = self._kept.get(name, (None, 0.0))
        loaded = self.loaded
        if place is None or loaded is None:
            return None
        fits = place.layers == request.layers and place.max_rows == min(request.max_rows, loaded.max_rows)
        if not fits or place.lease.n_blocks < _own_blocks(request.least_blocks, loaded.runner):
            self._drop(name)
            return None
        del self._kept[name]
        return place

    def _drop(self, name: KvName) -> None:
        self.leases.give_back(self._kept.pop(name)[0].lease)

    def place(self, request: StageRequest) -> Place:
        """Room for a session, once it is loaded. Its lease is to be given back. What is kept makes way.

        Raises:
            ShardUnavailable: there is less than was asked for.
        """
        loaded = self.loaded
        assert loaded is not None, "a shard with a claim is not evicted"
        if not self.suits(request):
            raise ShardUnavailable(f"{self.shard_id} was loaded with less room than is asked for")
        later = max(0, self.max_streams - 1 - sum(claim.session is not None for claim in self.claims))
        least = _own_blocks(request.least_blocks, loaded.runner)
        wanted = max(least, request.n_blocks * BLOCK_TOKENS // loaded.runner.block_size)
        kept_back = later * _own_blocks(KEPT_BACK, loaded.runner)
        lease = self.leases.take(wanted, least, kept_back)
        while self._kept and (lease is None or lease.n_blocks < wanted):
            if lease is not None:
                self.leases.give_back(lease)
            self._drop(next(iter(self._kept)))
            lease = self.leases.take(wanted, least, kept_back)
        if lease is None:
            raise ShardUnavailable(f"{self.shard_id} has fewer than {request.least_blocks} KV blocks free")
        max_rows = min(request.max_rows, loaded.max_rows)
        stage = Stage(
            loaded.runner,
            request.layers,
            base_block=lease.base,
            n_blocks=lease.n_blocks,
            max_rows=max_rows,
            max_context=loaded.spec.max_context,
            width=loaded.spec.hidden,
        )
        return Place(self.shard_id, stage, self.lock, lease, loaded.spec.hidden, request.layers, max_rows)


def _own_blocks(n_blocks: int, runner: LayerRunner[Any]) -> int:
    """A runner's own blocks that hold as much as so many of 16 tokens."""
    return -(-n_blocks * BLOCK_TOKENS // runner.block_size)
