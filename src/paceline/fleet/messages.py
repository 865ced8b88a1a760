"""The messages between nodes, as values. Transport turns them into the messages of fleet.proto and back, and checks all signatures first.

A node signs its unchanged card again each round, with a higher beat. Peers that hold the card get the new signature and the beat alone, some 100 bytes.

The last part of the file holds the effects that gossip returns. Its owner carries out `GossipCall`, `Reseal` and `Renew`; all other effects are
news for logs, metrics, open streams and callers that wait for a change of the view.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedCard, SealedList, SealedRevocation

RENEWAL_BYTES = 104
"""Size on the wire of a card that the receiver already holds: signature, beat, age, and the card's key and version."""


@lru_cache(4096)
def node_key(node_id: NodeId) -> int:
    """Return the 8-byte key, as an integer, by which digests name a node."""
    return int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8], "little")


class Digest(NamedTuple):
    """The version of a card that a node holds. The greater (version, beat) is newer. It is a tuple, so that sets of a thousand compare quickly."""

    key: int
    """`node_key` of the node's id."""
    version: int
    """Version of the card held; 0: none is held, so the certificate is needed too."""
    beat: int = 0


@dataclass(frozen=True, slots=True)
class PassedCard:
    """A card on its way from one holder to the next."""

    sealed: SealedCard
    age_s: float = 0.0
    """Seconds since the node signed it, summed over the monotonic clocks of the nodes that held it."""
    with_card: bool = True
    """False if the receiver holds this version and gets only its newest beat and signature."""
    with_certificate: bool = True
    """False if the receiver does not need the certificate; transport then leaves it off the wire."""

    @property
    def nbytes(self) -> int:
        """Approximate size on the wire."""
        if not self.with_card:
            return RENEWAL_BYTES
        return len(self.sealed.sealed) + (len(self.sealed.certificate) if self.with_certificate else 0) + 20


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """The request of ExchangeCapabilities. Revocations are merged before everything else."""

    digests: frozenset[Digest] | None = None
    """Digests of every card the caller holds; None if it only hands over the cards that were wanted."""
    cards: tuple[PassedCard, ...] = ()
    revocations: tuple[SealedRevocation, ...] = ()
    revocations_digest: bytes = b""
    revocation_list: SealedList | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The response of ExchangeCapabilities."""

    cards: tuple[PassedCard, ...] = ()
    wanted: tuple[Digest, ...] = ()
    """Digests of the cards that the caller has newer, as the called node holds them."""
    revocations: tuple[SealedRevocation, ...] = ()
    revocations_digest: bytes = b""
    more: bool = False
    """True if there were more cards than one message may carry."""
    revocation_list: SealedList | None = None


@dataclass(frozen=True, slots=True)
class GossipCall:
    """Send `request` to a peer, then call `Gossip.on_reply(id, ...)` or `Gossip.on_failure(id, ...)` with the outcome."""

    id: int
    addresses: tuple[str, ...]
    """host:port; any of them will do."""
    node_id: NodeId | None
    """Node that must answer; None if only an address is known (a seed)."""
    request: ExchangeRequest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Reseal:
    """Sign a new card and `Gossip.announce` it; its version must be above `above`."""

    above: int
    reason: str
    """Reason for the log."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Sign this node's card again as it is, with the next beat, and `Gossip.announce` it, before the next `tick`."""


@dataclass(frozen=True, slots=True)
class Appeared:
    """A node came into the view."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Changed:
    """A node in the view has a new card."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Restarted:
    """A node in the view is a new process: all that the old process held for others is gone."""

    card: NodeCard


@dataclass(frozen=True, slots=True)
class Left:
    """A node said goodbye."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Expired:
    """A node's card was not signed again for its TTL."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class Revoked:
    """The CA revoked a node's certificates issued up to `not_after`: cancel its streams. The node may be this one."""

    node_id: NodeId
    not_after: int


@dataclass(frozen=True, slots=True)
class Clashed:
    """Another process runs under this node's id."""

    node_id: NodeId
    addresses: tuple[str, ...]
    """This node's own addresses."""
    other_addresses: tuple[str, ...]
    """Addresses of the other process."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Cards that a peer passed on and that were not taken. There is one effect for each reason in a message, so that a flood takes one log line."""

    peer: NodeId
    node_id: NodeId | None
    """Node of the first such card; None if that is not known."""
    reason: str
    count: int = 1
    """Cards that were not taken for this reason."""


Effect = GossipCall | Reseal | Renew | Appeared | Changed | Restarted | Left | Expired | Revoked | Clashed | Ignored
