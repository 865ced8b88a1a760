"""Peers that are asked for nothing for a while.

Law: a rest is that of one process: a node that was started anew is asked at once, but where the cause may outlive its process.
"""

from __future__ import annotations

from paceline.core.ids import NodeId


class Rests:
    """Of one node's peers."""

    def __init__(self) -> None:
        self._until: dict[tuple[NodeId, bytes | None], float] = {}

    def begin(self, node_id: NodeId, instance: bytes | None, until: float) -> None:
        """Let a process of a node be until then, on the clock that is asked with; None: any process of that node."""
        self._until[node_id, instance] = until

    def has(self, node_id: NodeId, instance: bytes, now: float) -> bool:
        """Whether a process of a node rests."""
        for key in [key for key, until in self._until.items() if until <= now]:
            del self._until[key]
        return (node_id, instance) in self._until or (node_id, None) in self._until
