"""A member that lies to a running node, over real mTLS: nothing of it is believed, all of it is in the log, with its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from tests.fakes.fleets import TestFleet, card_of, sealed_card
from tests.unit.net.member.nodes import in_loop, make_node, running, until, until_seen

from paceline.core.errors import MalformedMessage, MessageTooLarge
from paceline.net.card_codec import write_card
from paceline.net.channels import Purpose
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.rpc_faults import error_of
from paceline.net.trust.identity import Identity
from paceline.net.trust.signing import SignedKind
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import CapabilityServiceStub

EXCHANGE = "/paceline.v1.CapabilityService/ExchangeCapabilities"


def lie(signer: Identity, about: Identity, certificate: bytes, version: int = 1 << 60) -> wire.SignedCard:
    """A card of `about`, signed by somebody."""
    data = write_card(card_of(about, version=version))
    return wire.SignedCard(card=data, signature=signer.sign(SignedKind.CARD, data + bytes(4)), certificate=certificate)


@in_loop
async def test_forged_cards_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = TestFleet()
    a = make_node(fleet, tmp_path, "a")
    async with running(a):
        b = make_node(fleet, tmp_path, "b", a)
        mallory = make_node(fleet, tmp_path, "mallory", a)
        async with running(b):
            await until_seen(a, "a", "b")
            card = a.view().get(b.identity.node_id)
            assert card is not None
            stub = CapabilityServiceStub(mallory.pool.get(Purpose.EXCHANGE, a.addresses[0], a.identity.member))
            own, bee = mallory.identity, b.identity
            stranger = TestFleet().member("b")
            altered = lie(own, own, own.member.certificate)
            altered.card += b"\x50\x01"
            lies = {
                "with the certificate of b was not signed by b": lie(own, bee, bee.member.certificate),
                "mallory signed a card in the name of b": lie(own, bee, own.member.certificate),
                "The certificate of b was not issued by this fleet's CA": lie(stranger, bee, stranger.member.certificate),
                "with the certificate of mallory was not signed by mallory": altered,
            }
            for told, signed in lies.items():
                await stub.ExchangeCapabilities(
                    wire.ExchangeCapabilitiesRequest(protocol=PROTOCOL_VERSION, cards=[wire.PassedCard(card=signed)])
                )
                assert f"refused mallory: {'A card ' if told.startswith('with') else ''}{told}" in caplog.text
            revocation = wire.Revocation(node_id="b", revoked_at_unix=1, not_after_unix=1 << 39).SerializeToString()
            await stub.ExchangeCapabilities(
                wire.ExchangeCapabilitiesRequest(
                    protocol=PROTOCOL_VERSION,
                    revocations=[wire.SignedRevocation(revocation=revocation, signature=own.sign(SignedKind.REVOCATION, revocation))],
                )
            )
            assert "refused mallory: A revocation was not signed by this fleet's CA" in caplog.text
            after = a.view().get(b.identity.node_id)
            assert after is not None
            assert after.card == card.card
            assert a.view().ids == ("a", "b")
            assert a.view().revoked == ()
            # What it truly signed is taken, beside a lie in the same message.
            good = sealed_card(own, version=2)
            message = wire.SignedCard.FromString(good.sealed)
            message.certificate = good.certificate
            both = [wire.PassedCard(card=altered), wire.PassedCard(card=message)]
            await stub.ExchangeCapabilities(wire.ExchangeCapabilitiesRequest(protocol=PROTOCOL_VERSION, cards=both))
            await until(lambda: "mallory" in a.view().ids)
            await mallory.pool.close()


@in_loop
async def test_what_no_node_would_say_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fleet = TestFleet()
    a, mallory = make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "mallory")
    async with running(a):
        stub = CapabilityServiceStub(mallory.pool.get(Purpose.EXCHANGE, a.addresses[0], a.identity.member))
        own = mallory.identity
        data = write_card(replace(card_of(own), device="\x1b]0;pwned\x07"))
        signed = wire.SignedCard(card=data, signature=own.sign(SignedKind.CARD, data + bytes(4)), certificate=own.member.certificate)
        await stub.ExchangeCapabilities(wire.ExchangeCapabilitiesRequest(protocol=PROTOCOL_VERSION, cards=[wire.PassedCard(card=signed)]))
        assert a.view().ids == ("a",)
        assert "refused mallory: The card of mallory: device can't be" in caplog.text
        assert "\x1b" not in caplog.text
        await mallory.pool.close()


@in_loop
async def test_bytes_that_are_no_request_and_requests_that_swell_are_refused_unread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = TestFleet()
    a, mallory = make_node(fleet, tmp_path, "a"), make_node(fleet, tmp_path, "mallory")
    async with running(a):
        raw = mallory.pool.get(Purpose.EXCHANGE, a.addresses[0], a.identity.member).unary_unary(EXCHANGE)
        empty_card = b"\x2a\x00"
        assert len(wire.ExchangeCapabilitiesRequest.FromString(empty_card * 3).cards) == 3
        for data, kind in (
            (b"\xff\xff", MalformedMessage),
            (empty_card * 1_060_000, MessageTooLarge),  # 2.1 MB that would take 70
            (empty_card * 300_000, MessageTooLarge),  # counted, not decoded
            (empty_card * 300, MessageTooLarge),  # decoded, not opened
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await raw(data, timeout=100)
            assert isinstance(error_of(refused.value, "a"), kind)
        assert "refused 127.0.0.1 (port" in caplog.text
        assert "refused mallory: a peer sent 300 cards" in caplog.text
        await mallory.pool.close()
