"""What a card says of a host's shards: a function of the host's state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from paceline.fleet.card import ModelOffer, Role, ShardState
from paceline.machine.offers import WarmModel, shard_offer
from paceline.machine.speed import Speed, SpeedCache, SpeedKey
from paceline.store.home import Home
from paceline.ways.pipeline.host.shard import Shard


class ShardOffers:
    """Remembers the whole models' speeds, so that a card costs no look at the disk.

    Args:
        home: keeps the speeds.
        threads: that shards run on.
    """

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
            return ModelOffer(shard.model_id, Role.SHARD, str(shard.weights), digest=shard.digest, shard=state)
        key = SpeedKey(shard.digest, shard.weights, self._threads)
        if key not in self._known:
            self._known[key] = self._speeds.find(key)
        runner = loaded.runner
        known = self._known[key] or Speed(0.0, 0.0, "", holds_identity=False, vocabulary="")
        speed = replace(known, numerics_id=runner.numerics_id, holds_identity=runner.holds_identity)
        model = WarmModel(loaded.name, shard.digest, shard.weights, loaded.shape, loaded.spec.max_context, loaded.size_bytes, speed)
        state = ShardState(shard.layers, shard.max_streams, len(shard.claims), shard.queue_depth, loaded.memory_bytes)
        return shard_offer(model, state)
