"""A join token: one line of text that says where to join, whom to believe there, and proves that one was invited.

`paceline2.` and, in base64url: checksum (4 bytes), the CA's public key (33), token id (8), secret (16), addresses. The secret
never crosses the wire: a joiner sends a keyed hash over its certificate request and a nonce. The checksum only tells a typing error from a refusal.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass, field

from paceline.core.errors import TokenError
from paceline.net.trust.addresses import is_address

PREFIX = "paceline2."
PIN_BYTES = 33
ID_BYTES = 8
SECRET_BYTES = 16
NONCE_BYTES = 16
PROOF_BYTES = 32
MAX_ADDRESSES = 16
MAX_TEXT = 4096
_FIXED_BYTES = 4 + PIN_BYTES + ID_BYTES + SECRET_BYTES


@dataclass(frozen=True, slots=True)
class JoinToken:
    """An invitation to a fleet."""

    addresses: tuple[str, ...]
    """host:port of the issuer's join port, one for each way to reach it."""
    pin: bytes
    """The CA's public key, compressed (`FleetRoot.pin`)."""
    token_id: bytes
    secret: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """What a person carries to the other machine."""
        body = self.pin + self.token_id + self.secret + ",".join(self.addresses).encode()
        return PREFIX + base64.urlsafe_b64encode(_checksum(body) + body).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """The token in a text.

        Raises:
            TokenError: it is none, or was damaged on its way.
        """
        whole = "Copy the whole line that paceline token printed"
        text = text.strip()
        if not text.startswith(PREFIX):
            if text.startswith("paceline") and "." in text[:12]:
                raise TokenError(
                    "The token is of another version of Paceline, which signs in another way", "Update Paceline on all machines"
                )
            raise TokenError(f"That is no join token: one starts with {PREFIX}", whole)
        if len(text) > MAX_TEXT:
            raise TokenError("That is no join token: it is far too long", whole)
        encoded = text.removeprefix(PREFIX)
        try:
            data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
            checksum, body = data[:4], data[4:]
            addresses = tuple(body[_FIXED_BYTES - 4 :].decode().split(","))
        except (binascii.Error, ValueError):
            raise TokenError("The token is damaged: not all of it is base64", whole) from None
        if len(data) <= _FIXED_BYTES or checksum != _checksum(body):
            raise TokenError("The token is damaged: letters are missing or wrong", whole)
        if len(addresses) > MAX_ADDRESSES or not all(is_address(address) for address in addresses):
            raise TokenError("The token names no address that could be called", whole)
        pin, rest = body[:PIN_BYTES], body[PIN_BYTES:]
        return cls(addresses, pin, rest[:ID_BYTES], rest[ID_BYTES : ID_BYTES + SECRET_BYTES])

    def proof(self, request: bytes, nonce: bytes) -> bytes:
        """What shows the issuer that the sender of `request` holds this token."""
        return make_proof(self.secret, self.token_id, request, nonce)


def make_proof(secret: bytes, token_id: bytes, request: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"paceline join\0" + token_id + nonce + request, "sha256")


def proves(proof: bytes, secret: bytes, token_id: bytes, request: bytes, nonce: bytes) -> bool:
    return hmac.compare_digest(proof, make_proof(secret, token_id, request, nonce))


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:4]
