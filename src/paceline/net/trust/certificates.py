"""The certificates of a fleet: their contents, their checks, and the requests for them.

A node has one key (P-256, because gRPC's TLS does not support Ed25519) and one certificate. The certificate carries the node's id as common name and as
`paceline://node/<id>`. It names no address, because machines change theirs. A caller that expects a certain certificate asks TLS for
`<serial>.node.paceline.internal`, a name that only this certificate carries. Certificates are backdated by a day, so that a machine with a slow clock
can still join. The time of issue is therefore the start plus that day. The organizational unit holds the trust.

Node ids and addresses are checked here too. An address in a card or a token is always host:port.

A node requests a certificate for its id, with a key that it proves to hold.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cachetools import LRUCache
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from paceline.core.errors import IdentityError, MalformedMessage, NotTrusted
from paceline.core.ids import NodeId, Trust
from paceline.net.trust.signing import SIGNING, PrivateKey, PublicKey, SignedKind, verifies

NODE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


def is_node_id(text: str) -> bool:
    """Return True if `text` is a valid node id: a lower-case host name of at most 63 characters, safe in a log, a file name and a certificate."""
    return NODE_ID.fullmatch(text) is not None


MAX_ADDRESS = 255
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([1-9][0-9]{0,4})")


def is_address(text: str) -> bool:
    """Return True if `text` is name:port, IPv4:port or [IPv6]:port."""
    match = _ADDRESS.fullmatch(text) if len(text) <= MAX_ADDRESS else None
    return match is not None and int(match[1]) <= 65535


def join_host(host: str, port: int) -> str:
    """Return host:port for a host name or an IP address, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


BACKDATED = timedelta(hours=24)
JOIN_NAME = "join.paceline.internal"
"""TLS name of the join port. The port shows a certificate for this name alone, signed by the CA; the token pins the CA's key."""
NODE_NAME = "node.paceline.internal"
"""TLS name that the certificate of every node carries."""
MAX_CERTIFICATE_BYTES = 4096
URI_PREFIX = "paceline://node/"
FORMAT = "2"
"""Format of a fleet's files and signatures, as the CA's certificate names it. A fleet of another format is refused with that reason."""
UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""Exceptions that `cryptography` raises on invalid bytes."""


def make_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, slots=True)
class Member:
    """The contents of a checked certificate of the fleet."""

    node_id: NodeId
    issued_at: int
    """Unix seconds by the CA's clock, a day after the certificate begins."""
    expires_at: int
    serial: int
    public_key: PublicKey
    certificate: bytes
    """DER."""
    trust: Trust = Trust.MEMBER

    @property
    def tls_name(self) -> str:
        """TLS name that only this certificate carries."""
        return tls_name(self.serial)

    @property
    def begins_at(self) -> int:
        """Unix seconds before which TLS refuses the certificate."""
        return self.issued_at - int(BACKDATED.total_seconds())

    def signed(self, signature: bytes, kind: SignedKind, data: bytes) -> bool:
        return verifies(self.public_key, signature, kind, data)


def tls_name(serial: int) -> str:
    return f"{serial:x}.{NODE_NAME}"


def draw_serial() -> int:
    """Return a random serial of 126 bits. In hexadecimal it has at most 32 digits, which fit into a label of a DNS name."""
    return secrets.randbits(125) | 1 << 125


class FleetRoot:
    """The CA's certificate, which every member trusts. Checked certificates are remembered, up to `REMEMBERED`.

    Raises:
        NotTrusted: the certificate holds a key of another kind than P-256.
        IdentityError: the fleet was made by a version with another format.
    """

    REMEMBERED = 1024

    def __init__(self, certificate: x509.Certificate) -> None:
        key = _p256(certificate)
        if key is None:
            raise NotTrusted("A CA's certificate holds a key of another kind than P-256", who="CA")
        if [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)] != [FORMAT]:
            raise IdentityError(
                "This fleet was made by another version of Paceline, and this version does not accept its signatures",
                "Update all machines and make the fleet again: on each, move the folder `fleet` out of PACELINE_HOME (~/.paceline); "
                "then paceline init on one, and paceline join on the others. Models stay",
            )
        self.certificate = certificate
        self.public_key = key
        self._good: LRUCache[bytes, Member] = LRUCache(self.REMEMBERED)

    @classmethod
    def from_der(cls, data: bytes) -> FleetRoot:
        """Load the CA's certificate from DER bytes.

        Raises:
            NotTrusted: `data` is not a self-signed certificate with a P-256 key.
            IdentityError: the fleet was made by a version with another format.
        """
        try:
            certificate = x509.load_der_x509_certificate(data)
            certificate.verify_directly_issued_by(certificate)
            return cls(certificate)
        except (*UNREADABLE, InvalidSignature) as error:
            raise NotTrusted("The CA's certificate can't be read, or is not self-signed", who="CA") from error

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate, from which the fleet's id is made."""
        return self.certificate.fingerprint(hashes.SHA256())

    @property
    def pin(self) -> bytes:
        """The CA's public key as a compressed point, which a token pins."""
        return self.public_key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)

    def check_time(self, what: str, at: int) -> None:
        """Check that the CA may have signed something at `at` (Unix seconds).

        Args:
            what: the signed thing, for the message of the error.

        Raises:
            MalformedMessage: the time is before the CA's certificate begins or after it ends.
        """
        begin, end = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        if not begin.timestamp() <= at <= end.timestamp():
            raise MalformedMessage(f"{what} is from outside of the years {begin:%Y} to {end:%Y}, for which the fleet's CA holds")

    def member(self, certificate: bytes, now: float) -> Member:
        """Return the contents of a certificate that this CA issued and that has not expired.

        Args:
            certificate: DER.
            now: Unix seconds.

        Raises:
            NotTrusted: the bytes are not a certificate of a node, another CA issued it, or it has expired.
        """
        member = self._good.get(certificate)
        if member is None:
            member = self._good[certificate] = self._read(certificate)
        if member.expires_at < now:
            raise NotTrusted(f"The certificate of {member.node_id} has expired", who=member.node_id)
        return member

    def _read(self, data: bytes) -> Member:
        if len(data) > MAX_CERTIFICATE_BYTES:
            raise NotTrusted(f"A certificate of {len(data)} bytes is longer than any of ours", who="unknown")
        try:
            certificate = x509.load_der_x509_certificate(data)
            claimed, trust, key = _claimed_id(certificate), _trust(certificate), _p256(certificate)
        except UNREADABLE as error:
            raise NotTrusted("The node's certificate can't be read", who="unknown") from error
        who = claimed or "unknown"
        try:
            certificate.verify_directly_issued_by(self.certificate)
        except (*UNREADABLE, InvalidSignature) as error:
            raise NotTrusted(f"The certificate of {who} was not issued by this fleet's CA", who=who) from error
        if claimed is None or key is None:
            raise NotTrusted("A certificate of this fleet's CA names no node", who=who)
        return Member(
            NodeId(claimed),
            int((certificate.not_valid_before_utc + BACKDATED).timestamp()),
            int(certificate.not_valid_after_utc.timestamp()),
            certificate.serial_number,
            key,
            data,
            trust,
        )


def read_join_certificate(data: bytes, pin: bytes) -> x509.Certificate:
    """Return the certificate that a join port showed, after the check that the CA with the key `pin` signed it for a join port.

    Raises:
        NotTrusted: another CA signed it, or it is a certificate for something else, such as a node.
    """
    try:
        certificate = x509.load_der_x509_certificate(data)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), pin)
        key.verify(certificate.signature, certificate.tbs_certificate_bytes, SIGNING)
    except (*UNREADABLE, InvalidSignature) as error:
        raise NotTrusted("It shows a certificate of another CA than the token's", who="a join port") from error
    if list(names) != [x509.DNSName(JOIN_NAME)]:
        raise NotTrusted("It shows a certificate that is no join port's", who="a join port")
    return certificate


def _p256(certificate: x509.Certificate) -> PublicKey | None:
    """Return the key of a certificate; None if it is not P-256."""
    key = certificate.public_key()
    return key if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1) else None


def _claimed_id(certificate: x509.Certificate) -> str | None:
    """Return the node id that common name and URI agree on; None if they differ, or the certificate is not a node's."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    uris = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.UniformResourceIdentifier
    )
    if len(names) != 1 or len(uris) != 1 or not isinstance(name := names[0].value, str):
        return None
    return name if is_node_id(name) and uris[0] == URI_PREFIX + name else None


def _trust(certificate: x509.Certificate) -> Trust:
    """Return the trust that a certificate grants. Without a level, as in old certificates, it is member; an unknown level counts as guest."""
    units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    if not units:
        return Trust.MEMBER
    said = units[0].value if len(units) == 1 else ""
    return next((trust for trust in Trust if trust == said), Trust.GUEST)


def whole_second(at: float) -> datetime:
    """Return a time (Unix seconds) cut to whole seconds, because certificates hold no fractions."""
    return datetime.fromtimestamp(int(at), UTC)


MAX_REQUEST_BYTES = 4096


def make_request(key: PrivateKey, node_id: NodeId) -> bytes:
    """Return a certificate request (PKCS #10, DER) for a node id, signed by its key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_id)])
    return x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def open_request(request: bytes) -> tuple[NodeId, PublicKey]:
    """Return the node id and the key of a certificate request, after the check that this key signed it.

    Raises:
        NotTrusted: the request is damaged, unsigned, names no node, or holds a key of another kind than P-256.
    """
    if len(request) > MAX_REQUEST_BYTES:
        raise NotTrusted(f"A certificate request of {len(request)} bytes is longer than any of ours", who="unknown")
    try:
        parsed = x509.load_der_x509_csr(request)
        names = [name.value for name in parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        key = parsed.public_key()
        signed = parsed.is_signature_valid
    except UNREADABLE as error:
        raise NotTrusted("The certificate request can't be read", who="unknown") from error
    if len(names) != 1 or not isinstance(name := names[0], str) or not is_node_id(name):
        raise NotTrusted("A certificate request names no node", who="unknown")
    if not signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise NotTrusted(f"The certificate request of {name} is not signed by a P-256 key", who=name)
    return NodeId(name), key
