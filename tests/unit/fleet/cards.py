"""Cards for tests of gossip, and a way to say when."""

from __future__ import annotations

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, Revocation, SealedCard, SealedRevocation
from paceline.fleet.messages import PassedCard

TTL_S = 120


def card(node_id: str, version: int, *, instance: int = 0, leaving: bool = False, ttl_s: int = TTL_S) -> NodeCard:
    return NodeCard(
        node_id=NodeId(node_id),
        version=version,
        addresses=(f"{node_id}-{instance}:7000",),
        instance=bytes([instance]) * 8,
        ttl_s=ttl_s,
        announced_at=0,
        leaving=leaving,
    )


def sealed(of: NodeCard, issued_at: int = 1000, beat: int = 0) -> SealedCard:
    return SealedCard(of, f"{of!r} {beat}".encode(), beat, b"certificate", issued_at)


def passed(of: NodeCard, *, beat: int = 0, age_s: float = 0.0, issued_at: int = 1000) -> PassedCard:
    return PassedCard(sealed(of, issued_at, beat), age_s)


def revocation(node_id: str, not_after: int) -> SealedRevocation:
    return SealedRevocation(Revocation(NodeId(node_id), not_after, not_after), f"{node_id} {not_after}".encode())
