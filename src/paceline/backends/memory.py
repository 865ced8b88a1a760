"""The memory that this process may still take (the machine's, or its control groups' if that is less); a check that a KV pool fits; and returning memory
that a load needed for a moment to the system.
"""

from __future__ import annotations

import ctypes
import gc
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.core.errors import OutOfMemory

MIB = 1 << 20
GIB = 1 << 30


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be allocated without swapping, as far as the system reports it.

    Args:
        proc: folder in which Linux shows a process's control groups.
        cgroup: folder in which control groups (versions 1 and 2) show their limits.
    """
    groups = _groups(proc, cgroup)
    return min([psutil.virtual_memory().available, *(max(0, group.limit - group.used + group.reclaimable) for group in groups)])


def total_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the most bytes of memory that this process could have: the machine's, or its control groups' limit if that is less."""
    return min([psutil.virtual_memory().total, *(group.limit for group in _groups(proc, cgroup))])


def own_bytes(pid: int) -> int | None:
    """Return the bytes of memory that a process shares with no other; None if the system does not report it, or if the process does not exist."""
    try:
        held = psutil.Process(pid).memory_info()
    except psutil.Error:
        return None
    return held.rss - held.shared if hasattr(held, "shared") else None


def check_kv(tokens: int, token_bytes: int, free_bytes: int) -> None:
    """Refuse a KV pool that does not fit.

    Args:
        tokens: tokens of the pool.
        token_bytes: bytes of KV for each token.
        free_bytes: free memory, not counting the memory for weights.

    Raises:
        OutOfMemory: the pool does not fit.
    """
    if tokens * token_bytes > free_bytes:
        raise OutOfMemory(
            f"A KV pool of {tokens} tokens needs {human(tokens * token_bytes)}, and {human(free_bytes)} of memory is free",
            f"Ask for --kv-tokens {free_bytes // token_bytes} or less.",
        )


def human(n_bytes: int) -> str:
    """Return a number of bytes as text for people, in MiB or GiB."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.0f} MiB"


@dataclass(frozen=True, slots=True)
class _Group:
    """A control group that bounds memory, in bytes."""

    limit: int
    used: int
    reclaimable: int
    """Bytes of file pages that count against the limit, but are freed when memory is needed."""


def _groups(proc: Path, cgroup: Path) -> Iterator[_Group]:
    """Yield the control groups that limit this process: its own, and every one above."""
    for root, path in _own(proc, cgroup):
        own = root / path.lstrip("/")
        # Inside a container the path may be the host's, of which only the container's own group is shown, as the root.
        folder = own if own.is_dir() else root
        for group in (folder, *folder.parents):
            yield from _bounds(group)
            if group == root:
                break


def _own(proc: Path, cgroup: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folder that shows memory's control groups, and this process's path in it, for version 2, version 1, or both."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield cgroup, path
        elif "memory" in controllers.split(","):
            yield cgroup / "memory", path


def _bounds(folder: Path) -> Iterator[_Group]:
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        most, now = _number(folder / limit), _number(folder / used)
        if most is not None and now is not None:
            yield _Group(most, now, _reclaimable(folder))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable(folder: Path) -> int:
    try:
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    # Version 1 counts a group's own pages apart from those of the groups below it.
    number = lambda name: int(fields.get(f"total_{name}", fields.get(name, 0)))  # noqa: E731
    mapped = number("mapped_file") or number("file_mapped")
    return max(0, number("inactive_file") + number("active_file") - mapped)


def give_memory_back() -> None:
    """Collect garbage, and make the C library return freed memory to the system. glibc would keep freed blocks of up to 32 MiB."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_what_failed(error: BaseException) -> None:
    """Free the local variables of the functions that an error ended, and return the memory: the error may be kept for long, with its traceback."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    give_memory_back()


def free_what_was_frozen() -> None:
    """Free the unused ones among the objects that `gc.freeze` hid from the collector, and return their memory. The rest is frozen again."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    give_memory_back()
    if frozen:
        gc.freeze()
