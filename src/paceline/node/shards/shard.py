"""Layers of a model in this machine's memory, or on their way there, and who uses them. All of this happens on the event loop.

A claim is a stream in use: from the moment a caller asks for the layers until nothing of their session runs any more. So the bound of streams
holds while weights load, and a shard without claims may be evicted at any time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ShardUnavailable
from paceline.core.model import BLOCK_TOKENS, LayerRange, ModelSpec, WeightsFormat
from paceline.engine.local import LayerRunner
from paceline.fleet.card import ModelShape
from paceline.node.shards.leases import KEPT_BACK, Leases
from paceline.node.shards.load_meter import LoadMeter
from paceline.node.shards.session import Place, Session
from paceline.node.shards.turns import Turns
from paceline.parallel.sessions import StageRequest
from paceline.parallel.stage import Stage


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load gave."""

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


class Claim:
    """One stream in use. Its identity is what counts."""

    def __init__(self) -> None:
        self.session: Session | None = None


class Shard:
    """A range of layers.

    Args:
        request: by whom it is loaded.
        max_streams: claims at most.
        now: on the monotonic clock.
    """

    def __init__(self, request: StageRequest, max_streams: int, now: float) -> None:
        self.model_id = request.model_id
        self.digest, self.weights, self.layers = request.digest, request.weights, request.layers
        self.max_streams = max_streams
        self.claims: set[Claim] = set()
        self.used_at = now
        self.turns = Turns()
        self.loading: asyncio.Task[None] | None = None
        self.meter = LoadMeter()
        self.loaded: Loaded | None = None
        self.leases = Leases(0)
        self.gone = False
        """Evicted, or never to be loaded."""
        self.change = asyncio.Event()
        """Set when a claim is released; the caller that waits clears it."""

    @property
    def shard_id(self) -> str:
        """<model>:<first>-<last>."""
        name = self.digest[:12] if self.loaded is None else self.loaded.name
        return f"{name}:{self.layers}"

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
        return 0 if self.loaded is None else self.loaded.memory_bytes

    def holds(self, digest: str, weights: WeightsFormat, layers: LayerRange) -> bool:
        """Whether these layers are among its own."""
        mine = self.layers
        return (self.digest, self.weights) == (digest, weights) and mine.start <= layers.start and layers.stop <= mine.stop

    def suits(self, request: StageRequest) -> bool:
        """Whether it is large enough for a request, were it the only one."""
        loaded = self.loaded
        return loaded is None or (
            loaded.max_rows >= request.max_rows and self.leases.n_blocks >= _own_blocks(request.least_blocks, loaded.runner)
        )

    def place(self, request: StageRequest) -> Place:
        """Room for a session, once it is loaded. Its lease is to be given back.

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
        lease = self.leases.take(wanted, least, later * _own_blocks(KEPT_BACK, loaded.runner))
        if lease is None:
            raise ShardUnavailable(f"{self.shard_id} has fewer than {request.least_blocks} KV blocks free")
        stage = Stage(
            loaded.runner,
            request.layers,
            base_block=lease.base,
            n_blocks=lease.n_blocks,
            max_rows=min(request.max_rows, loaded.max_rows),
            max_context=loaded.spec.max_context,
            width=loaded.spec.hidden,
        )
        return Place(self.shard_id, stage, self.turns, lease, loaded.spec.hidden)


def _own_blocks(n_blocks: int, runner: LayerRunner[Any]) -> int:
    """A runner's own blocks that hold as much as so many of 16 tokens."""
    return -(-n_blocks * BLOCK_TOKENS // runner.block_size)
