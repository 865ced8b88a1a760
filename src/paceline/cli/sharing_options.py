"""Options of `paceline up` that say how this machine takes part in a fleet."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.backends.table import Kernels
from paceline.machine.settings import PrefillRole


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """The options of `paceline up` that concern other machines."""

    fleet_port: int
    tensor_port: int | None
    """None: as configured."""
    fleet_host: str
    peers: tuple[str, ...]
    fleet_preset: str
    mdns: bool
    pipeline: bool | None
    serve_shards: bool | None
    fallback_to_local: bool | None
    pins: tuple[str, ...]
    own_layers: int | None
    throughput: bool
    propose: tuple[str, ...]
    """Models to draft with."""
    local_nodes: int
    tied: bool
    beside: tuple[str, ...] = ()
    """Models that lie elsewhere than in this home, for others to fetch and for layers that run here."""
    drain_s: float = 30.0
    """Of any `paceline up`: how long live answers may go on at an orderly stop."""
    max_revocation_age: str | None = None
    embeddings: str | None = None
    """An encoder, which this machine serves alone."""
    more: tuple[str, ...] = ()
    """Models beside the first."""
    on_demand: bool | None = None
    """Whether requests have models loaded; None: where no other machine could be asked for them."""
    memory_bytes: int | None = None
    """That models may take together; None: what is free."""
    kv_disk_bytes: int = 0
    """Of the disk, for KV; 0: none is kept there."""
    ways: str = ""
    """Those that the plan may choose of, as a person wrote them; empty: all."""
    allow_unlike: bool | None = None
    role: PrefillRole | None = None
    """None: what config.toml says."""
    threads: int | None = None
    """Of layers for others; None: one a core."""
    device: Kernels | None = None
    """What a person asked to run on; layers for others too, where it is processors' kernels. None: the fastest."""
    tensor: tuple[float, ...] = (1.0,)
    """Speeds of the processes of this machine that share each layer for others."""
