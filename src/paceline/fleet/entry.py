"""A card as a registry holds it, what may become of one that is offered, and what two registries hold apart."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedCard
from paceline.fleet.messages import Digest, PassedCard, Stamp


class Merged(Enum):
    """What became of a card or stamp that was offered."""

    NEW = auto()
    """A node that was not held."""
    NEWER = auto()
    """A newer card of a node that was held."""
    RESTARTED = auto()
    """The same, from a new process."""
    STAMPED = auto()
    """The card held, fresher."""
    LEFT = auto()
    """The node's goodbye, seen for the first time."""
    STALE = auto()
    """Nothing newer than what is known."""
    EXPIRED = auto()
    """Newer, but older than its TTL when it came: as if it had never come."""
    REVOKED = auto()
    FORGED = auto()
    """A stamp that its card disowns."""
    RIVAL = auto()
    """Not taken, but another process's card of the very version that is held: two processes claim one id."""
    FULL = auto()
    """One id more than the bound."""
    OWN = auto()
    """This node's own id, and not newer than what it announced."""
    OWN_AHEAD = auto()
    """This node's own id in a version above what it announced (or another card of the same): an earlier life, or another process."""


@dataclass(slots=True)
class Entry:
    """A card held, and when it ends. Times by this node's monotonic clock."""

    sealed: SealedCard
    digest: Digest
    proof: bytes
    stamped_at: float
    """As far as ages told; never later than `first_seen`."""
    first_seen: float
    """When this very (version, beat) came."""
    expires_at: float

    @property
    def rank(self) -> tuple[int, int]:
        return self.digest.version, self.digest.beat

    def freshen(self, stamped_at: float) -> None:
        """The same stamp by a quicker way: younger, but never younger than its first sight."""
        self.stamped_at = max(self.stamped_at, min(stamped_at, self.first_seen))
        self.expires_at = self.stamped_at + self.sealed.card.ttl_s

    def passed(self, now: float, *, with_certificate: bool) -> PassedCard:
        return PassedCard(self.sealed, self.digest.beat, self.proof, now - self.stamped_at, with_certificate)

    def stamp(self, now: float) -> Stamp:
        key, version, beat = self.digest
        return Stamp(key, version, beat, self.proof, now - self.stamped_at)


@dataclass(frozen=True, slots=True)
class Floor:
    """What is kept of a card that ended: nothing at or below this comes back."""

    rank: tuple[int, int]
    node_id: NodeId
    issued_at: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What two nodes hold apart: what to hand over, and what to ask for."""

    cards: tuple[PassedCard, ...]
    stamps: tuple[Stamp, ...]
    wanted: tuple[Digest, ...]
    more: bool
    """There were more cards than a message may carry."""


def received(key: int, passed: PassedCard, now: float) -> Entry:
    """A card as it came in."""
    stamped_at = now - max(0.0, passed.age_s)
    card = passed.sealed.card
    return Entry(passed.sealed, Digest(key, card.version, passed.beat), passed.proof, stamped_at, now, stamped_at + card.ttl_s)


def change(held: Entry | None, card: NodeCard) -> Merged:
    """What taking `card` in place of `held` means."""
    before = None if held is None or held.sealed.card.leaving else held.sealed.card
    if card.leaving:
        return Merged.LEFT if before is not None else Merged.STALE
    if before is None:
        return Merged.NEW
    if before.version == card.version and before.instance == card.instance:
        return Merged.STAMPED
    return Merged.NEWER if before.instance == card.instance else Merged.RESTARTED
