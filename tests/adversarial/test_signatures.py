"""Signatures that are none: borrowed from TLS, forged, or on what nobody would say."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.adversarial.handshakes import ask_for_signature
from tests.fakes.fleets import TestFleet, card_of
from tests.unit.net.trust.joining import IssuerNode, request_for
from tests.unit.net.trust.served import served

from paceline.core.errors import FleetError, IdentityError, JoinRefused, MalformedMessage, NotTrusted, TokenError
from paceline.core.ids import NodeId
from paceline.fleet.card import Revocation
from paceline.net.card_codec import write_card
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.certificates import JOIN_NAME, NODE_NAME, make_key, make_request, read_join_certificate
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import JoinAttempt
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.seals import open_card, open_revocation, sign_revocation
from paceline.net.trust.signing import CONTEXT, SignedKind, verifies
from paceline.net.trust.tokens import JoinToken
from paceline.net.wire import fleet_pb2 as wire


@pytest.fixture
def fleet() -> TestFleet:
    return TestFleet()


def test_row_3_tls_1_2_is_spoken_at_no_port(fleet: TestFleet, tmp_path: Path) -> None:
    async def main() -> None:
        issuer = IssuerNode.make(tmp_path / "fleet")
        issuer.mint()
        listener = TensorListener(fleet.member("a-1"), fleet.revocations.voids, fleet.clock, Refusals())
        tensors = await asyncio.to_thread(listener.start, "127.0.0.1")
        try:
            async with issuer.hosted(), served(fleet) as node:
                for port, name in ((issuer.port, JOIN_NAME), (node.port, NODE_NAME), (tensors, NODE_NAME)):
                    assert await asyncio.to_thread(ask_for_signature, port, secrets.token_bytes(32), name.encode()) is None
        finally:
            await asyncio.to_thread(listener.close)

    asyncio.run(main())


@contextmanager
def old_server(secret: bytes) -> Iterator[int]:
    """A server of TLS 1.2 with a key of the fleet, as no port of it is."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, pytest.raises(OSError):
                context.wrap_socket(connection, server_side=True)

        with tempfile.NamedTemporaryFile() as file:
            file.write(secret)
            file.flush()
            context.load_cert_chain(file.name)
        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def test_row_4_what_tls_signs_is_no_revocation_and_no_card(fleet: TestFleet) -> None:
    """Even if some port spoke TLS 1.2 with the keys that sign such things."""
    alice = fleet.member("alice-1")
    with old_server(fleet.authority.to_pem()) as port:
        borrowed = ask_for_signature(port, CONTEXT[:32], JOIN_NAME.encode())
    assert borrowed is not None
    assert borrowed.text.startswith(CONTEXT[:32])
    assert not borrowed.text.startswith(CONTEXT)
    for cut in range(len(borrowed.text)):
        signed = wire.SignedRevocation(revocation=borrowed.text[cut:], signature=borrowed.signature)
        with pytest.raises(FleetError):
            open_revocation(signed, fleet.authority.root)
    with old_server(alice.to_pem()) as port:
        borrowed = ask_for_signature(port, CONTEXT[:32], NODE_NAME.encode())
    assert borrowed is not None
    for cut in range(len(borrowed.text)):
        card = wire.SignedCard(card=borrowed.text[cut:], signature=borrowed.signature, certificate=alice.member.certificate)
        with pytest.raises(NotTrusted):
            open_card(card, root=fleet.authority.root, voids=fleet.revocations.voids, now=fleet.clock.wall())


def test_row_4_no_text_of_tls_or_x509_begins_as_ours() -> None:
    # A caller of TLS 1.2 has the first 32 bytes in its hand; from TLS 1.3 on it is 64 spaces; a certificate is a SEQUENCE; a transcript
    # begins with a hello.
    assert len(CONTEXT) >= 64
    assert CONTEXT[0] not in {0x20, 0x30, 0x01, 0x16}
    assert len({kind.value for kind in SignedKind}) == len(SignedKind)
    assert not any(one != other and (one.value + b"\0").startswith(other.value + b"\0") for one in SignedKind for other in SignedKind)


def test_row_4_a_signature_is_for_one_kind(fleet: TestFleet) -> None:
    key = make_key()
    identity = Identity(key, fleet.member("a-1").member, fleet.authority.root)
    for kind in SignedKind:
        signature = identity.sign(kind, b"text")
        assert [verifies(key.public_key(), signature, other, b"text") for other in SignedKind] == [other is kind for other in SignedKind]


def test_row_5_a_node_is_no_join_port(fleet: TestFleet) -> None:
    """A guest has a certificate of the CA that the token pins: it is not taken for the join port's."""
    authority = fleet.authority
    with pytest.raises(NotTrusted, match="no join port's"):
        read_join_certificate(fleet.member("guest-1").member.certificate, authority.root.pin)
    with pytest.raises(NotTrusted):
        read_join_certificate(authority.root.der, authority.root.pin)
    port = authority.issue_to_join_port(make_request(make_key(), NodeId("join")), fleet.clock.wall())
    read_join_certificate(port, authority.root.pin)
    with pytest.raises(NotTrusted, match="another CA"):
        read_join_certificate(port, TestFleet().authority.root.pin)
    # And a join port is no member.
    with pytest.raises(NotTrusted, match="names no node"):
        authority.root.member(port, fleet.clock.wall())


def test_row_5_the_join_port_does_not_have_the_cas_key(tmp_path: Path) -> None:
    async def main() -> None:
        node = IssuerNode.make(tmp_path / "fleet")
        node.mint()
        async with node.hosted():
            pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", node.port))
        shown = read_join_certificate(ssl.PEM_cert_to_DER_cert(pem), node.issuer.authority.root.pin)
        assert shown.public_key() != node.issuer.authority.root.public_key

    asyncio.run(main())


def signed(fleet: TestFleet, data: bytes) -> wire.SignedRevocation:
    return wire.SignedRevocation(revocation=data, signature=fleet.authority.sign(SignedKind.REVOCATION, data))


def test_row_15_revocations_are_read_strictly(fleet: TestFleet) -> None:
    """Even what the CA signed."""
    now, root = int(fleet.clock.wall()), fleet.authority.root
    good = wire.Revocation(node_id="pi", revoked_at_unix=now, not_after_unix=now).SerializeToString()
    assert open_revocation(signed(fleet, good), root).revocation == Revocation(NodeId("pi"), now, now)
    bad = {
        "an unknown field": good + b"\x22\x44" + bytes(68),
        "a field twice": good + b"\x18\x01",
        "fields in another order": good[4:] + good[:4],
        "a long number": good[:-1] + bytes([good[-1] | 0x80, 0]),
        "beyond the fleet's end": wire.Revocation(node_id="pi", revoked_at_unix=1 << 34, not_after_unix=1 << 34).SerializeToString(),
        "before its beginning": wire.Revocation(node_id="pi", revoked_at_unix=1, not_after_unix=1).SerializeToString(),
        "far beyond its time": wire.Revocation(node_id="pi", revoked_at_unix=now, not_after_unix=now + 200_000).SerializeToString(),
        "before its time": wire.Revocation(node_id="pi", revoked_at_unix=now, not_after_unix=now - 9).SerializeToString(),
    }
    for data in bad.values():
        with pytest.raises(MalformedMessage):
            open_revocation(signed(fleet, data), root)


def test_row_15_a_far_revocation_refuses_a_join_in_words(tmp_path: Path) -> None:
    """Signed while the CA's clock was wrong. It is a refusal that says why, and another name joins."""
    node = IssuerNode.make(tmp_path / "fleet")
    far = int(node.clock.wall()) + 5 * 365 * 86400
    node.folder.keep_revocations([sign_revocation(node.issuer.authority, Revocation(NodeId("pi"), far, far)).sealed])
    token = node.mint()

    def attempt(name: str) -> JoinAttempt:
        sent = request_for(token, name)
        return JoinAttempt(sent.certificate_request, sent.token_id, sent.proof, sent.nonce)

    with pytest.raises(JoinRefused, match="pi was revoked up to a time that is far ahead") as caught:
        node.issuer.admit(attempt("pi"))
    assert "--name" in caught.value.hint
    assert node.issuer.admit(attempt("pi-2"))[0] == "pi-2"
    node.clock.advance(30 * 365 * 86400)
    with pytest.raises(IdentityError, match="outside of what the fleet's CA holds for"):
        node.issuer.issue_own(make_request(make_key(), NodeId("first-1")), NodeId("first-1"))


def test_row_18_a_card_has_one_form_and_may_say_more(fleet: TestFleet) -> None:
    alice = fleet.member("alice-1")
    data = write_card(card_of(alice))

    def opened(card: bytes) -> object:
        message = wire.SignedCard(card=card, signature=alice.sign(SignedKind.CARD, card + bytes(4)), certificate=alice.member.certificate)
        return open_card(message, root=fleet.authority.root, voids=fleet.revocations.voids, now=fleet.clock.wall()).card

    assert opened(data) == card_of(alice)
    # A later version's field 1000.
    assert opened(data + b"\xc2\x3e\x01x") == card_of(alice)
    for other in (data + data, b"\xc2\x3e\x01x" + data):
        with pytest.raises(MalformedMessage, match="not written as any version"):
            opened(other)


def test_files_and_tokens_of_another_format_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as then:
        then.setattr("paceline.net.trust.authority.FORMAT", "1")
        then.setattr("paceline.net.trust.certificates.FORMAT", "1")
        old = TestFleet()
        files = old.member("a-1").to_pem(), old.authority.to_pem()
    with pytest.raises(IdentityError, match="another version of Paceline") as caught:
        Identity.from_pem(files[0])
    assert "paceline init" in caught.value.hint
    with pytest.raises(IdentityError, match="another version of Paceline"):
        type(old.authority).from_pem(files[1])
    with pytest.raises(TokenError, match="another version of Paceline"):
        JoinToken.parse("paceline1.AAAA")
