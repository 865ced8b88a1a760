"""Kinds of data that this fleet signs, and why no other signature can pass for one of them.

Law: signed text begins with `CONTEXT` and the name of its kind. TLS signs with the nodes' keys as well, over texts that an unauthenticated peer
partly chooses. None of those texts begins like this: up to TLS 1.2 the first 32 bytes are the caller's and the next 32 are the signer's own random
ones. In 1.3 the first 64 are spaces. A certificate or a request for one begins with 0x30, and a transcript with 0x01. The context is longer than 64
bytes, so a caller can't forge it in any version.
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
"""Algorithm of all signatures, certificates included."""

PublicKey = ec.EllipticCurvePublicKey
PrivateKey = ec.EllipticCurvePrivateKey


class SignedKind(Enum):
    """Kind of signed data. A signature on one kind is invalid for every other kind."""

    CARD = b"card"
    """A node's card, signed by that node."""
    REVOCATION = b"revocation"
    """Revocation of a node, signed by the CA."""
    REVOCATION_LIST = b"revocation list"


class Signs(Protocol):
    """Holder of a key: a node's identity, or the CA."""

    def sign(self, kind: SignedKind, data: bytes) -> bytes:
        """Sign `data` as data of that kind, and return the signature (DER)."""
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
    """Parse a message, and require its canonical form: writing the message again gives the same bytes, and no field is unknown.

    Raises:
        MalformedMessage: the bytes are not such a message, or not in the form that this version writes.
    """
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"Bytes that are signed are no {kind.DESCRIPTOR.name}") from error
    message.DiscardUnknownFields()
    if message.SerializeToString(deterministic=True) != data:
        raise MalformedMessage(f"A {kind.DESCRIPTOR.name} is not written as this version writes it")
    return message
