"""How much memory this process may still take (the machine's, or its container's where that is less), and whether a KV pool fits it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.core.errors import OutOfMemory

MIB = 1 << 20
GIB = 1 << 30


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated without swapping, as far as the system says.

    Args:
        proc: where Linux shows itself.
        cgroup: where a container's limits are shown (versions 1 and 2).
    """
    if sys.platform == "darwin":
        # macOS keeps little memory free on purpose and compresses the rest; half of all is what a person can spare.
        return _physical() // 2
    free = [_machine(proc)]
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        most, now = _number(cgroup / limit), _number(cgroup / used)
        if most is not None and now is not None:
            free.append(max(0, most - now + _reclaimable(cgroup / Path(limit).parent)))
    return min(free)


def total_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory this process could have at most: the machine's, or its container's where that is less."""
    limits = (_number(cgroup / limit) for limit in ("memory.max", "memory/memory.limit_in_bytes"))
    return min([_physical(), *(limit for limit in limits if limit is not None)])


def check_kv(tokens: int, token_bytes: int, free_bytes: int) -> None:
    """Refuse a KV pool that does not fit.

    Args:
        tokens: what the pool holds.
        token_bytes: what one of them takes.
        free_bytes: memory there is, weights loaded.

    Raises:
        OutOfMemory: it does not fit.
    """
    if tokens * token_bytes > free_bytes:
        raise OutOfMemory(
            f"A KV pool of {tokens} tokens needs {human(tokens * token_bytes)}, and {human(free_bytes)} of memory is free",
            f"Ask for --kv-tokens {free_bytes // token_bytes} or less.",
        )


def human(n_bytes: int) -> str:
    """Bytes as a person reads them."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.0f} MiB"


def _machine(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return _physical() // 2
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable(folder: Path) -> int:
    """File pages that count against the limit and go when memory is wanted."""
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))
    except (OSError, ValueError):
        return 0
