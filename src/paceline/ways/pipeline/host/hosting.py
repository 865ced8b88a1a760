"""What a person's settings mean for the shards this node serves."""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.ids import NodeId
from paceline.core.trust import Trust
from paceline.fleet.eligibility import TrustPolicy, Use
from paceline.machine.config_file import PipelineSettings
from paceline.net.trust.certificates import Member
from paceline.ways.pipeline.host.limits import HostLimits
from paceline.ways.pipeline.host.serving import Hosting


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
    policy = TrustPolicy(caller=least)

    def check(caller: Member) -> None:
        policy.check(caller, Use.HAVE_LAYERS_RUN, _checked_before)

    return check


def _checked_before(node_id: NodeId, issued_at: int) -> bool:
    """Revocations: the guard of the node's port has looked."""
    del node_id, issued_at
    return False
