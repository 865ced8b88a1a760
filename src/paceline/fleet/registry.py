"""The cards a node holds. Per id the greatest (version, beat) wins; merging is commutative, associative and idempotent.

A card expires `ttl_s` after its node signed it last, by the holder's monotonic clock and the ages that the card was passed on with. So no wall clock
matters, and the card of a dead node expires everywhere at once. The greatest (version, beat) of an id is kept after its card has expired, as a
`Floor`, so that a replayed card does not bring a node back. The node's own card is the one it announced, whatever other nodes send.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto

from paceline.core.ids import NodeId
from paceline.fleet.card import NodeCard, SealedCard
from paceline.fleet.eligibility import LiveCard, Revocations
from paceline.fleet.messages import Digest, PassedCard, node_key
from paceline.fleet.presets import Bounds


class Merged(Enum):
    """The result of offering a card."""

    NEW = auto()
    """The first card of a node that was not held."""
    NEWER = auto()
    """A newer card of a node that was held."""
    RESTARTED = auto()
    """A newer card of a node that was held, from a new process."""
    RENEWED = auto()
    """The card that was held, signed again."""
    LEFT = auto()
    """The node's goodbye, seen for the first time."""
    STALE = auto()
    """A card that is not newer than the known one."""
    EXPIRED = auto()
    """A newer card that was past its TTL when it came; it changes nothing."""
    REVOKED = auto()
    FULL = auto()
    """A card of a further id when the registry already holds as many as it may."""
    OWN = auto()
    """A card of this node's own id."""


@dataclass(slots=True)
class Entry:
    """A card held, and when it ends. Times by this node's monotonic clock."""

    sealed: SealedCard
    digest: Digest
    signed_at: float
    """Time at which its node signed it, by the ages it was passed on with; never later than `first_seen`."""
    first_seen: float
    """Time at which this (version, beat) first came."""
    expires_at: float
    is_over: bool = False
    """True if the node certainly does not run any more."""

    @property
    def rank(self) -> tuple[int, int]:
        return self.digest.version, self.digest.beat

    def freshen(self, signed_at: float) -> None:
        """Take a later time of signing for the same card, because it came by a quicker way, but never one after `first_seen`."""
        self.signed_at = max(self.signed_at, min(signed_at, self.first_seen))
        self.expires_at = self.signed_at + self.sealed.card.ttl_s

    def passed(self, now: float, *, with_card: bool = True, with_certificate: bool) -> PassedCard:
        return PassedCard(self.sealed, now - self.signed_at, with_card, with_certificate)


@dataclass(frozen=True, slots=True)
class Floor:
    """The rank of a card that ended. No card of the node at or below this rank is taken again."""

    rank: tuple[int, int]
    node_id: NodeId
    issued_at: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between the cards of two nodes: those to hand over, and those to ask for."""

    cards: tuple[PassedCard, ...]
    wanted: tuple[Digest, ...]
    more: bool
    """True if there were more cards than one message may carry."""


def received(key: int, passed: PassedCard, now: float) -> Entry:
    """Return the entry for a card that came in at `now`."""
    signed_at = now - max(0.0, passed.age_s)
    sealed = passed.sealed
    return Entry(sealed, Digest(key, sealed.card.version, sealed.beat), signed_at, now, signed_at + sealed.card.ttl_s)


def change(held: Entry | None, card: NodeCard) -> Merged:
    """Return what taking `card` in place of `held` means for the view."""
    before = None if held is None or held.sealed.card.leaving else held.sealed.card
    if card.leaving:
        return Merged.LEFT if before is not None else Merged.STALE
    if before is None:
        return Merged.NEW
    if before.version == card.version and before.instance == card.instance:
        return Merged.RENEWED
    return Merged.NEWER if before.instance == card.instance else Merged.RESTARTED


_NO_BEAT = 1 << 62
"""Beat above every beat of a version. In a floor it keeps out the whole version, however often it is signed again."""
CLOCKS_APART_S = 86400
"""Seconds by which a node's clock (the version of its cards) and the CA's (the start of its certificate) may differ. Raising it: certificates are sent
in vain for longer after they were issued; lowering it: a node with a wrong clock needs a second exchange for its new certificate."""


class CardRegistry:
    """The cards that a node holds, one for each id.

    Args:
        revocations: cards of the certificates that they revoke are not taken. Shared with gossip, which merges into it before anything else.
        max_nodes: maximum number of ids held. Floors are kept for four times as many; the oldest are forgotten first.
    """

    def __init__(self, own: NodeId, revocations: Revocations, max_nodes: int = 256) -> None:
        self.own = own
        self.own_key = node_key(own)
        self._revocations = revocations
        self._max_nodes = max_nodes
        self._entries: dict[int, Entry] = {}
        self._digests: set[Digest] = set()
        """Digests of all entries."""
        self.members: dict[NodeId, tuple[str, ...]] = {}
        """Addresses of the other live nodes, by node id."""
        self._floors: dict[int, Floor] = {}
        self._lacking: set[int] = set()
        self.soonest = float("inf")
        """Time before which no card of another node expires."""

    # ---------------------------------------------------------------------------------------------------------------- own card

    @property
    def own_card(self) -> SealedCard | None:
        """The card that this node announced last; None before the first."""
        held = self._entries.get(self.own_key)
        return None if held is None else held.sealed

    def announce(self, sealed: SealedCard, now: float) -> None:
        """Hold this node's own card, new or signed again. Its (version, beat) must be above the last one."""
        last = self.own_card
        if sealed.card.node_id != self.own:
            raise ValueError(f"{self.own} announces a card of {sealed.card.node_id}")
        if last is not None and (sealed.card.version, sealed.beat) <= (last.card.version, last.beat):
            raise ValueError(f"version {sealed.card.version} (beat {sealed.beat}) is not above {last.card.version} ({last.beat})")
        self._hold(received(self.own_key, PassedCard(sealed), now))

    # ------------------------------------------------------------------------------------------------------------------- merge

    def merge(self, passed: PassedCard, now: float) -> Merged:
        """Take a card with a checked signature, if it is newer than all that is known of its node."""
        card = passed.sealed.card
        key = node_key(card.node_id)
        self._lacking.discard(key)
        if key == self.own_key:
            return Merged.OWN
        if self._revocations.voids(card.node_id, passed.sealed.issued_at):
            return Merged.REVOKED
        held = self._live(key, now)
        rank = (card.version, passed.sealed.beat)
        if held is not None and (rank, passed.sealed.sealed) == (held.rank, held.sealed.sealed):
            held.freshen(now - passed.age_s)
            return Merged.STALE
        if held is not None and (rank, passed.sealed.sealed) < (held.rank, held.sealed.sealed):
            return Merged.STALE
        if held is None and rank <= self._floor(key):
            return Merged.STALE
        if held is None and len(self._entries) >= self._max_nodes:
            return Merged.FULL
        entry = received(key, passed, now)
        if entry.expires_at <= now:
            return Merged.EXPIRED
        self._floors.pop(key, None)
        self._hold(entry)
        if card.leaving:
            self.members.pop(card.node_id, None)
        else:
            self.members[card.node_id] = card.addresses
        self.soonest = min(self.soonest, entry.expires_at)
        return change(held, card)

    def lacks_certificate(self, node_id: NodeId) -> None:
        """Leave a node out of the next digests, because a newer card of it could not be checked. The card then comes whole, with its certificate."""
        if node_key(node_id) in self._entries:
            self._lacking.add(node_key(node_id))

    # ----------------------------------------------------------------------------------------------------------------- dropping

    def sweep(self, now: float) -> tuple[NodeCard, ...]:
        """Drop the expired cards and return them, goodbyes too."""
        if now < self.soonest:
            return ()
        ended = [key for key, entry in self._entries.items() if key != self.own_key and entry.expires_at <= now]
        cards = tuple(self._forget(key).sealed.card for key in ended)
        self.soonest = min((entry.expires_at for key, entry in self._entries.items() if key != self.own_key), default=float("inf"))
        return cards

    def end(self, node_id: NodeId, now: float) -> None:
        """Let the card of a node that does not run any more expire now. A newer card brings the node back, and so does a call of its own (`heard`).

        The same card signed again does not, if other nodes pass it on: the node may have signed it just before it ended.
        """
        held = self._entries.get(node_key(node_id))
        if held is not None and node_id != self.own:
            held.expires_at, held.is_over = min(now, held.expires_at), True
            self.soonest = min(self.soonest, held.expires_at)

    def heard(self, node_id: NodeId) -> None:
        """Undo `end` for a node that called or answered, because it runs after all."""
        floor = self._floors.get(node_key(node_id))
        if floor is not None and floor.rank[1] == _NO_BEAT:
            self._floors[node_key(node_id)] = replace(floor, rank=(floor.rank[0], 0))

    def drop_revoked(self) -> None:
        """Drop the cards of certificates that were revoked since. This node's own card stays; other nodes refuse it."""
        void = [
            key
            for key, entry in self._entries.items()
            if key != self.own_key and self._revocations.voids(entry.sealed.card.node_id, entry.sealed.issued_at)
        ]
        for key in void:
            self._forget(key)
        # The revocation itself keeps those cards out, and a node that joins again under the id must not meet a floor.
        self._floors = {key: floor for key, floor in self._floors.items() if not self._revocations.voids(floor.node_id, floor.issued_at)}

    # ----------------------------------------------------------------------------------------------------------------- reading

    def digests(self) -> frozenset[Digest]:
        """Return the digests of all cards held. Call `sweep` first: expired cards are not left out here."""
        if self._lacking:
            return frozenset(digest for digest in self._digests if digest.key not in self._lacking)
        return frozenset(self._digests)

    def compare(self, theirs: Iterable[Digest], now: float, *, complete: bool, bounds: Bounds) -> Difference:
        """Return the cards to hand over to a node that holds `theirs`, and those to ask of it. Call `sweep` first.

        Args:
            complete: True if `theirs` is all that the node holds, so that cards it does not name are handed over too.
        """
        theirs, mine = frozenset(theirs), self.digests()
        cards, wanted = list[PassedCard](), list[Digest]()
        differing = {digest.key: digest for digest in theirs - mine}
        for key, digest in differing.items():
            held = self._entries.get(key)
            if held is None or key in self._lacking:
                if digest[1:] > self._floor(key):
                    wanted.append(Digest(key, 0))
            elif held.digest[1:] < digest[1:]:
                wanted.append(held.digest)
            elif held.digest.version == digest.version:
                cards.append(held.passed(now, with_card=False, with_certificate=False))
            else:
                # Versions are microseconds: a card from before its certificate, or nearly, was signed by an earlier one.
                renewed = digest.version < (held.sealed.issued_at + CLOCKS_APART_S) * 1_000_000
                cards.append(held.passed(now, with_certificate=digest.version == 0 or renewed))
        if complete:
            unknown = sorted(digest.key for digest in self._digests - theirs if digest.key not in differing)
            cards.extend(self._entries[key].passed(now, with_certificate=True) for key in unknown)
        fitting = bounds.fitting([passed.nbytes for passed in cards])
        return Difference(tuple(cards[:fitting]), tuple(wanted), more=len(cards) > fitting)

    def held(self, key: int, version: int) -> SealedCard | None:
        """Return the card of this key and version, or None if it is not held."""
        entry = self._entries.get(key)
        return entry.sealed if entry is not None and entry.digest.version == version else None

    def own_passed(self, now: float) -> PassedCard | None:
        """Return this node's own card, to be passed on whole; None before the first `announce`."""
        held = self._entries.get(self.own_key)
        return None if held is None else held.passed(now, with_certificate=True)

    def snapshot(self, now: float) -> tuple[LiveCard, ...]:
        """Return the cards of live nodes, by id: those that have neither expired nor said goodbye."""
        live = [
            LiveCard(entry.sealed.card, now - entry.signed_at, entry.digest.beat, entry.sealed.trust)
            for key, entry in self._entries.items()
            if not entry.sealed.card.leaving and (key == self.own_key or now < entry.expires_at)
        ]
        return tuple(sorted(live, key=lambda one: one.card.node_id))

    def state(self) -> tuple[object, ...]:
        """Return all that merging decides as one value: registries with equal states are equal."""
        entries = sorted((key, e.rank, e.sealed.sealed, e.signed_at) for key, e in self._entries.items())
        return tuple(entries), tuple(sorted(self._floors.items())), self._revocations.digest

    # ----------------------------------------------------------------------------------------------------------------- private

    def _live(self, key: int, now: float) -> Entry | None:
        held = self._entries.get(key)
        if held is not None and held.expires_at <= now:
            self._forget(key)
            return None
        return held

    def _hold(self, entry: Entry) -> None:
        key = entry.digest.key
        before = self._entries.get(key)
        if before is not None:
            self._digests.discard(before.digest)
        self._entries[key] = entry
        self._digests.add(entry.digest)

    def _forget(self, key: int) -> Entry:
        """Drop a node's card and keep only its floor. Return the entry dropped."""
        held = self._entries.pop(key)
        self._digests.discard(held.digest)
        self._lacking.discard(key)
        self.members.pop(held.sealed.card.node_id, None)
        self._floors.pop(key, None)
        rank = (held.digest.version, _NO_BEAT) if held.is_over else held.rank
        self._floors[key] = Floor(rank, held.sealed.card.node_id, held.sealed.issued_at)
        if len(self._floors) > 4 * self._max_nodes:
            del self._floors[next(iter(self._floors))]
        return held

    def _floor(self, key: int) -> tuple[int, int]:
        floor = self._floors.get(key)
        return (0, 0) if floor is None else floor.rank


def next_version(persisted: int, wall_s: float, above: int = 0) -> int:
    """Return the version of the next card: above every one used (`persisted`) or seen (`above`), and at least the clock in microseconds.

    Write the result to disk before the card is announced.
    """
    return max(persisted + 1, above + 1, int(wall_s * 1e6))
