"""How much of this machine its shards may take."""

from __future__ import annotations

from dataclasses import dataclass

SHARDS_FREE_SHARE = 0.8
"""Of the memory that is free, how much shards may take where no bound is set. Raising it leaves less to everything else."""
SHARD_KV_SHARE = 0.5
"""Of what weights leave of that, how much one shard's KV may take beyond what was asked for by whom it is loaded."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Bounds of one host."""

    max_streams: int = 4
    """Sessions of one shard. Strict: the next one is refused at once."""
    max_shards: int = 16
    """Ranges of layers in memory at once."""
    memory_bytes: int | None = None
    """For all shards, weights and KV; None: a share of what is free."""
    idle_s: float = 600.0
    """A shard that no session has used for so long is evicted."""
    kept_s: float = 120.0
    """How long KV outlives its session, where the caller may go on with it, unless another needs the room. Raising it: more of an answer outlives a route
    that takes long to mend."""
    stall_s: float = 5.0
    """How long a stage waits for a receiver that takes nothing, or a batch that began to come."""
    turn_s: float = 60.0
    """How long a session waits for others on the same layers."""
    connect_s: float = 5.0
    """For reaching the next stage."""
