"""Room for a KV pool and for resident prompt weights, asked of the system before it is taken."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import OutOfMemory

MIB = 1 << 20


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be taken without swapping; half of all memory where the system does not say."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def check_kv(needed: int, free: int, tokens: int) -> None:
    """Refuse a KV pool that does not fit.

    Args:
        needed: bytes of the pool.
        free: bytes there are, weights loaded.
        tokens: what the pool holds.

    Raises:
        OutOfMemory: it does not fit.
    """
    if needed > free:
        raise OutOfMemory(
            f"A KV pool of {tokens} tokens needs {needed // MIB} MiB, and {free // MIB} MiB of memory is free",
            f"Ask for --kv-tokens {tokens * free // needed} or less.",
        )
