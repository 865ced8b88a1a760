"""Converts ExchangeCapabilities messages between `fleet.messages` and the wire, and checks the signatures of their parts, each signature once.

Law: nothing in a message is believed before its signature was checked here. A part that fails its check is left out and reported, so that one forged
card does not keep out the other cards. After `MOST_LIES` failed cards the other cards are left unread; the same holds for revocations.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

from cachetools import LRUCache
from google.protobuf.message import DecodeError

from paceline.core.clock import Clock
from paceline.core.errors import FleetError, MalformedMessage
from paceline.core.ids import NodeId
from paceline.fleet.card import SealedCard, SealedList, SealedRevocation
from paceline.fleet.eligibility import Voids
from paceline.fleet.messages import Digest, ExchangeRequest, PassedCard, Reply, node_key
from paceline.fleet.presets import Measures
from paceline.net.mapper import Codec, Columns, Mapped, from_ms, refuse_with, to_ms
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.trust.certificates import FleetRoot, Member
from paceline.net.trust.handlers import check_parts
from paceline.net.trust.seals import open_card, open_list, open_revocation
from paceline.net.wire import fleet_pb2 as wire

MOST_MEASURED = 4096
"""Maximum number of cards to measure in a message. It is larger than the number of cards that any preset allows."""
CHECKED_AT_ONCE = 8
"""Parts checked before the event loop may run other tasks. Each has up to two signatures, at 0.1 ms a signature. Raising it: other tasks wait longer."""
MOST_LIES = 8
"""Failed cards after which the other cards of a message are left unread; counted separately for revocations. Raising it: a faulty peer can make a node
compute more."""
MAX_EXCHANGE_BYTES = 2 << 20
"""Maximum size of a request or a reply: its cards (`Bounds.max_message_bytes`) and revocations."""
MAX_EXCHANGE_PARTS = 8192
"""Maximum number of fields in a serialised message. Each card and each revocation is a field; every preset allows fewer of both together."""
Message = TypeVar("Message")
Held = TypeVar("Held")


class CardOpener(Protocol):
    """Checks the signed parts of a message, and converts them."""

    def card(self, passed: wire.PassedCard) -> SealedCard | None:
        """Check a card and return it. A newer signature may come without its card: None if this node does not hold that card any more.

        Raises:
            FleetError: the card fails its check.
        """
        ...

    def revocation(self, signed: wire.SignedRevocation) -> SealedRevocation:
        """Return a revocation after its check.

        Raises:
            FleetError: the revocation fails its check.
        """
        ...

    def revocation_list(self, signed: wire.SignedRevocationList) -> SealedList:
        """Return a revocation list after its check.

        Raises:
            FleetError: the list fails its check.
        """
        ...


Refuse = Callable[[FleetError], None]
"""Function that is called with an error for each part that was left out."""


def measure(message: wire.ExchangeCapabilitiesRequest | wire.ExchangeCapabilitiesResponse) -> Measures:
    """Return the number of digests, cards and revocations in a message, and the size of its largest card, without decoding cards.

    Replies have the same bounds as requests.
    """
    digests = message.digests if isinstance(message, wire.ExchangeCapabilitiesRequest) else message.wanted
    return Measures(
        digests=len(digests.node_keys),
        cards=len(message.cards),
        largest_card_bytes=_largest(message.cards),
        revocations=len(message.revocations),
    )


def _largest(cards: Sequence[wire.PassedCard]) -> int:
    """Return the size of the largest card in bytes. Only the first `MOST_MEASURED` are measured: a message with more is refused for their number."""
    return max((passed.card.ByteSize() for passed in islice(cards, MOST_MEASURED)), default=0)


def write_passed(passed: PassedCard) -> wire.PassedCard:
    """Return a card as its message. The card itself and the certificate are left out if the receiver does not need them."""
    signed = wire.SignedCard.FromString(passed.sealed.sealed)
    if passed.with_certificate:
        signed.certificate = passed.sealed.certificate
    if passed.with_card:
        return wire.PassedCard(card=signed, age_ms=to_ms(passed.age_s))
    signed.ClearField("card")
    card = passed.sealed.card
    return wire.PassedCard(card=signed, age_ms=to_ms(passed.age_s), node_key=node_key(card.node_id), version=card.version)


_REFUSE: Final = refuse_with(MalformedMessage)
_DIGESTS: Final = Columns(Digest, wire.CardDigests, _REFUSE, key=Mapped("node_keys"), version=Mapped("versions"), beat=Mapped("beats"))
_SIGNED: Final = {
    # `read_request` and `read_reply` check the signed parts and pass them to the codec.
    "revocations": Mapped(write=lambda told: [wire.SignedRevocation.FromString(one.sealed) for one in told]),
    "cards": Mapped(write=lambda cards: [write_passed(passed) for passed in cards]),
    "revocation_list": Mapped(write=lambda said: wire.SignedRevocationList.FromString(said.sealed)),
}
_REQUEST: Final = Codec(
    ExchangeRequest,
    wire.ExchangeCapabilitiesRequest,
    _REFUSE,
    {"digests": Mapped(write=_DIGESTS.write, read=lambda digests: frozenset(_DIGESTS.read(digests))), **_SIGNED},
    given=_SIGNED,
    beside=["protocol"],
)
_REPLY: Final = Codec(
    Reply,
    wire.ExchangeCapabilitiesResponse,
    _REFUSE,
    {"wanted": Mapped(write=_DIGESTS.write, read=_DIGESTS.read, always=True), **_SIGNED},
    given=_SIGNED,
    beside=["protocol"],
)


def write_request(request: ExchangeRequest, protocol: int = PROTOCOL_VERSION) -> wire.ExchangeCapabilitiesRequest:
    return _REQUEST.write(request, protocol=protocol)


def write_reply(reply: Reply, protocol: int = PROTOCOL_VERSION) -> wire.ExchangeCapabilitiesResponse:
    return _REPLY.write(reply, protocol=protocol)


def parse_reply(data: bytes) -> wire.ExchangeCapabilitiesResponse:
    """Decode a reply.

    Raises:
        MessageTooLarge: it has more than `MAX_EXCHANGE_PARTS` parts.
        MalformedMessage: its bytes can't be decoded.
    """
    check_parts(data, MAX_EXCHANGE_PARTS)
    try:
        return wire.ExchangeCapabilitiesResponse.FromString(data)
    except DecodeError as error:
        raise MalformedMessage("A reply can't be read") from error


async def read_request(message: wire.ExchangeCapabilitiesRequest, opener: CardOpener, refuse: Refuse) -> ExchangeRequest:
    """Return a request without the signed parts that fail their check.

    Raises:
        MalformedMessage: its columns of digests differ in length.
    """
    return _REQUEST.read(message, **await _signed(message, opener, refuse))


async def read_reply(message: wire.ExchangeCapabilitiesResponse, opener: CardOpener, refuse: Refuse) -> Reply:
    """Return a reply without the signed parts that fail their check.

    Raises:
        MalformedMessage: its columns of digests differ in length.
    """
    return _REPLY.read(message, **await _signed(message, opener, refuse))


async def _signed(
    message: wire.ExchangeCapabilitiesRequest | wire.ExchangeCapabilitiesResponse, opener: CardOpener, refuse: Refuse
) -> dict[str, Any]:
    """Return the signed parts of a message that pass their check, by field."""

    def passed(one: wire.PassedCard) -> PassedCard | None:
        sealed = opener.card(one)
        return None if sealed is None else PassedCard(sealed, from_ms(one.age_ms))

    return {
        "revocations": await _read(message.revocations, opener.revocation, refuse),
        "cards": await _read(message.cards, passed, refuse),
        "revocation_list": _read_list(message, opener, refuse),
    }


async def _read(messages: Iterable[Message], read: Callable[[Message], Held | None], refuse: Refuse) -> tuple[Held, ...]:
    """Return what `read` makes of each message, in order, without None. Its errors go to `refuse`; after `MOST_LIES` errors no more is read."""
    taken: list[Held] = []
    lies = 0
    for place, message in enumerate(messages):
        if place % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1:
            await asyncio.sleep(0)
        try:
            if (held := read(message)) is not None:
                taken.append(held)
        except FleetError as error:
            refuse(error)
            lies += 1
            if lies == MOST_LIES:
                break
    return tuple(taken)


def _read_list(
    message: wire.ExchangeCapabilitiesRequest | wire.ExchangeCapabilitiesResponse, opener: CardOpener, refuse: Refuse
) -> SealedList | None:
    if not message.HasField("revocation_list"):
        return None
    try:
        return opener.revocation_list(message.revocation_list)
    except FleetError as error:
        refuse(error)
        return None


def node_id_of(signed: wire.SignedCard) -> NodeId | None:
    """Return the node id that a card claims, unchecked, to look up its certificate. None if the card can't be decoded or names none."""
    try:
        card = wire.NodeCapability.FromString(signed.card)
    except DecodeError:
        return None
    return NodeId(card.node_id) if card.node_id else None


REVOCATIONS_REMEMBERED = 4096
"""Checked revocations that are kept: as many as one message may hold, because a peer that lacks one sends all of its own, each time."""


class MemberOpener:
    """The `CardOpener` of a member. It checks each signature once and remembers the certificates of nodes.

    Args:
        lacks: called with a node's id if its card came without a certificate and failed its check. The card should then be requested in full.
        held: returns the card with a key and version, if this node holds it. Used for a newer signature that came without its card.
        remembered: number of cards and certificates kept; those used longest ago are forgotten.
    """

    def __init__(
        self,
        root: FleetRoot,
        voids: Voids,
        lacks: Callable[[NodeId], None],
        held: Callable[[int, int], SealedCard | None],
        clock: Clock,
        remembered: int = 1024,
    ) -> None:
        self._root, self._voids, self._lacks, self._held, self._clock = root, voids, lacks, held, clock
        self._certificates: LRUCache[NodeId, SealedCard] = LRUCache(remembered)
        self._revocations: LRUCache[bytes, SealedRevocation] = LRUCache(REVOCATIONS_REMEMBERED)
        self._list: tuple[bytes, SealedList] | None = None
        self._opened: LRUCache[bytes, SealedCard] = LRUCache(remembered)
        """Checked cards by hash. A card that comes from several peers, or repeatedly, costs one check."""

    def card(self, passed: wire.PassedCard) -> SealedCard | None:
        signed = passed.card
        if not signed.card and passed.version:
            holds = self._held(passed.node_key, passed.version)
            if holds is None:
                return None
            whole = wire.SignedCard.FromString(holds.sealed)
            signed = wire.SignedCard(card=whole.card, beat=signed.beat, signature=signed.signature)
        key = hashlib.sha256(signed.SerializeToString(deterministic=True)).digest()
        known = self._opened.get(key)
        if known is not None and not self._voids(known.card.node_id, known.issued_at):
            return known
        claimed = node_id_of(signed)
        by = self._certificates.get(claimed) if claimed is not None else None
        held = b"" if signed.certificate or by is None else by.certificate
        try:
            sealed = open_card(signed, root=self._root, voids=self._voids, now=self._clock.wall(), held=held)
        except FleetError:
            if not signed.certificate and claimed is not None:
                self._lacks(claimed)
            raise
        self._opened[key] = sealed
        self.know(sealed)
        return sealed

    def revocation(self, signed: wire.SignedRevocation) -> SealedRevocation:
        key = hashlib.sha256(signed.SerializeToString(deterministic=True)).digest()
        known = self._revocations.get(key)
        if known is None:
            known = self._revocations[key] = open_revocation(signed, self._root)
        return known

    def revocation_list(self, signed: wire.SignedRevocationList) -> SealedList:
        # The same list comes with every exchange.
        key = signed.SerializeToString(deterministic=True)
        if self._list is None or self._list[0] != key:
            self._list = key, open_list(signed, self._root, self._clock.wall())
        return self._list[1]

    def know(self, sealed: SealedCard) -> None:
        """Remember a card's certificate, unless a newer one is known. An old card with its old certificate may come at any time."""
        known = self._certificates.get(sealed.card.node_id)
        if known is None or known.issued_at <= sealed.issued_at:
            self._certificates[sealed.card.node_id] = sealed

    def met(self, sealed: SealedCard) -> Member:
        """Remember the certificate of a node that showed its own card, and return its contents. A newer certificate that is known already stays.

        Raises:
            NotTrusted: the certificate has expired.
        """
        self.know(sealed)
        return self._root.member(sealed.certificate, self._clock.wall())

    def member(self, node_id: NodeId) -> Member | None:
        """Return the contents of a node's certificate, to check the peer that answers at its addresses; None if it is not known.

        Raises:
            NotTrusted: the certificate has expired.
        """
        known = self._certificates.get(node_id)
        return None if known is None else self._root.member(known.certificate, self._clock.wall())

    def proven(self, node_id: NodeId) -> Member:
        """Return the contents of a node's certificate, like `member`, before a call to the node.

        Raises:
            FleetError: its certificate is not known or has expired.
        """
        member = self.member(node_id)
        if member is None:
            raise FleetError(f"No valid certificate of {node_id} is known")
        return member
