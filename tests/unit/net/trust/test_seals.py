"""Cards and revocations that prove what they say, and all those that don't."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.fleets import TestFleet, card_of, sealed_card

from paceline.core.errors import FleetError, IdentityError, MalformedMessage, MessageTooLarge, NotTrusted, RevokedNode
from paceline.core.ids import NodeId
from paceline.core.model import LayerRange
from paceline.fleet.card import Link, ModelOffer, ModelShape, NodeCard, Role, SealedCard, ShardState
from paceline.net.card_codec import write_card
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import open_card, open_revocation, open_revocations, sign_card
from paceline.net.trust.signing import SignedKind
from paceline.net.wire import fleet_pb2 as wire


def signed(sealed: SealedCard, **changes: Any) -> wire.SignedCard:
    """A card on the wire, with its certificate."""
    message = wire.SignedCard.FromString(sealed.sealed)
    message.certificate = sealed.certificate
    for field, value in changes.items():
        setattr(message, field, value)
    return message


def opened(fleet: TestFleet, message: wire.SignedCard, held: bytes = b"") -> SealedCard:
    return open_card(message, root=fleet.authority.root, voids=fleet.revocations.voids, now=fleet.clock.wall(), held=held)


def lying(identity: Identity, card: NodeCard) -> wire.SignedCard:
    """Any card, signed by a member whatever it says."""
    data = write_card(card)
    return wire.SignedCard(card=data, signature=identity.sign(SignedKind.CARD, data + bytes(4)), certificate=identity.member.certificate)


def test_a_card_is_believed_and_passed_on_as_it_was(fleet: TestFleet) -> None:
    sealed = sealed_card(fleet.member("alice-1"))
    assert opened(fleet, signed(sealed)) == sealed
    # And without its certificate by those who hold that.
    assert opened(fleet, wire.SignedCard.FromString(sealed.sealed), held=sealed.certificate) == sealed


def test_a_card_without_a_known_certificate_is_refused(fleet: TestFleet) -> None:
    sealed = sealed_card(fleet.member("alice-1"))
    with pytest.raises(NotTrusted, match="certificate can't be read"):
        opened(fleet, wire.SignedCard.FromString(sealed.sealed))


def test_a_card_signed_again_proves_its_beat_and_no_other(fleet: TestFleet) -> None:
    alice = fleet.member("alice-1")
    again = sign_card(alice, card_of(alice), beat=300)
    assert opened(fleet, signed(again)) == again
    for beat in (0, 299, 301, 300 << 8, (1 << 32) - 1):
        with pytest.raises(NotTrusted, match="was not signed by alice-1"):
            opened(fleet, signed(again, beat=beat))


@pytest.mark.parametrize("part", ["card", "signature", "certificate"])
def test_a_card_altered_anywhere_is_refused(fleet: TestFleet, part: str) -> None:
    sealed = sealed_card(fleet.member("alice-1"))
    data = getattr(signed(sealed), part)
    for at in range(0, len(data), 7):
        altered = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        with pytest.raises(FleetError):
            opened(fleet, signed(sealed, **{part: altered}))


def test_a_strangers_card_is_refused(fleet: TestFleet) -> None:
    stranger = TestFleet().member("alice-1")
    with pytest.raises(NotTrusted, match="alice-1 was not issued by this fleet's CA") as caught:
        opened(fleet, signed(sealed_card(stranger)))
    assert caught.value.who == "alice-1"


def test_a_member_cant_make_anothers_card(fleet: TestFleet) -> None:
    alice, mallory = fleet.member("alice-1"), fleet.member("mallory-1")
    forged = card_of(alice, version=9)
    # With its own certificate: the id is not the certificate's.
    with pytest.raises(NotTrusted, match="mallory-1 signed a card in the name of alice-1") as caught:
        opened(fleet, lying(mallory, forged))
    assert caught.value.who == "mallory-1"
    # With Alice's certificate: the signature is not hers.
    message = lying(mallory, forged)
    message.certificate = alice.member.certificate
    with pytest.raises(NotTrusted, match="was not signed by alice-1"):
        opened(fleet, message)
    # Without one, for those who hold Alice's.
    message.certificate = b""
    with pytest.raises(NotTrusted, match="was not signed by alice-1"):
        opened(fleet, message, held=alice.member.certificate)
    # And its own code refuses to sign it at all.
    with pytest.raises(NotTrusted, match="mallory-1 can't sign a card of alice-1"):
        sign_card(mallory, forged)


def test_a_signature_on_one_thing_is_none_on_another(fleet: TestFleet) -> None:
    alice = fleet.member("alice-1")
    data = write_card(card_of(alice))
    for kind in (SignedKind.REVOCATION, SignedKind.REVOCATION_LIST):
        with pytest.raises(NotTrusted, match="was not signed by"):
            opened(fleet, wire.SignedCard(card=data, signature=alice.sign(kind, data), certificate=alice.member.certificate))
    # A card that the CA signs is no revocation either.
    with pytest.raises(NotTrusted, match="was not signed by this fleet's CA"):
        open_revocation(wire.SignedRevocation(revocation=b"x", signature=fleet.authority.sign(SignedKind.CARD, b"x")), fleet.authority.root)


def test_a_revoked_nodes_card_is_refused_and_its_next_lifes_is_not(fleet: TestFleet) -> None:
    sealed = sealed_card(fleet.member("alice-1"))
    revocation = fleet.revoke("alice-1")
    with pytest.raises(RevokedNode, match="alice-1 was revoked") as caught:
        opened(fleet, signed(sealed))
    assert caught.value.who == "alice-1"
    again = sealed_card(fleet.member("alice-1", at=revocation.revocation.not_after + 1))
    assert opened(fleet, signed(again)).card.node_id == "alice-1"


def test_an_expired_certificates_card_is_refused(fleet: TestFleet) -> None:
    alice = fleet.member("alice-1")
    with pytest.raises(NotTrusted, match="has expired"):
        open_card(signed(sealed_card(alice)), root=fleet.authority.root, voids=fleet.revocations.voids, now=alice.member.expires_at + 1.0)


def test_the_cas_own_certificate_signs_no_card(fleet: TestFleet) -> None:
    data = write_card(card_of(fleet.member("alice-1")))
    message = wire.SignedCard(
        card=data, signature=fleet.authority.sign(SignedKind.CARD, data + bytes(4)), certificate=fleet.authority.root.der
    )
    with pytest.raises(NotTrusted):
        opened(fleet, message)


OFFER = ModelOffer("m", Role.VERIFIER, "int4", 10.0, 100.0, shape=ModelShape(1, 1, 1, 1, 1, 1))
LINK = Link(NodeId("bob-1"), "10.0.0.1:1", 0.1, 1e6)
CHANGES: dict[str, dict[str, Any]] = {
    "id": {"node_id": "Alice 1"},
    "version": {"version": 1 << 63},
    "no TTL": {"ttl_s": 0},
    "endless TTL": {"ttl_s": 1 << 31},
    "time": {"announced_at": -1},
    "no nonce": {"instance": b""},
    "long nonce": {"instance": bytes(65)},
    "address": {"addresses": ("10.0.0.1",)},
    "port": {"addresses": ("10.0.0.1:65536",)},
    "line break": {"device": "a\nb"},
    "terminal": {"software": "\x1b[2J"},
    "long text": {"platform": "x" * 301},
    "memory": {"memory_total_bytes": (1 << 64) - 1},
    "many addresses": {"addresses": ("a:1",) * 65},
    "many links": {"links": (LINK,) * 1025},
    "no model name": {"models": (replace(OFFER, model_id=""),)},
    "negative rate": {"models": (replace(OFFER, tokens_per_second=-1.0),)},
    "NaN rate": {"models": (replace(OFFER, prefill_tokens_per_second=math.nan),)},
    "endless rate": {"models": (replace(OFFER, tokens_per_second=math.inf),)},
    "huge model": {"models": (replace(OFFER, size_bytes=1 << 63),)},
    "many layers": {"models": (replace(OFFER, shape=replace(OFFER.shape, n_layers=1 << 31)),)},
    "link to nobody": {"links": (replace(LINK, to=NodeId("")),)},
    "link to nowhere": {"links": (replace(LINK, address="x"),)},
    "NaN link": {"links": (replace(LINK, rtt_s=math.nan),)},
    "negative link": {"links": (replace(LINK, bytes_per_s=-1.0),)},
}


@pytest.mark.parametrize("changes", [pytest.param(value, id=key) for key, value in CHANGES.items()])
def test_a_member_cant_say_what_no_node_says(fleet: TestFleet, changes: dict[str, Any]) -> None:
    alice = fleet.member("alice-1")
    good = replace(card_of(alice), models=(OFFER,), links=(LINK,))
    assert opened(fleet, lying(alice, good)).card == good
    with pytest.raises((MalformedMessage, NotTrusted)) as caught:
        opened(fleet, lying(alice, replace(good, **changes)))
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": LayerRange(0, 0)},
        {"layers": LayerRange(9, 8)},
        {"layers": LayerRange(0, 31)},
        {"max_streams": 0},
        {"max_streams": 1 << 17},
        {"streams": 1 << 17},
        {"queue_depth": (1 << 31) + 1},
        {"memory_bytes": 1 << 63},
    ],
)
def test_a_shard_says_nothing_that_no_shard_says(fleet: TestFleet, changes: dict[str, Any]) -> None:
    alice = fleet.member("alice-1")
    shard = ShardState(LayerRange(0, 30), 4, 1, 2, 1 << 20)
    offer = ModelOffer("m", Role.SHARD, "int4", shape=ModelShape(30, 576, 1, 1, 1, 512), shard=shard)
    good = replace(card_of(alice), models=(offer,), serves_shards=True, shard_memory_bytes=1 << 30)
    assert opened(fleet, lying(alice, good)).card == good
    with pytest.raises(MalformedMessage):
        opened(fleet, lying(alice, replace(good, models=(replace(offer, shard=replace(shard, **changes)),))))


def test_too_large_a_card_is_not_even_read(fleet: TestFleet) -> None:
    alice = fleet.member("alice-1")
    with pytest.raises(MessageTooLarge, match="the bound is 65536"):
        opened(fleet, lying(alice, replace(card_of(alice), device="x" * 70000)))


def test_revocations_are_the_cas_alone(fleet: TestFleet) -> None:
    sealed = fleet.revoke("alice-1")
    message = wire.SignedRevocation.FromString(sealed.sealed)
    root = fleet.authority.root
    assert open_revocation(message, root) == sealed
    assert open_revocations([sealed.sealed], root) == (sealed,)
    with pytest.raises(NotTrusted, match="not signed by this fleet's CA"):
        open_revocation(wire.SignedRevocation(revocation=message.revocation + b"\x10\x01", signature=message.signature), root)
    bob = fleet.member("bob-1")
    with pytest.raises(NotTrusted):
        open_revocation(
            wire.SignedRevocation(revocation=message.revocation, signature=bob.sign(SignedKind.REVOCATION, message.revocation)), root
        )
    with pytest.raises(IdentityError, match="revocations kept on this machine are damaged"):
        open_revocations([TestFleet().revoke("alice-1").sealed], root)
    for said in (
        b"\xff",
        wire.Revocation(node_id="", not_after_unix=1).SerializeToString(),
        wire.Revocation(node_id="a", not_after_unix=-1).SerializeToString(),
        wire.Revocation(node_id="a", not_after_unix=1 << 62).SerializeToString(),
        bytes(513),
    ):
        with pytest.raises(MalformedMessage):
            open_revocation(wire.SignedRevocation(revocation=said, signature=fleet.authority.sign(SignedKind.REVOCATION, said)), root)
