"""The fleet's CA: issues certificates to nodes and voids them. Its key stays on the node that ran `paceline init`.

One file holds key and certificate, so a copy of it (`paceline ca export`) is a whole backup.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.core.errors import IdentityError, NotTrusted
from paceline.core.ids import NodeId
from paceline.core.trust import Trust
from paceline.transport.trust.certificates import (
    BACKDATED,
    JOIN_NAME,
    NODE_NAME,
    SIGNING,
    URI_PREFIX,
    FleetRoot,
    PrivateKey,
    PublicKey,
    draw_serial,
    key_pem,
    make_key,
    tls_name,
    whole_second,
)
from paceline.transport.trust.requests import open_request

CA_YEARS = timedelta(days=20 * 365)
NODE_YEARS = timedelta(days=10 * 365)
"""A node's certificate is not renewed (ADR 5): a node that should not belong any more is revoked."""


class Authority:
    """The CA with its key."""

    def __init__(self, key: PrivateKey, root: FleetRoot) -> None:
        if key.public_key() != root.public_key:
            raise IdentityError("The CA's key is not the one in its certificate")
        self._key = key
        self.root = root

    @classmethod
    def create(cls, now: float) -> Authority:
        """A new fleet's. `now` is in Unix seconds."""
        key = make_key()
        serial = draw_serial()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"paceline fleet {serial & 0xFFFFFFFF:08x}")])
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        start = whole_second(now)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(serial)
            .not_valid_before(start - BACKDATED)
            .not_valid_after(start + CA_YEARS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(identifier, critical=False)
            # The join port shows this very certificate.
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(JOIN_NAME)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, FleetRoot(certificate))

    @classmethod
    def from_pem(cls, data: bytes) -> Authority:
        """What `to_pem` wrote.

        Raises:
            IdentityError: it is damaged.
        """
        try:
            key = load_pem_private_key(data, None)
            root = FleetRoot(x509.load_pem_x509_certificate(data))
        except (ValueError, TypeError, NotTrusted) as error:
            raise IdentityError("The file of the fleet's CA is damaged", "Restore it: paceline ca import FILE") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise IdentityError("The file of the fleet's CA holds a key of another kind", "Restore it: paceline ca import FILE")
        return cls(key, root)

    def to_pem(self) -> bytes:
        """Key and certificate. A secret: who has it can let anybody in."""
        return self.key_pem + self.root.pem

    @property
    def key_pem(self) -> bytes:
        return key_pem(self._key)

    def issue(self, request: bytes, node_id: NodeId, now: float, *, after: int = 0, trust: Trust = Trust.MEMBER) -> bytes:
        """A certificate for the key in a request, and for nothing else that the request asks.

        Args:
            request: PKCS #10, DER.
            node_id: must be the name the request asks for.
            now: Unix seconds.
            after: the certificate counts as issued later than this (the `not_after` of the node's last revocation).
            trust: how far the node is trusted.

        Returns:
            DER.

        Raises:
            NotTrusted: the request is damaged, is not signed by its key, asks for another name, or holds a key of another kind.
        """
        asked, key = open_request(request)
        if asked != node_id:
            raise NotTrusted(f"A certificate request asks for {asked}, not {node_id}", who=asked)
        start = whole_second(max(now, after + 1))
        return self._certificate(key, node_id, start, trust).public_bytes(Encoding.DER)

    def sign(self, data: bytes) -> bytes:
        """A signature by the CA. What is signed says what it is in its first bytes."""
        return self._key.sign(data, SIGNING)

    def _certificate(self, key: PublicKey, node_id: NodeId, start: datetime, trust: Trust) -> x509.Certificate:
        serial = draw_serial()
        names: Iterable[x509.GeneralName] = (
            x509.UniformResourceIdentifier(URI_PREFIX + node_id),
            x509.DNSName(NODE_NAME),
            x509.DNSName(tls_name(serial)),
        )
        root = self.root.certificate
        issuer_key = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            x509.CertificateBuilder()
            .subject_name(
                x509.Name(
                    [x509.NameAttribute(NameOID.COMMON_NAME, node_id), x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, str(trust))]
                )
            )
            .issuer_name(root.subject)
            .public_key(key)
            .serial_number(serial)
            .not_valid_before(start - BACKDATED)
            .not_valid_after(min(start + NODE_YEARS, root.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
