"""What nodes tell one another, as values. Transport turns them into the messages of fleet.proto and back; cards and revocations are
checked there before they become `SealedCard` and `SealedRevocation`, stamps are checked here, against the card they belong to.

What gossip asks its owner to do, and what it tells it happened. Values: gossip itself does nothing.

`GossipCall` and `Reseal` are asked; everything else is news, for logs, metrics, open streams and callers that wait for a change of the view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedCard, SealedList, SealedRevocation


class Digest(NamedTuple):
    """What a node holds of another. Greater (version, beat) is newer. A tuple, so that sets of a thousand compare quickly."""

    key: int
    """`stamps.node_key` of the node's id."""
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
    """Two running processes claim one id. Newest evidence first."""

    node_id: NodeId
    addresses: tuple[str, ...]
    other_addresses: tuple[str, ...]


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
