"""How far a machine is trusted is said by whoever invites it, stands in its certificate, and is nobody else's to change."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from tests.fakes.fleets import TestFleet, card_of
from tests.unit.net.trust.joining import IssuerNode, request_for

from paceline.core.errors import RevokedNode
from paceline.core.ids import NodeId, Trust
from paceline.net.join_client import join
from paceline.net.trust.authority import NODE_HOLDS
from paceline.net.trust.certificates import Member, make_key, make_request
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import RENEW_BELOW_S, RENEW_EVERY_S, Issuer, JoinAttempt
from paceline.net.trust.seals import sign_card
from paceline.net.trust.signing import PrivateKey
from paceline.net.trust.tokens import NONCE_BYTES

DUE_S = NODE_HOLDS.total_seconds() - RENEW_BELOW_S + 1
"""After which a certificate may be renewed."""


@pytest.fixture
def node(tmp_path: Path) -> IssuerNode:
    return IssuerNode.make(tmp_path)


def test_levels_have_an_order() -> None:
    assert [[one.reaches(least) for least in Trust] for one in Trust] == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


@pytest.mark.parametrize("trust", Trust)
def test_whoever_joins_is_trusted_as_far_as_its_token_s_giver_said(node: IssuerNode, trust: Trust) -> None:
    async def main() -> None:
        other = next(each for each in Trust if each is not trust)
        node.mint(trust=other)
        token = node.mint(trust=trust)
        async with node.hosted():
            identity = (await join(token, NodeId("bob-1"), node.clock)).identity
        assert identity.member.trust is trust
        assert Identity.from_pem(identity.to_pem()).member.trust is trust
        assert sign_card(identity, card_of(identity)).trust is trust

    asyncio.run(main())


def test_nobody_makes_themselves_trusted(node: IssuerNode) -> None:
    """What a request asks for besides its name counts for nothing."""

    async def main() -> None:
        token, key = node.mint(trust=Trust.GUEST), make_key()
        asked = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, "mallory-1"), x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "trusted")]
        )
        request = x509.CertificateSigningRequestBuilder().subject_name(asked).sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
        message = request_for(token, "mallory-1")
        message.certificate_request, message.proof = request, token.proof(request, message.nonce)
        async with node.hosted(), node.stub() as stub:
            answer = await stub.Join(message, timeout=100)
        assert node.issuer.authority.root.member(answer.certificate, node.clock.wall()).trust is Trust.GUEST

    asyncio.run(main())


def test_the_first_machine_is_trusted(node: IssuerNode) -> None:
    certificate = node.issuer.issue_own(make_request(make_key(), NodeId("attic")), NodeId("attic"))
    assert node.issuer.authority.root.member(certificate, node.clock.wall()).trust is Trust.TRUSTED


def admitted(node: IssuerNode, key: PrivateKey, trust: Trust) -> Member:
    """What `bob-1` is by the certificate that it joins with."""
    token, request, nonce = node.mint(trust=trust), make_request(key, NodeId("bob-1")), secrets.token_bytes(NONCE_BYTES)
    _, certificate = node.issuer.admit(JoinAttempt(request, token.token_id.hex(), token.proof(request, nonce), nonce))
    return node.issuer.authority.root.member(certificate, node.clock.wall())


def renewed(node: IssuerNode, key: PrivateKey, shown: Member) -> Member:
    """As soon as it may be again."""
    node.clock.advance(RENEW_EVERY_S)
    certificate = node.issuer.renew(make_request(key, shown.node_id), shown)
    return node.issuer.authority.root.member(certificate, node.clock.wall())


@pytest.mark.parametrize(("first", "then"), [(first, then) for first in Trust for then in Trust if first is not then])
def test_a_certificate_is_renewed_at_the_level_that_its_machine_was_given_last(node: IssuerNode, first: Trust, then: Trust) -> None:
    key = make_key()
    old, new = admitted(node, key, first), admitted(node, key, then)
    node.clock.advance(DUE_S)
    assert [renewed(node, key, shown).trust for shown in (old, new, old)] == [then] * 3
    node.issuer = Issuer(node.issuer.authority, node.folder, node.clock)  # started anew
    assert renewed(node, key, old).trust is then


def test_a_machine_that_was_revoked_and_joins_again_keeps_nothing_of_its_old_level(node: IssuerNode) -> None:
    key = make_key()
    old = admitted(node, key, Trust.TRUSTED)
    node.issuer.revoke(old.node_id)
    admitted(node, key, Trust.GUEST)
    node.clock.advance(DUE_S)
    with pytest.raises(RevokedNode):
        renewed(node, key, old)


def test_where_the_ca_knows_no_level_the_certificates_own_stays(node: IssuerNode) -> None:
    """A CA that was brought here from another machine, or whose state is from before levels were kept."""
    key = make_key()
    old = admitted(node, key, Trust.TRUSTED)
    node.clock.advance(DUE_S)
    kept = node.folder.issuer_state()
    for issued in ({}, {"bob-1": {name: value for name, value in kept["issued"]["bob-1"].items() if name != "trust"}}):
        node.folder.keep_issuer_state({**kept, "issued": issued})
        assert renewed(node, key, old).trust is Trust.TRUSTED


@pytest.mark.parametrize(
    ("units", "trust"),
    [
        ([], Trust.MEMBER),
        (["member"], Trust.MEMBER),
        (["Trusted"], Trust.GUEST),
        (["admiral"], Trust.GUEST),
        (["trusted"] * 2, Trust.GUEST),
    ],
)
def test_what_certificates_of_other_versions_mean(units: list[str], trust: Trust) -> None:
    fleet = TestFleet()
    issued = x509.load_der_x509_certificate(fleet.member("bob-1", trust=Trust.TRUSTED).member.certificate)
    names = [
        x509.NameAttribute(NameOID.COMMON_NAME, "bob-1"),
        *(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit) for unit in units),
    ]
    key, public_key = load_pem_private_key(fleet.authority.key_pem, None), issued.public_key()
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(public_key, ec.EllipticCurvePublicKey)
    builder = x509.CertificateBuilder(
        issued.issuer, x509.Name(names), public_key, issued.serial_number, issued.not_valid_before_utc, issued.not_valid_after_utc,
        list(issued.extensions),
    )  # fmt: skip
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)
    assert fleet.authority.root.member(certificate, fleet.clock.wall()).trust is trust
