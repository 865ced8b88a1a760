"""What nodes tell one another, as values. Transport turns them into the messages of fleet.proto and back; cards and revocations are
checked there before they become `SealedCard` and `SealedRevocation`, stamps are checked here, against the card they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.fleet.card import SealedCard, SealedList, SealedRevocation


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
class Request:
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
