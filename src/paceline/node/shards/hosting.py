"""What a person's settings mean for the shards this node serves."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.errors import NotTrusted
from paceline.core.trust import Trust
from paceline.node.pipeline_settings import PipelineSettings
from paceline.node.shards.limits import HostLimits
from paceline.node.shards.serving import Hosting
from paceline.transport.trust.certificates import Member


def hosting_of(settings: PipelineSettings, threads: int | None) -> Hosting | None:
    """How shards are served; None where they are not.

    Args:
        settings: of this node.
        threads: for kernels; None: one a core.
    """
    host = settings.host
    if not host.serve_shards:
        return None
    limits = HostLimits(
        max_streams=host.max_concurrent_streams,
        memory_bytes=None if host.shard_max_memory_mb is None else host.shard_max_memory_mb << 20,
        idle_s=host.shard_eviction_idle_seconds,
        stall_s=settings.stall_seconds,
    )
    return Hosting(limits, threads, only_from(host.min_caller_trust))


def only_from(least: Trust) -> Callable[[Member], None]:
    """A check that lets in callers of a level, or more."""

    def check(caller: Member) -> None:
        if not caller.trust.reaches(least):
            raise NotTrusted(
                f"{caller.node_id} is a {caller.trust} of the fleet, and layers are run here for a {least} or more", who=caller.node_id
            )

    return check
