"""The fleet as one node sees it at one moment, the revocations it knows, and the uses for which each node is trusted. Placement computes from this view
alone, and no other module decides which nodes may be asked, believed, fetched from or shown a prompt.

Law: pure. Code that picks a node takes `Eligible` cards, which `TrustPolicy.eligible` makes for one use. Code that opens a channel or serves a caller
calls `check` with the peer's certificate. So a way of sharing work that forgets to ask has no cards and no channel.
docs/trust.md says what each use shows of a prompt.
Only the CA adds revocations, and none is taken back. Per node the one with the latest `not_after` is kept. It revokes certificates issued up to then;
a certificate issued later under the same id is valid. Merging is a join.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, Literal, Protocol, TypeVar

from paceline.core.errors import NotTrusted, RevokedNode
from paceline.core.ids import NodeId, Trust
from paceline.fleet.card import NodeCard, SealedList, SealedRevocation

Voids = Callable[[NodeId, int], bool]
"""Function of a node id and a time of issue (Unix seconds) that returns True if the node's certificate is revoked, such as `Revocations.voids`."""


class Use(Enum):
    """A service that a peer is asked for, or that it asks of this node."""

    ANSWER = "answering requests"
    """The peer sees the whole prompt, decides the answer, and is believed about the model's tokenizer and template."""
    DRAFT = "drafting"
    """The peer sees prompt and answer as tokens, and decides nothing."""
    HOLD_LAYERS = "holding layers"
    """The peer sees activations, from which text can be guessed, and computes a part of the answer."""
    GIVE_WEIGHTS = "giving weights"
    """The peer is believed, where no hub is reachable, about which files a model's name stands for."""
    TAKE_WEIGHTS = "taking weights"
    """The peer gets the files of any model of this node, private ones included."""
    HAVE_LAYERS_RUN = "having layers run"
    """The peer uses this machine's time and memory, and sends activations to it."""
    HAVE_RANKS_RUN = "having tensor ranks run"
    """The peer uses time and memory as for layers, but in a process that trusts the stream of its leader, so guests never may."""
    SHARE_KV = "sharing KV"
    """The peer learns whether a prompt that it knows was asked here lately, and its KV decides answers."""
    REACH_OUTSIDE = "asking engines outside of the home network"
    """The peer uses what this machine's owner may pay for: an engine of somebody else, with the owner's key."""


COMPUTES: Final = frozenset({Use.ANSWER, Use.HOLD_LAYERS, Use.SHARE_KV})
"""Uses in which the results of a node decide an answer."""
WRONG_S: Final = 3600.0
"""Seconds for which a node is left out of the uses in `COMPUTES` after a check of its work gave another result. Raising it: a node that only passed on
wrong KV of another is unavailable for longer; lowering it: a broken machine decides more answers."""


class Peer(Protocol):
    """A node as its certificate shows it."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def trust(self) -> Trust: ...
    @property
    def issued_at(self) -> int: ...


U_co = TypeVar("U_co", bound=Use, covariant=True)


@dataclass(frozen=True, slots=True)
class Eligible(Generic[U_co]):
    """Cards of the nodes that may be put to one use."""

    use: U_co
    own: NodeId
    cards: tuple[NodeCard, ...]
    """Cards in order of node id, with this node's own."""


MayAnswer = Eligible[Literal[Use.ANSWER]]
MayDraft = Eligible[Literal[Use.DRAFT]]
MayGiveWeights = Eligible[Literal[Use.GIVE_WEIGHTS]]
MayShareKv = Eligible[Literal[Use.SHARE_KV]]


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """The least trust for each use. Lowering one widens what guests see or supply."""

    answer: Trust = Trust.MEMBER
    host: Trust = Trust.MEMBER
    source: Trust = Trust.MEMBER
    taker: Trust = Trust.MEMBER
    caller: Trust = Trust.MEMBER
    kv: Trust | None = None
    """None: the level of `answer`, but at least member."""
    outside: Trust = Trust.MEMBER

    def least(self, use: Use) -> Trust:
        """Return the least trust that a use requires."""
        match use:
            case Use.ANSWER | Use.DRAFT:
                return self.answer
            case Use.HOLD_LAYERS:
                return self.host
            case Use.GIVE_WEIGHTS:
                return self.source
            case Use.TAKE_WEIGHTS:
                return self.taker
            case Use.HAVE_LAYERS_RUN:
                return self.caller
            case Use.HAVE_RANKS_RUN:
                return max(self.caller, Trust.MEMBER, key=list(Trust).index)
            case Use.SHARE_KV:
                return self.kv or max(self.answer, Trust.MEMBER, key=list(Trust).index)
            case Use.REACH_OUTSIDE:
                return self.outside

    def allows(self, trust: Trust, use: Use) -> bool:
        """Return True if a node of this trust that is not revoked may be put to a use."""
        return trust.reaches(self.least(use))

    def check(self, peer: Peer, use: Use, voids: Voids) -> None:
        """Check a peer before it is called or served.

        Raises:
            NotTrusted: the peer was revoked, or is not trusted enough.
        """
        if voids(peer.node_id, peer.issued_at):
            raise RevokedNode(f"{peer.node_id} was revoked", who=peer.node_id)
        self.check_trust(peer, use)

    def check_trust(self, peer: Peer, least: Use | Trust) -> None:
        """Check a peer that is not revoked against a level, or against that of a use.

        Raises:
            NotTrusted: the peer is trusted less.
        """
        level, what = (self.least(least), least.value) if isinstance(least, Use) else (least, "this call")
        if not peer.trust.reaches(level):
            raise NotTrusted(f"{peer.node_id} is a {peer.trust} of the fleet, and {what} takes a {level} or more", who=peer.node_id)

    def eligible(self, view: FleetView, use: U_co, wrong: Collection[NodeId] = ()) -> Eligible[U_co]:
        """Return the nodes of a view that may be put to a use, always with this node. The view has no revoked nodes.

        Args:
            wrong: nodes with work that gave another result when it was computed again. The uses in `COMPUTES` leave them out.
        """
        left_out = frozenset(wrong) if use in COMPUTES else frozenset[NodeId]()
        nodes = [
            live
            for live in view.nodes
            if live.card.node_id == view.own or (live.card.node_id not in left_out and self.allows(live.trust, use))
        ]
        return Eligible(use, view.own, tuple(live.card for live in nodes))


@dataclass(frozen=True, slots=True)
class LiveCard:
    """A card that has not expired."""

    card: NodeCard
    age_s: float
    """Seconds since its node last signed it, from 0 to the card's TTL; about 0 for this node's own card."""
    beat: int = 0
    """Number of times that its node has signed it again."""
    trust: Trust = Trust.MEMBER
    """Trust that the node's certificate grants."""


@dataclass(frozen=True, slots=True)
class Clash:
    """A conflict about this node's id: another process runs under it, as when two machines have copies of one home folder."""

    node_id: NodeId
    addresses: tuple[str, ...]
    """This node's own addresses."""
    other_addresses: tuple[str, ...]
    """Addresses of the other process."""
    seen_s_ago: float
    """Seconds since this node last signed a card above the other one's."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Live cards by id, and what is wrong with the fleet. Ids are in order, so equal views print alike."""

    own: NodeId
    nodes: tuple[LiveCard, ...]
    """Ordered by node id; this node's own card among them once it was announced."""
    clashes: tuple[Clash, ...] = ()
    """The conflict about this node's own id, if there is one. Conflicts about other ids are shown on the nodes that have them."""
    revoked: tuple[NodeId, ...] = ()

    @property
    def ids(self) -> tuple[NodeId, ...]:
        return tuple(live.card.node_id for live in self.nodes)

    @property
    def cards(self) -> tuple[NodeCard, ...]:
        """The cards that placement reads. They are equal on every node once gossip has converged; ages are not."""
        return tuple(live.card for live in self.nodes)

    @property
    def trust(self) -> dict[NodeId, Trust]:
        return {live.card.node_id: live.trust for live in self.nodes}

    def get(self, node_id: NodeId) -> LiveCard | None:
        return next((live for live in self.nodes if live.card.node_id == node_id), None)


class Revocations:
    """The set of revocations a node knows."""

    def __init__(self, known: Iterable[SealedRevocation] = ()) -> None:
        self._by_id: dict[NodeId, SealedRevocation] = {}
        self.digest = b""
        """First 16 bytes of a SHA-256 over the set; empty for the empty set."""
        self.completed: SealedList | None = None
        """The newest list by which the CA called this set complete; None before one came. It is kept when revocations are added later."""
        self.merge(known)

    def merge(self, revocations: Iterable[SealedRevocation]) -> tuple[SealedRevocation, ...]:
        """Keep each revocation that reaches further than the one held for its node. Return the new ones. The caller has checked the signatures."""
        new: list[SealedRevocation] = []
        for sealed in revocations:
            held = self._by_id.get(sealed.revocation.node_id)
            if held is None or _reach(held) < _reach(sealed):
                self._by_id[sealed.revocation.node_id] = sealed
                new.append(sealed)
        if new:
            digest = hashlib.sha256()
            for sealed in self.all():
                digest.update(len(sealed.sealed).to_bytes(4, "big") + sealed.sealed)
            self.digest = digest.digest()[:16]
        return tuple(new)

    def complete(self, said: SealedList | None) -> bool:
        """Take the CA's statement that exactly this set is complete, if it is newer than the one held. The greater bytes win within one second.

        Returns:
            True if it was taken.
        """
        held = self.completed and (self.completed.said.signed_at, self.completed.sealed)
        if said is None or said.said.digest != self.digest or (held and (said.said.signed_at, said.sealed) <= held):
            return False
        self.completed = said
        return True

    def voids(self, node_id: NodeId, issued_at: int) -> bool:
        """Return True if a certificate of `node_id`, issued at `issued_at` (Unix seconds), is revoked."""
        held = self._by_id.get(node_id)
        return held is not None and issued_at <= held.revocation.not_after

    def all(self) -> tuple[SealedRevocation, ...]:
        """Return every revocation, in order of node id."""
        return tuple(self._by_id[node_id] for node_id in sorted(self._by_id))

    @property
    def ids(self) -> tuple[NodeId, ...]:
        return tuple(sorted(self._by_id))

    def __len__(self) -> int:
        return len(self._by_id)


def _reach(sealed: SealedRevocation) -> tuple[int, bytes]:
    """Return the rank of a revocation; the greater one wins. The bytes break ties, so that every node keeps the same one."""
    return sealed.revocation.not_after, sealed.sealed
