"""Leases of prompts that are computed here for other nodes: who holds one, until when, and what a later one ends.

Law: pure; the time is an argument. A node and a request's id have one lease at a time, and a later epoch ends the earlier: what is still sent for that
goes to a stream that nobody reads. What ended stays ended, and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from paceline.core.errors import InvalidRequest, Overloaded
from paceline.core.ids import NodeId

LEASE_S: Final = 30.0
"""vLLM's `_kv_lease_duration`. Raising it: blocks of a caller that is gone are held for longer."""
HEARTBEAT_S: Final = 5.0
"""Between two of the caller. Raising it: more are lost with one."""
MOST_LEASES: Final = 4
"""Prompts computed for others at once, half of them one node's. Raising it: each is computed more slowly, and this node's own."""
MOST_ROUTED: Final = 16
"""The same of prompts that routers have computed here anyway. Raising it: more threads, which share the link."""
MOST_FENCES: Final = 256
"""Epochs that are remembered of requests that ended, the latest. Raising it: memory."""


class LeaseEnd(StrEnum):
    """Why a lease is over."""

    WHOLE = "whole"
    """All blocks were sent."""
    EXPIRED = "expired"
    """No heartbeat came."""
    FENCED = "fenced"
    """A later epoch of the same request came."""
    LEFT = "left"
    """The caller ended it, or is gone."""
    WRITE_FAILED = "write_failed"
    """The stream of blocks broke, or was not read."""
    UNMATCHED = "unmatched"
    """No router's request came with this prompt."""
    NOT_COMPUTED = "not_computed"
    """The engine refused the prompt, ended, or had to give up blocks before they were sent."""


@dataclass(slots=True, eq=False)
class KvLease:
    """Of one prompt."""

    holder: NodeId
    request_id: str
    epoch: int
    lease_s: float
    until_s: float
    is_routed: bool = False
    """The prompt is computed by a router's request."""
    ended: LeaseEnd | None = field(default=None)

    def heartbeat(self, request_id: str, epoch: int, now: float) -> bool:
        """The caller lives. Returns whether that was of this lease, and in time."""
        if self.ended is not None or (request_id, epoch) != (self.request_id, self.epoch) or now >= self.until_s:
            return False
        self.until_s = now + self.lease_s
        return True

    def end(self, why: LeaseEnd) -> None:
        """The first reason stands."""
        if self.ended is None:
            self.ended = why


class KvLeases:
    """Of one node."""

    def __init__(self) -> None:
        self.live: dict[tuple[NodeId, str], KvLease] = {}
        self._fences: dict[tuple[NodeId, str], int] = {}
        """The last epoch of each request."""

    def take_lease(self, holder: NodeId, request_id: str, epoch: int, lease_s: float, now: float, *, is_routed: bool = False) -> KvLease:
        """Begin one, and end an earlier one of that request.

        Raises:
            InvalidRequest: the epoch is no later than one that was seen.
            Overloaded: there are as many as there may be.
        """
        key = holder, request_id
        if epoch <= self._fences.get(key, 0):
            raise InvalidRequest(f"epoch {epoch} of {request_id} is over", "Register it with a later one.", field="epoch")
        others = [lease for other, lease in self.live.items() if other != key and lease.is_routed == is_routed]
        most = MOST_ROUTED if is_routed else MOST_LEASES
        if len(others) >= most or sum(lease.holder == holder for lease in others) >= most // 2:
            raise Overloaded("This node computes prompts for as many others as it will", "Compute it there.", retry_after_s=1)
        if key in self.live:
            self.live[key].end(LeaseEnd.FENCED)
        self._fences.pop(key, None)
        self._fences[key] = epoch
        while len(self._fences) > MOST_FENCES:
            del self._fences[next(iter(self._fences))]
        lease_s = min(lease_s, LEASE_S)
        lease = self.live[key] = KvLease(holder, request_id, epoch, lease_s, now + lease_s, is_routed)
        return lease

    def expire(self, now: float) -> None:
        """End those that had no heartbeat for too long."""
        for lease in self.live.values():
            if now >= lease.until_s:
                lease.end(LeaseEnd.EXPIRED)

    def give_back(self, lease: KvLease) -> None:
        """It is over, and nothing is sent for it any more."""
        lease.end(LeaseEnd.LEFT)
        if self.live.get((lease.holder, lease.request_id)) is lease:
            del self.live[lease.holder, lease.request_id]
