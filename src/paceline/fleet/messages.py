"""What nodes tell one another, as values. Transport turns them into the messages of fleet.proto and back; cards and revocations are
checked there before they become `SealedCard` and `SealedRevocation`, stamps are checked here, against the card they belong to.

Freshness without signatures: a signed card holds the end of a chain of hashes, and each stamp reveals the link before. Only the node that drew the chain's
secret can make the next stamp; every node checks it with a hash or two (64 bytes of signature and 100 us less than signing a card that did not change).
Links are salted with id and version: a link of one card says nothing about another.

What gossip asks its owner to do, and what it tells it happened. Values: gossip itself does nothing. `GossipCall` and `Reseal` are asked; everything else
is news, for logs, metrics, open streams and callers that wait for a change of the view.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedCard, SealedList, SealedRevocation

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


class Digest(NamedTuple):
    """What a node holds of another. Greater (version, beat) is newer. A tuple, so that sets of a thousand compare quickly."""

    key: int
    """`node_key` of the node's id."""
    version: int
    """0: nothing is held, so the certificate is needed too."""
    beat: int = 0


class Stamp(NamedTuple):
    """Card `version` of a node still holds: proof number `beat`."""

    key: int
    version: int
    beat: int
    proof: bytes
    age_s: float
    """Since the node made it, summed over the monotonic clocks of those who held it."""


@dataclass(frozen=True, slots=True)
class PassedCard:
    """A card on its way, with its newest stamp."""

    sealed: SealedCard
    beat: int = 0
    """0: not stamped yet."""
    proof: bytes = b""
    age_s: float = 0.0
    """Since the newest stamp, or since the card itself where it has none."""
    with_certificate: bool = True
    """Whether the reader needs the certificate; transport leaves it off the wire otherwise."""

    @property
    def nbytes(self) -> int:
        """On the wire, nearly."""
        return len(self.sealed.sealed) + (len(self.sealed.certificate) if self.with_certificate else 0) + 40


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """ExchangeCapabilities, asked. Revocations are merged before everything else."""

    digests: frozenset[Digest] | None = None
    """Everything the caller holds; None: it only hands over what was wanted of it."""
    stamps: tuple[Stamp, ...] = ()
    cards: tuple[PassedCard, ...] = ()
    revocations: tuple[SealedRevocation, ...] = ()
    revocations_digest: bytes = b""
    revocation_list: SealedList | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """ExchangeCapabilities, answered."""

    stamps: tuple[Stamp, ...] = ()
    cards: tuple[PassedCard, ...] = ()
    wanted: tuple[Digest, ...] = ()
    """What the callee holds of those the caller has newer."""
    revocations: tuple[SealedRevocation, ...] = ()
    revocations_digest: bytes = b""
    more: bool = False
    """There was more than a message may carry."""
    revocation_list: SealedList | None = None


@dataclass(frozen=True, slots=True)
class GossipCall:
    """Send `request` to a peer and hand back what came of it: `Gossip.on_reply(id, ...)` or `Gossip.on_failure(id, ...)`."""

    id: int
    addresses: tuple[str, ...]
    """host:port; any of them will do."""
    node_id: NodeId | None
    """Who must answer; None where only an address is known (a seed)."""
    request: ExchangeRequest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Reseal:
    """Sign a new card and `Gossip.announce` it; its version must be above `above`."""

    above: int
    reason: str
    """For the log."""


@dataclass(frozen=True, slots=True)
class Appeared:
    """A node is in the view that was not."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Changed:
    """A node in the view has a new card."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Restarted:
    """A node in the view is a new process: what was held with the old one is gone."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Left:
    """A node said goodbye."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Expired:
    """A node was not heard of for its TTL."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Revoked:
    """The CA voided a node's certificates issued up to `not_after`: cancel its streams. It may be this very node."""

    node_id: NodeId
    not_after: int


@dataclass(frozen=True, slots=True)
class Clashed:
    """This node's id runs elsewhere too."""

    node_id: NodeId
    addresses: tuple[str, ...]
    """This node's own addresses."""
    other_addresses: tuple[str, ...]
    """Addresses of the other process."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Some of what a peer passed on was not taken. One for each reason in a message, so that a storm is told in a line."""

    peer: NodeId
    node_id: NodeId | None
    """Whose card it was, or the first one's; None where that is not known."""
    reason: str
    count: int = 1
    """Cards or stamps that were not taken for this reason."""


Effect = GossipCall | Reseal | Appeared | Changed | Restarted | Left | Expired | Revoked | Clashed | Ignored
