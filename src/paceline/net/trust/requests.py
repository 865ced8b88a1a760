"""Certificate requests: a node asks for a certificate by its name, with a key that it proves to hold."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from paceline.core.errors import NotTrusted
from paceline.core.ids import NodeId
from paceline.net.trust.addresses import is_node_id
from paceline.net.trust.certificates import UNREADABLE
from paceline.net.trust.signing import PrivateKey, PublicKey

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
