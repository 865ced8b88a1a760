"""ExchangeCapabilities as `fleet.messages` says it, and back.

Law: nothing in a message is believed before its signature was checked here, and what does not hold is left out and told: one forged card
does not cost the other cards their way. Of a peer that lies on and on, the rest is left unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError

from paceline.core.errors import FleetError, MalformedMessage
from paceline.core.ids import NodeId
from paceline.fleet.card import SealedCard, SealedList, SealedRevocation
from paceline.fleet.messages import Digest, ExchangeRequest, PassedCard, Reply, Stamp
from paceline.fleet.presets import Measures
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
_MOST_MS = (1 << 32) - 1


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
    return Measures(
        digests=len(message.digests.node_keys),
        stamps=len(message.stamps.node_keys),
        cards=len(message.cards),
        largest_card_bytes=_largest(message.cards),
        revocations=len(message.revocations),
    )


def measure_reply(message: wire.ExchangeCapabilitiesResponse) -> Measures:
    """The same of a reply: a callee is bound as a caller is."""
    return Measures(
        digests=len(message.wanted.node_keys),
        stamps=len(message.stamps.node_keys),
        cards=len(message.cards),
        largest_card_bytes=_largest(message.cards),
        revocations=len(message.revocations),
    )


def _largest(cards: Sequence[wire.PassedCard]) -> int:
    """Bytes of the largest card. Of millions, which are too many whatever their size, only some are looked at."""
    return max((passed.card.ByteSize() for passed in islice(cards, MOST_MEASURED)), default=0)


def write_request(request: ExchangeRequest) -> wire.ExchangeCapabilitiesRequest:
    return wire.ExchangeCapabilitiesRequest(
        revocations=_write_revocations(request.revocations),
        revocations_digest=request.revocations_digest,
        digests=None if request.digests is None else _write_digests(request.digests),
        stamps=_write_stamps(request.stamps),
        cards=[write_passed(passed) for passed in request.cards],
        revocation_list=_write_list(request.revocation_list),
    )


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
    return ExchangeRequest(
        revocations=await _read_revocations(message.revocations, opener, refuse),
        digests=frozenset(_read_digests(message.digests)) if message.HasField("digests") else None,
        stamps=_read_stamps(message.stamps),
        cards=await _read_cards(message.cards, opener, refuse),
        revocations_digest=message.revocations_digest,
        revocation_list=_read_list(message, opener, refuse),
    )


def write_reply(reply: Reply) -> wire.ExchangeCapabilitiesResponse:
    return wire.ExchangeCapabilitiesResponse(
        revocations=_write_revocations(reply.revocations),
        revocations_digest=reply.revocations_digest,
        stamps=_write_stamps(reply.stamps),
        cards=[write_passed(passed) for passed in reply.cards],
        wanted=_write_digests(reply.wanted),
        more=reply.more,
        revocation_list=_write_list(reply.revocation_list),
    )


async def read_reply(message: wire.ExchangeCapabilitiesResponse, opener: CardOpener, refuse: Refuse) -> Reply:
    """A reply, checked.

    Raises:
        MalformedMessage: its columns don't fit together.
    """
    return Reply(
        stamps=_read_stamps(message.stamps),
        wanted=_read_digests(message.wanted),
        revocations=await _read_revocations(message.revocations, opener, refuse),
        cards=await _read_cards(message.cards, opener, refuse),
        revocations_digest=message.revocations_digest,
        more=message.more,
        revocation_list=_read_list(message, opener, refuse),
    )


def write_passed(passed: PassedCard) -> wire.PassedCard:
    """A card on its way; the certificate only where the reader needs it."""
    signed = wire.SignedCard.FromString(passed.sealed.sealed)
    if passed.with_certificate:
        signed.certificate = passed.sealed.certificate
    return wire.PassedCard(card=signed, beat=passed.beat, proof=passed.proof, age_ms=_ms(passed.age_s))


async def _read_cards(messages: Iterable[wire.PassedCard], opener: CardOpener, refuse: Refuse) -> tuple[PassedCard, ...]:
    def read(message: wire.PassedCard) -> PassedCard:
        return PassedCard(opener.card(message.card), message.beat, message.proof, message.age_ms / 1000)

    return await _read(messages, read, refuse)


async def _read_revocations(messages: Iterable[wire.SignedRevocation], opener: CardOpener, refuse: Refuse) -> tuple[SealedRevocation, ...]:
    return await _read(messages, opener.revocation, refuse)


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


def _write_revocations(revocations: Iterable[SealedRevocation]) -> list[wire.SignedRevocation]:
    return [wire.SignedRevocation.FromString(one.sealed) for one in revocations]


def _write_list(said: SealedList | None) -> wire.SignedRevocationList | None:
    return None if said is None else wire.SignedRevocationList.FromString(said.sealed)


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


def _write_digests(digests: Iterable[Digest]) -> wire.CardDigests:
    digests = list(digests)
    return wire.CardDigests(
        node_keys=[one.key for one in digests], versions=[one.version for one in digests], beats=[one.beat for one in digests]
    )


def _read_digests(message: wire.CardDigests) -> tuple[Digest, ...]:
    try:
        return tuple(map(Digest._make, zip(message.node_keys, message.versions, message.beats, strict=True)))
    except ValueError as error:
        raise MalformedMessage("The columns of digests differ in length") from error


def _write_stamps(stamps: Sequence[Stamp]) -> wire.Stamps | None:
    if not stamps:
        return None
    return wire.Stamps(
        node_keys=[one.key for one in stamps],
        versions=[one.version for one in stamps],
        beats=[one.beat for one in stamps],
        ages_ms=[_ms(one.age_s) for one in stamps],
        proofs=b"".join(one.proof for one in stamps),
    )


def _read_stamps(message: wire.Stamps) -> tuple[Stamp, ...]:
    proofs = message.proofs
    cut = [proofs[at : at + PROOF_BYTES] for at in range(0, len(proofs), PROOF_BYTES)]
    try:
        rows = zip(message.node_keys, message.versions, message.beats, cut, message.ages_ms, strict=True)
        return tuple(Stamp(key, version, beat, proof, ms / 1000) for key, version, beat, proof, ms in rows)
    except ValueError as error:
        raise MalformedMessage("The columns of stamps differ in length") from error


def _ms(seconds: float) -> int:
    return min(_MOST_MS, max(0, round(seconds * 1000)))


def node_id_of(signed: wire.SignedCard) -> NodeId | None:
    """The id a card claims, unchecked: to look up what is held of it. None where there is no telling."""
    try:
        card = wire.NodeCapability.FromString(signed.card)
    except DecodeError:
        return None
    return NodeId(card.node_id) if card.node_id else None
