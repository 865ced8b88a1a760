"""What this fleet signs, and why no signature on anything else can be taken for one of these.

Law: what is signed begins with `CONTEXT` and the name of its kind. TLS signs with the same keys as nodes do, over texts that a stranger has a
say in; none of them begins so: up to 1.2 the first 32 bytes are a caller's and the next 32 are the signer's own random ones, in 1.3 the first
64 are spaces, a certificate or a request for one begins with 0x30, and a transcript with 0x01. Longer than 64 bytes, the context is out of a
caller's reach whatever version is spoken.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError, Message

from paceline.core.errors import MalformedMessage

CONTEXT = b"Paceline signs what follows. It is no part of TLS, and no certificate. "
assert len(CONTEXT) >= 64, "a context as long as both random values of a TLS handshake"
SIGNING = ec.ECDSA(hashes.SHA256())
"""How everything is signed, certificates too."""

PublicKey = ec.EllipticCurvePublicKey
PrivateKey = ec.EllipticCurvePrivateKey


class SignedKind(Enum):
    """What is signed. A signature on one kind is none on another."""

    CARD = b"card"
    """By a node, of itself."""
    REVOCATION = b"revocation"
    """By the CA, as the next."""
    REVOCATION_LIST = b"revocation list"


class Signs(Protocol):
    """Who has a key: a node's identity, or the CA."""

    def sign(self, kind: SignedKind, data: bytes) -> bytes:
        """A signature on `data` as a thing of that kind."""
        ...


def sign_as(key: PrivateKey, kind: SignedKind, data: bytes) -> bytes:
    return key.sign(_text(kind, data), SIGNING)


def verifies(key: PublicKey, signature: bytes, kind: SignedKind, data: bytes) -> bool:
    try:
        key.verify(signature, _text(kind, data), SIGNING)
    except InvalidSignature:
        return False
    return True


def _text(kind: SignedKind, data: bytes) -> bytes:
    return CONTEXT + kind.value + b"\0" + data


M = TypeVar("M", bound=Message)


def read_strictly(kind: type[M], data: bytes) -> M:
    """A message that has one form only: what would be written of it is what was read, and nothing in it is unknown.

    Raises:
        MalformedMessage: it is no such message, or not as this version writes it.
    """
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"Bytes that are signed are no {kind.DESCRIPTOR.name}") from error
    message.DiscardUnknownFields()
    if message.SerializeToString(deterministic=True) != data:
        raise MalformedMessage(f"A {kind.DESCRIPTOR.name} is not written as this version writes it")
    return message
