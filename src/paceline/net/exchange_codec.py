"""ExchangeCapabilities as `fleet.messages` says it, and back.

Law: nothing in a message is believed before its signature was checked here, and what does not hold is left out and told: one forged card
does not cost the other cards their way. Of a peer that lies on and on, the rest is left unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import DecodeError

from paceline.core.errors import FleetError, MalformedMessage
from paceline.core.ids import NodeId
from paceline.fleet.card import SealedCard, SealedList, SealedRevocation
from paceline.fleet.messages import Digest, ExchangeRequest, PassedCard, Reply, Stamp
from paceline.fleet.presets import Measures
from paceline.net.mapper import Codec, Columns, Mapped, from_ms, refuse_with, split_bytes, to_ms
from paceline.net.trust.handlers import check_parts
from paceline.net.wire import fleet_pb2 as wire

PROOF_BYTES = 16
MOST_MEASURED = 4096
"""More cards than any preset's bounds let through."""
CHECKED_AT_ONCE = 8
"""Checked before the event loop does something else: two signatures each, 0.1 ms a signature."""
MOST_LIES = 8
"""Things in one message that may prove nothing before the rest is left unread. Raising it: what a liar can make a node compute."""
MAX_EXCHANGE_BYTES = 2 << 20
"""Of a request or a reply: what is packed for one (`Bounds.max_message_bytes` of cards), and revocations."""
MAX_EXCHANGE_PARTS = 8192
"""Cards and revocations in one: more than any preset's bounds let through."""
Message = TypeVar("Message")
Held = TypeVar("Held")


class CardOpener(Protocol):
    """Checks what is signed."""

    def card(self, signed: wire.SignedCard) -> SealedCard:
        """A card, once certain.

        Raises:
            FleetError: it proves nothing.
        """
        ...

    def revocation(self, signed: wire.SignedRevocation) -> SealedRevocation:
        """A revocation, once certain.

        Raises:
            FleetError: it proves nothing.
        """
        ...

    def revocation_list(self, signed: wire.SignedRevocationList) -> SealedList:
        """The same of a list of them."""
        ...


Refuse = Callable[[FleetError], None]
"""Told of each thing that was left out."""


def measure_request(message: wire.ExchangeCapabilitiesRequest) -> Measures:
    """How much a request holds, counted without decoding what is in it."""
    return _measure(message, message.digests)


def measure_reply(message: wire.ExchangeCapabilitiesResponse) -> Measures:
    """The same of a reply: a callee is bound as a caller is."""
    return _measure(message, message.wanted)


def _measure(message: wire.ExchangeCapabilitiesRequest | wire.ExchangeCapabilitiesResponse, digests: wire.CardDigests) -> Measures:
    return Measures(
        digests=len(digests.node_keys),
        stamps=len(message.stamps.node_keys),
        cards=len(message.cards),
        largest_card_bytes=_largest(message.cards),
        revocations=len(message.revocations),
    )


def _largest(cards: Sequence[wire.PassedCard]) -> int:
    """Bytes of the largest card. Of millions, which are too many whatever their size, only some are looked at."""
    return max((passed.card.ByteSize() for passed in islice(cards, MOST_MEASURED)), default=0)


def write_passed(passed: PassedCard) -> wire.PassedCard:
    """A card on its way; the certificate only where the reader needs it."""
    signed = wire.SignedCard.FromString(passed.sealed.sealed)
    if passed.with_certificate:
        signed.certificate = passed.sealed.certificate
    return wire.PassedCard(card=signed, beat=passed.beat, proof=passed.proof, age_ms=to_ms(passed.age_s))


_REFUSE: Final = refuse_with(MalformedMessage)
_DIGESTS: Final = Columns(Digest, wire.CardDigests, _REFUSE, key=Mapped("node_keys"), version=Mapped("versions"), beat=Mapped("beats"))
_STAMPS: Final = Columns(
    Stamp,
    wire.Stamps,
    _REFUSE,
    key=Mapped("node_keys"),
    version=Mapped("versions"),
    beat=Mapped("beats"),
    proof=Mapped("proofs", None, b"".join, partial(split_bytes, size=PROOF_BYTES)),
    age_s=Mapped("ages_ms", None, lambda ages: map(to_ms, ages), lambda ages: map(from_ms, ages)),
)
_SIGNED: Final = {
    # What is signed is checked by whoever reads, and given.
    "revocations": Mapped(write=lambda told: [wire.SignedRevocation.FromString(one.sealed) for one in told]),
    "cards": Mapped(write=lambda cards: [write_passed(passed) for passed in cards]),
    "revocation_list": Mapped(write=lambda said: wire.SignedRevocationList.FromString(said.sealed)),
}
_COLUMNS: Final = {"stamps": Mapped(write=lambda stamps: _STAMPS.write(stamps) if stamps else None, read=_STAMPS.read, always=True)}
_REQUEST: Final = Codec(
    ExchangeRequest,
    wire.ExchangeCapabilitiesRequest,
    _REFUSE,
    {"digests": Mapped(write=_DIGESTS.write, read=lambda digests: frozenset(_DIGESTS.read(digests))), **_COLUMNS, **_SIGNED},
    given=_SIGNED,
)
_REPLY: Final = Codec(
    Reply,
    wire.ExchangeCapabilitiesResponse,
    _REFUSE,
    {"wanted": Mapped(write=_DIGESTS.write, read=_DIGESTS.read, always=True), **_COLUMNS, **_SIGNED},
    given=_SIGNED,
)
write_request: Final = _REQUEST.write
write_reply: Final = _REPLY.write


def parse_reply(data: bytes) -> wire.ExchangeCapabilitiesResponse:
    """A reply from its bytes.

    Raises:
        MessageTooLarge: it has more parts than any.
        MalformedMessage: it can't be read.
    """
    check_parts(data, MAX_EXCHANGE_PARTS)
    try:
        return wire.ExchangeCapabilitiesResponse.FromString(data)
    except DecodeError as error:
        raise MalformedMessage("A reply can't be read") from error


async def read_request(message: wire.ExchangeCapabilitiesRequest, opener: CardOpener, refuse: Refuse) -> ExchangeRequest:
    """A request, checked.

    Raises:
        MalformedMessage: its columns don't fit together.
    """
    return _REQUEST.read(message, **await _signed(message, opener, refuse))


async def read_reply(message: wire.ExchangeCapabilitiesResponse, opener: CardOpener, refuse: Refuse) -> Reply:
    """A reply, checked.

    Raises:
        MalformedMessage: its columns don't fit together.
    """
    return _REPLY.read(message, **await _signed(message, opener, refuse))


async def _signed(
    message: wire.ExchangeCapabilitiesRequest | wire.ExchangeCapabilitiesResponse, opener: CardOpener, refuse: Refuse
) -> dict[str, Any]:
    """What holds of what is signed."""

    def passed(one: wire.PassedCard) -> PassedCard:
        return PassedCard(opener.card(one.card), one.beat, one.proof, from_ms(one.age_ms))

    return {
        "revocations": await _read(message.revocations, opener.revocation, refuse),
        "cards": await _read(message.cards, passed, refuse),
        "revocation_list": _read_list(message, opener, refuse),
    }


async def _read(messages: Iterable[Message], read: Callable[[Message], Held], refuse: Refuse) -> tuple[Held, ...]:
    """What holds, in order."""
    taken: list[Held] = []
    lies = 0
    for place, message in enumerate(messages):
        if place % CHECKED_AT_ONCE == CHECKED_AT_ONCE - 1:
            await asyncio.sleep(0)
        try:
            taken.append(read(message))
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
    """The id a card claims, unchecked: to look up what is held of it. None where there is no telling."""
    try:
        card = wire.NodeCapability.FromString(signed.card)
    except DecodeError:
        return None
    return NodeId(card.node_id) if card.node_id else None
