"""Cards for tests of gossip, and a way to say when."""

from __future__ import annotations

from functools import lru_cache

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, Revocation, SealedCard, SealedRevocation
from paceline.fleet.messages import LINK_BYTES, PassedCard, Stamp, StampChain, node_key

TTL_S = 120


@lru_cache(256)
def chain(node_id: str, version: int, secret: int = 0) -> StampChain:
    return StampChain(NodeId(node_id), version, bytes([secret]) * LINK_BYTES)


def card(node_id: str, version: int, *, instance: int = 0, leaving: bool = False, ttl_s: int = TTL_S, secret: int = 0) -> NodeCard:
    return NodeCard(
        node_id=NodeId(node_id),
        version=version,
        addresses=(f"{node_id}-{instance}:7000",),
        instance=bytes([instance]) * 8,
        ttl_s=ttl_s,
        announced_at=0,
        leaving=leaving,
        stamp_anchor=chain(node_id, version, secret).anchor,
    )


def sealed(of: NodeCard, issued_at: int = 1000) -> SealedCard:
    return SealedCard(of, repr(of).encode(), b"certificate", issued_at)


def passed(of: NodeCard, *, beat: int = 0, age_s: float = 0.0, issued_at: int = 1000, secret: int = 0) -> PassedCard:
    proof = chain(of.node_id, of.version, secret).proof(beat) if beat else b""
    return PassedCard(sealed(of, issued_at), beat, proof, age_s)


def stamp(of: NodeCard, beat: int, *, age_s: float = 0.0, secret: int = 0) -> Stamp:
    return Stamp(node_key(of.node_id), of.version, beat, chain(of.node_id, of.version, secret).proof(beat), age_s)


def revocation(node_id: str, not_after: int) -> SealedRevocation:
    return SealedRevocation(Revocation(NodeId(node_id), not_after, not_after), f"{node_id} {not_after}".encode())
