"""The MLX ring: whether this process was started as a rank of one. Reports, never raises.

A ring is a data path beside gRPC, for bulk tensors. Its members are fixed when its processes start (`mlx.launch` sets `MLX_RANK` and
`MLX_HOSTFILE`), so a node can only say that it has one. Looking opens no socket: `mlx.core.distributed.init` does, and waits for all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BACKEND = "ring"
_MOST_BYTES = 1 << 20
"""Of a host file that is read."""


@dataclass(frozen=True, slots=True)
class RingEnvironment:
    """What was found."""

    is_available: bool
    rank: int = 0
    world_size: int = 1
    backend: str = ""
    failure_reason: str = ""
    """Empty where it is available."""
    address: str = ""
    """hostname:rank, as a card says it. Empty where it is not available."""


def probe_ring_environment(environment: Mapping[str, str] | None = None) -> RingEnvironment:
    """Look.

    Args:
        environment: default: this process's variables.
    """
    environment = os.environ if environment is None else environment
    if not mlx_version():
        return RingEnvironment(is_available=False, failure_reason="mlx is not installed")
    rank, hostfile = environment.get("MLX_RANK", ""), environment.get("MLX_HOSTFILE", "")
    if not rank or not hostfile:
        missing = " and ".join(name for name, said in (("MLX_RANK", rank), ("MLX_HOSTFILE", hostfile)) if not said)
        return RingEnvironment(is_available=False, failure_reason=f"{missing} not set: this process was not started by mlx.launch")
    hosts = _hosts(hostfile)
    if isinstance(hosts, str):
        return RingEnvironment(is_available=False, failure_reason=hosts)
    if not (rank.isascii() and rank.isdigit() and len(rank) < 7 and int(rank) < len(hosts)):
        return RingEnvironment(is_available=False, failure_reason=f"MLX_RANK is {rank[:20]!r}, and {hostfile} names {len(hosts)} ranks")
    reason = _no_backend()
    if reason:
        return RingEnvironment(is_available=False, failure_reason=reason)
    host = hosts[int(rank)].rpartition(":")[0]
    return RingEnvironment(True, int(rank), len(hosts), BACKEND, address=f"{host}:{int(rank)}")


def mlx_version() -> str:
    """Of the package installed; empty where there is none. Imports nothing."""
    try:
        return version("mlx")
    except PackageNotFoundError:
        return ""


def _hosts(hostfile: str) -> list[str] | str:
    """The first address of each rank, or why there are none."""
    try:
        with Path(hostfile).open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        return f"the host file can't be read: {error}"
    try:
        said: Any = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (ValueError, RecursionError) as error:
        return f"the host file {hostfile} is not JSON: {error}"
    if not isinstance(said, list) or not said:
        return f"the host file {hostfile} is not a list of ranks"
    hosts = [rank[0] if isinstance(rank, list) and rank else None for rank in said]
    named = [host for host in hosts if isinstance(host, str) and all(host.rpartition(":")[::2])]
    if len(named) != len(hosts):
        return f"the host file {hostfile} has a rank without host:port"
    return named


def _no_backend() -> str:
    """Why MLX has no ring here; empty where it has."""
    try:
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        has: bool = mx.distributed.is_available(BACKEND)
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError) as error:
        return f"mlx can't be used: {type(error).__name__}: {error}"
    return "" if has else f"this build of mlx {mlx_version()} has no {BACKEND}"
