"""Nodes of memory (NUMA): a page lies at the node of the thread that first writes to it, and that node's threads read it faster than others.

So a team's threads are spread over nodes and bound to them, each node's groups claim one share of a product's outputs first (`sync.share_of`), and threads of that
node pack those outputs' weights. Changes no byte. KV and activations lie wherever they come to lie: at decode they are little beside weights.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.backends.cpu.sync import THREADS_A_GROUP

SYSTEM = Path("/sys/devices/system/node")


def nodes(system: Path = SYSTEM) -> list[frozenset[int]]:
    """The processors of each node that this process may run on; empty where the system tells of less than two nodes."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    try:
        lists = [(path / "cpulist").read_text() for path in sorted(system.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))]
    except OSError:
        return []
    found = [frozenset(allowed & _processors(text)) for text in lists]
    found = [node for node in found if node]
    return found if len(found) > 1 else []


def _processors(text: str) -> set[int]:
    """Of a list such as 0-3,8."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {processor for ends in ranges for processor in range(int(ends[0]), int(ends[-1]) + 1)}


def groups_of(threads: int, n_nodes: int) -> int:
    """Groups of a team: as many at each node, of eight threads at most."""
    n_nodes = min(max(1, n_nodes), threads)
    return n_nodes * -(-threads // (n_nodes * THREADS_A_GROUP))


def node_of(part: int, parts: int, n_nodes: int) -> int:
    """The node of a thread among a team's, or of an output among a product's."""
    return part * n_nodes // parts


def bind(node: frozenset[int]) -> None:
    """Have this thread run on a node's processors alone. Threads that it starts do too."""
    os.sched_setaffinity(0, node)
