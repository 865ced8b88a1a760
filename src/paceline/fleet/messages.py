"""The messages between nodes, as values. Transport turns them into the messages of fleet.proto and back, and checks all signatures first.

A node signs its unchanged card again each round, with a higher beat. Peers that hold the card get the new signature and the beat alone, some 100 bytes.

The effects that gossip returns: it does nothing itself. Its owner carries out `GossipCall`, `Reseal` and `Renew`;
everything else is news, for logs, metrics, open streams and callers that wait for a change of the view.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedCard, SealedList, SealedRevocation

RENEWAL_BYTES = 104
"""Size on the wire of a card that the reader holds: signature, beat, age, and which card it is."""


@lru_cache(4096)
def node_key(node_id: NodeId) -> int:
    """A node id in 8 bytes, as digests name it."""
    return int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8], "little")


class Digest(NamedTuple):
    """What a node holds of another. Greater (version, beat) is newer. A tuple, so that sets of a thousand compare quickly."""

    key: int
    """`node_key` of the node's id."""
    version: int
    """0: nothing is held, so the certificate is needed too."""
    beat: int = 0


@dataclass(frozen=True, slots=True)
class PassedCard:
    """A card on its way from one holder to the next."""

    sealed: SealedCard
    age_s: float = 0.0
    """Since the node signed it, summed over the monotonic clocks of the nodes that held it."""
    with_card: bool = True
    """False: the reader holds this version, and gets the newest beat and signature of it."""
    with_certificate: bool = True
    """Whether the reader needs the certificate; transport leaves it off the wire otherwise."""

    @property
    def nbytes(self) -> int:
        """On the wire, nearly."""
        if not self.with_card:
            return RENEWAL_BYTES
        return len(self.sealed.sealed) + (len(self.sealed.certificate) if self.with_certificate else 0) + 20


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """ExchangeCapabilities, asked. Revocations are merged before everything else."""

    digests: frozenset[Digest] | None = None
    """Everything the caller holds; None: it only hands over what was wanted of it."""
    cards: tuple[PassedCard, ...] = ()
    revocations: tuple[SealedRevocation, ...] = ()
    revocations_digest: bytes = b""
    revocation_list: SealedList | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """ExchangeCapabilities, answered."""

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
class Renew:
    """Sign this node's card again as it is, with the next beat, and `Gossip.announce` it, before the next `tick`."""


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
    """Cards that were not taken for this reason."""


Effect = GossipCall | Reseal | Renew | Appeared | Changed | Restarted | Left | Expired | Revoked | Clashed | Ignored
