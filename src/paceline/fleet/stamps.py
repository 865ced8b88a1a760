"""Freshness without signatures: a signed card holds the end of a chain of hashes, and each stamp reveals the link before.

Only the node that drew the chain's secret can make the next stamp; every node checks it with a hash or two (64 bytes of signature and 100 us
less than signing a card that did not change). Links are salted with id and version: a link of one card says nothing about another.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from paceline.core.ids import NodeId

CHAIN_LENGTH = 256
"""Stamps a card can have; the next one needs a new card. More: fewer cards signed, and a stamp may cost its reader as many hashes."""
LINK_BYTES = 16


@lru_cache(4096)
def node_key(node_id: NodeId) -> int:
    """A node id in 8 bytes, as digests and stamps name it."""
    return int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8], "little")


@lru_cache(4096)
def salt(node_id: NodeId, version: int) -> bytes:
    """What the links of this one card are hashed with."""
    return hashlib.sha256(b"paceline stamp\0" + node_id.encode() + b"\0" + str(version).encode()).digest()


def _hash(salted: bytes, link: bytes, times: int) -> bytes:
    for _ in range(times):
        link = hashlib.sha256(salted + link).digest()[:LINK_BYTES]
    return link


class StampChain:
    """The secret half: what the card's own node makes stamps from. Lives in memory only; a restart makes a new card.

    Args:
        secret: random bytes, `LINK_BYTES` of them, used for this one card.
    """

    def __init__(self, node_id: NodeId, version: int, secret: bytes) -> None:
        if len(secret) != LINK_BYTES:
            raise ValueError(f"a chain's secret has {LINK_BYTES} bytes, not {len(secret)}")
        self.version = version
        self.length = CHAIN_LENGTH
        salted = salt(node_id, version)
        links = [secret]
        for _ in range(CHAIN_LENGTH):
            links.append(_hash(salted, links[-1], 1))
        self._links = links

    @property
    def anchor(self) -> bytes:
        """What the card publishes (`NodeCard.stamp_anchor`)."""
        return self._links[CHAIN_LENGTH]

    def proof(self, beat: int) -> bytes:
        """The stamp of number `beat`, from 1 to `CHAIN_LENGTH`."""
        if not 1 <= beat <= CHAIN_LENGTH:
            raise ValueError(f"beat {beat} of a chain of {CHAIN_LENGTH}")
        return self._links[CHAIN_LENGTH - beat]


def holds(salted: bytes, *, known: bytes, known_beat: int, proof: bytes, beat: int) -> bool:
    """Whether `proof` is the link of number `beat` of a card with this `salt`, given the link of number `known_beat` (0: the anchor)."""
    if not known_beat < beat <= CHAIN_LENGTH or len(proof) != LINK_BYTES or len(known) != LINK_BYTES:
        return False
    return _hash(salted, proof, beat - known_beat) == known
