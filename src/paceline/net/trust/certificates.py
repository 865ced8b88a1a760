"""What a certificate of the fleet says, and whether it may be believed.

A node has one key (P-256: gRPC's TLS takes no Ed25519) and one certificate, named by its id: as common name and as `paceline://node/<id>`.
No certificate names an address, because machines change theirs. A caller who knows which certificate it wants to meet asks TLS for
`<serial>.node.paceline.internal`, which exactly one certificate of the fleet carries. Certificates are backdated a day, so that a clock
that is slow can still join; when one was issued is its start plus that day. How far a node is trusted is its organizational unit.

What a node is called and where it is, as text: host:port is all that a card or a token says of the latter.

Certificate requests: a node asks for a certificate by its name, with a key that it proves to hold.
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
    """Whether `text` may name a node: a host's name in lower case, at most 63 characters, so that it is safe in a log, a file and a certificate."""
    return NODE_ID.fullmatch(text) is not None


MAX_ADDRESS = 255
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\]):([1-9][0-9]{0,4})")


def is_address(text: str) -> bool:
    """Whether `text` is name:port, IPv4:port or [IPv6]:port."""
    match = _ADDRESS.fullmatch(text) if len(text) <= MAX_ADDRESS else None
    return match is not None and int(match[1]) <= 65535


def join_host(host: str, port: int) -> str:
    """An address of a host's name or number."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


BACKDATED = timedelta(hours=24)
JOIN_NAME = "join.paceline.internal"
"""What the join port is called in TLS. It shows a certificate of its own, which the CA signed; the token pins the CA's key."""
NODE_NAME = "node.paceline.internal"
"""What every node may be called in TLS."""
MAX_CERTIFICATE_BYTES = 4096
URI_PREFIX = "paceline://node/"
FORMAT = "2"
"""Of a fleet's files and signatures, in its CA's certificate: fleets of another format are told so, and not believed."""
UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What `cryptography` raises on bytes that are not what they should be."""


def make_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass(frozen=True, slots=True)
class Member:
    """What a certificate of the fleet says, once checked."""

    node_id: NodeId
    issued_at: int
    """Unix seconds by the CA's clock."""
    expires_at: int
    serial: int
    public_key: PublicKey
    certificate: bytes
    """DER."""
    trust: Trust = Trust.MEMBER

    @property
    def tls_name(self) -> str:
        """What to ask TLS for to meet this certificate and no other."""
        return tls_name(self.serial)

    @property
    def begins_at(self) -> int:
        """Unix seconds; before that TLS takes it nowhere."""
        return self.issued_at - int(BACKDATED.total_seconds())

    def signed(self, signature: bytes, kind: SignedKind, data: bytes) -> bool:
        return verifies(self.public_key, signature, kind, data)


def tls_name(serial: int) -> str:
    return f"{serial:x}.{NODE_NAME}"


def draw_serial() -> int:
    """126 random bits: at most 32 hexadecimal digits, which fit a label of a name."""
    return secrets.randbits(125) | 1 << 125


class FleetRoot:
    """The CA's certificate: what every member trusts. Remembers the certificates it found good, within a bound.

    Raises:
        NotTrusted: it is no certificate of a CA.
        IdentityError: the fleet was made by a version with another format.
    """

    REMEMBERED = 1024

    def __init__(self, certificate: x509.Certificate) -> None:
        key = _p256(certificate)
        if key is None:
            raise NotTrusted("A CA's certificate holds a key of another kind than P-256", who="CA")
        if [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)] != [FORMAT]:
            raise IdentityError(
                "This fleet was made by another version of Paceline, whose signatures this one does not take",
                "Update all machines and start the fleet anew: on each, move the folder `fleet` out of PACELINE_HOME (~/.paceline); "
                "then paceline init on one, and paceline join on the others. Models stay",
            )
        self.certificate = certificate
        self.public_key = key
        self._good: LRUCache[bytes, Member] = LRUCache(self.REMEMBERED)

    @classmethod
    def from_der(cls, data: bytes) -> FleetRoot:
        """The CA whose certificate `data` is.

        Raises:
            NotTrusted: it is no certificate of a CA.
        """
        try:
            certificate = x509.load_der_x509_certificate(data)
            certificate.verify_directly_issued_by(certificate)
            return cls(certificate)
        except (*UNREADABLE, InvalidSignature) as error:
            raise NotTrusted("What should be a CA's certificate is none", who="CA") from error

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate: what the fleet is called by."""
        return self.certificate.fingerprint(hashes.SHA256())

    @property
    def pin(self) -> bytes:
        """The CA's key, short: what a token pins."""
        return self.public_key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)

    def check_time(self, what: str, at: int) -> None:
        """That the CA may have said something at a time, in Unix seconds.

        Raises:
            MalformedMessage: it is before the CA began or after its end.
        """
        begin, end = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        if not begin.timestamp() <= at <= end.timestamp():
            raise MalformedMessage(f"{what} is from outside of the years {begin:%Y} to {end:%Y}, for which the fleet's CA holds")

    def member(self, certificate: bytes, now: float) -> Member:
        """What a certificate says, if this CA issued it and it has not expired.

        Raises:
            NotTrusted: it is none, another CA's, or has expired.
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
            raise NotTrusted("What should be a node's certificate is none", who="unknown") from error
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
    """What a join port showed, once it is certain that the CA whose key `pin` is signed it for a join port. No node's certificate is one.

    Raises:
        NotTrusted: it did not.
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
    """The key of a certificate, if it is of our kind."""
    key = certificate.public_key()
    return key if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1) else None


def _claimed_id(certificate: x509.Certificate) -> str | None:
    """The node id that name and URI agree on; None where they don't, or it is no node's certificate."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    uris = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.UniformResourceIdentifier
    )
    if len(names) != 1 or len(uris) != 1 or not isinstance(name := names[0].value, str):
        return None
    return name if is_node_id(name) and uris[0] == URI_PREFIX + name else None


def _trust(certificate: x509.Certificate) -> Trust:
    """Certificates from before there were levels are members'; a level that is not known here is the least."""
    units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    if not units:
        return Trust.MEMBER
    said = units[0].value if len(units) == 1 else ""
    return next((trust for trust in Trust if trust == said), Trust.GUEST)


def whole_second(at: float) -> datetime:
    """Certificates count in seconds."""
    return datetime.fromtimestamp(int(at), UTC)


MAX_REQUEST_BYTES = 4096


def make_request(key: PrivateKey, node_id: NodeId) -> bytes:
    """A certificate request: PKCS #10, DER."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_id)])
    return x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def open_request(request: bytes) -> tuple[NodeId, PublicKey]:
    """The node id and the key of a request, which its key signed.

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
        raise NotTrusted("What should be a certificate request is none", who="unknown") from error
    if len(names) != 1 or not isinstance(name := names[0], str) or not is_node_id(name):
        raise NotTrusted("A certificate request names no node", who="unknown")
    if not signed or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise NotTrusted(f"The certificate request of {name} is not signed by a P-256 key", who=name)
    return NodeId(name), key
