"""Options of `paceline up` that say how this machine takes part in a fleet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.backends.table import Kernels
from paceline.machine.settings import PrefillRole

if TYPE_CHECKING:
    from paceline.engines.choice import Asked
    from paceline.machine.foreign.shares import EngineShare


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
    """Seconds that live answers get at an orderly stop; an option of every `paceline up`."""
    max_revocation_age: str | None = None
    embeddings: str | None = None
    """An encoder, which this machine serves alone."""
    more: tuple[str, ...] = ()
    """Models in addition to the first."""
    on_demand: bool | None = None
    """Requests may load models; None: only if no other machine could be asked for them."""
    engines: Literal["ask", "auto", "off"] = "ask"
    """Treatment of engines of other makers that run on this machine."""
    found: tuple[EngineShare, ...] = ()
    """Engines that were found on this machine and are offered while this process runs."""
    engine: Asked | None = None
    """Choice of the engine that runs the models; None: the fastest that can, by the rule in `engines.choice`."""
    memory_bytes: int | None = None
    """Memory that models may take together, in bytes; None: what is free."""
    kv_disk_bytes: int = 0
    """Disk space for KV, in bytes; 0: no KV is kept on the disk."""
    ways: str = ""
    """Ways that the plan may choose from, as a person wrote them; empty: all."""
    exact: bool | None = None
    """None: as configured."""
    role: PrefillRole | None = None
    """None: what config.toml says."""
    threads: int | None = None
    """Threads of layers that run for others; None: one per core."""
    device: Kernels | None = None
    """Device that a person chose. Layers for others run on it too if it is a processor's kernels. None: the fastest."""
    tensor: tuple[float, ...] = (1.0,)
    """Speeds of the processes of this machine that share each layer for others."""
