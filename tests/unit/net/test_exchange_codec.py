"""What nodes tell one another survives the wire; columns that don't fit together are refused, and one forged card costs only itself."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from collections import Counter

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.fleets import TestFleet, sealed_card

from paceline.core.clock import SystemClock
from paceline.core.errors import FleetError, MalformedMessage, MessageTooLarge, NotTrusted
from paceline.fleet.card import SealedCard, SealedRevocation
from paceline.fleet.messages import RENEWAL_BYTES, Digest, ExchangeRequest, PassedCard, Reply, node_key
from paceline.net.exchange_codec import (
    MAX_EXCHANGE_PARTS,
    MOST_LIES,
    MemberOpener,
    parse_reply,
    read_reply,
    read_request,
    write_passed,
    write_reply,
    write_request,
)
from paceline.net.trust.certificates import FleetRoot
from paceline.net.trust.seals import open_revocation, sign_card
from paceline.net.wire import fleet_pb2 as wire

FLEET = TestFleet()
CARDS = [sealed_card(FLEET.member(name), version=7) for name in ("a", "b", "c")]
words = st.integers(0, (1 << 64) - 1)
short = st.integers(0, (1 << 32) - 1)
ages = st.integers(0, 1 << 31).map(lambda ms: ms / 1000)
digests = st.builds(Digest, words, words, short)
cards = st.builds(PassedCard, st.sampled_from(CARDS), ages)
revocations = st.lists(st.sampled_from([FLEET.revoke("x"), FLEET.revoke("y")]), max_size=2, unique=True).map(tuple)
requests = st.builds(
    ExchangeRequest,
    st.none() | st.frozensets(digests, max_size=4),
    st.lists(cards, max_size=4).map(tuple),
    revocations,
    st.binary(max_size=16),
)
replies = st.builds(
    Reply,
    st.lists(cards, max_size=4).map(tuple),
    st.lists(digests, max_size=4).map(tuple),
    revocations,
    st.binary(max_size=16),
    st.booleans(),
)


def opener(lacking: list[str] | None = None, held: SealedCard | None = None) -> MemberOpener:
    told = [] if lacking is None else lacking
    here = {} if held is None else {(node_key(held.card.node_id), held.card.version): held}
    return MemberOpener(FLEET.authority.root, lambda _, __: False, told.append, lambda *which: here.get(which), SystemClock())


def fail(error: FleetError) -> None:
    raise AssertionError(error)


@given(requests)
def test_a_request_survives_the_wire(request: ExchangeRequest) -> None:
    message = wire.ExchangeCapabilitiesRequest.FromString(write_request(request).SerializeToString())
    assert asyncio.run(read_request(message, opener(), fail)) == request


@given(replies)
def test_a_reply_survives_the_wire(reply: Reply) -> None:
    message = wire.ExchangeCapabilitiesResponse.FromString(write_reply(reply).SerializeToString())
    assert asyncio.run(read_reply(message, opener(), fail)) == reply


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage, DecodeError):
        message = wire.ExchangeCapabilitiesRequest.FromString(data)
        refused: list[FleetError] = []
        taken = asyncio.run(read_request(message, opener(), refused.append))
        assert not taken.cards
        assert len(refused) == min(MOST_LIES, len(message.cards)) + min(MOST_LIES, len(message.revocations))


@pytest.mark.parametrize(
    "message",
    [
        wire.ExchangeCapabilitiesRequest(digests=wire.CardDigests(node_keys=[1, 2], versions=[1], beats=[0, 0])),
        wire.ExchangeCapabilitiesRequest(digests=wire.CardDigests(node_keys=[1], versions=[1])),
    ],
)
def test_columns_of_different_lengths_are_refused(message: wire.ExchangeCapabilitiesRequest) -> None:
    with pytest.raises(MalformedMessage):
        asyncio.run(read_request(message, opener(), fail))


def test_a_card_without_its_certificate_is_read_by_the_one_that_is_known_and_else_asked_for() -> None:
    bare = write_passed(PassedCard(CARDS[0], with_certificate=False))
    assert not bare.card.certificate
    request = wire.ExchangeCapabilitiesRequest(cards=[bare])
    lacking: list[str] = []
    one = opener(lacking)
    refused: list[FleetError] = []
    assert asyncio.run(read_request(request, one, refused.append)).cards == ()
    assert lacking == ["a"]
    assert len(refused) == 1
    one.know(CARDS[0])
    assert [passed.sealed for passed in asyncio.run(read_request(request, one, fail)).cards] == [CARDS[0]]


def test_a_newer_signature_alone_renews_the_card_that_is_held_and_no_other() -> None:
    alice = FLEET.member("alice")
    held, other = sealed_card(alice, version=7), sealed_card(FLEET.member("alice"), version=7)
    again = sign_card(alice, held.card, beat=2)
    bare = write_passed(PassedCard(again, 1.5, with_card=False, with_certificate=False))
    assert bare.ByteSize() <= RENEWAL_BYTES
    request = wire.ExchangeCapabilitiesRequest(cards=[bare])
    # Held, not held any more, held in another version, held from another process of the id.
    assert read_with(opener(held=held), held, request) == ((PassedCard(again, 1.5),), [])
    assert read_with(opener(), None, request) == ((), [])
    assert read_with(opener(held=sealed_card(alice, version=8)), held, request) == ((), [])
    lacking: list[str] = []
    taken, refused = read_with(opener(lacking, held=other), other, request)
    assert (taken, lacking, len(refused)) == ((), ["alice"], 1)


def read_with(
    one: MemberOpener, known: SealedCard | None, request: wire.ExchangeCapabilitiesRequest
) -> tuple[tuple[PassedCard, ...], list[FleetError]]:
    """The cards taken of a request by a node that knows a certificate, and what it refused."""
    refused: list[FleetError] = []
    if known is not None:
        one.know(known)
    return asyncio.run(read_request(request, one, refused.append)).cards, refused


def test_a_forged_card_does_not_cost_the_others_their_way() -> None:
    messages = [write_passed(PassedCard(card)) for card in CARDS]
    messages[1].card.card += b"\x60\x09"  # a higher version
    refused: list[FleetError] = []
    request = asyncio.run(read_request(wire.ExchangeCapabilitiesRequest(cards=messages), opener(), refused.append))
    assert [passed.sealed.card.node_id for passed in request.cards] == ["a", "c"]
    assert len(refused) == 1


def test_of_a_peer_that_lies_on_and_on_the_rest_is_left_unread() -> None:
    checked: list[str] = []

    class Counting:
        def card(self, passed: wire.PassedCard) -> SealedCard:
            checked.append("card")
            raise NotTrusted("a lie", who="mallory")

        def revocation(self, signed: wire.SignedRevocation) -> SealedRevocation:
            checked.append("revocation")
            raise NotTrusted("a lie", who="mallory")

    message = wire.ExchangeCapabilitiesRequest(
        cards=[wire.PassedCard(age_ms=1)] * 100, revocations=[wire.SignedRevocation(revocation=b"x")] * 4096
    )
    asyncio.run(read_request(message, Counting(), lambda _: None))
    assert Counter(checked) == {"card": MOST_LIES, "revocation": MOST_LIES}


def test_a_revocation_that_comes_again_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[wire.SignedRevocation] = []

    def counting(signed: wire.SignedRevocation, root: FleetRoot) -> SealedRevocation:
        checked.append(signed)
        return open_revocation(signed, root)

    monkeypatch.setattr("paceline.net.exchange_codec.open_revocation", counting)
    request = ExchangeRequest(revocations=(FLEET.revoke("z"),))
    one = opener()
    for _ in range(3):
        assert asyncio.run(read_request(write_request(request), one, fail)) == request
    assert len(checked) == 1


def test_a_reply_of_empty_parts_is_refused_before_it_swells() -> None:
    swelling = b"\x22\x00" * (1 << 20)
    assert len(wire.ExchangeCapabilitiesResponse.FromString(swelling[:6]).cards) == 3
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLarge, match=str(MAX_EXCHANGE_PARTS)):
            parse_reply(swelling)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(replies)
def test_what_nodes_say_can_be_counted(reply: Reply) -> None:
    message = write_reply(reply)
    assert parse_reply(message.SerializeToString()) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_reply_or_refused(data: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        parse_reply(data)


def test_many_cards_let_the_event_loop_go_on() -> None:
    async def read() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        message = wire.ExchangeCapabilitiesRequest(cards=[write_passed(PassedCard(CARDS[0]))] * 64)
        await read_request(message, opener(), fail)
        counting.cancel()
        return turns

    assert asyncio.run(read()) >= 4
