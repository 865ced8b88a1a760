"""Join tokens: one line of text that says where to join and which CA to trust, and proves an invitation.

A token is `paceline2.` and, in base64url: checksum (4 bytes), the CA's public key (33), token id (8), secret (16), addresses. The secret never
crosses the wire: a joiner sends a keyed hash over its certificate request and a nonce. The checksum only distinguishes a typing error from a
refusal.

The issuer keeps two things on disk (issuer.json): its tokens, and the key that holds each issued id.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.core.errors import IdentityError, TokenError
from paceline.core.ids import NodeId, Trust
from paceline.net.trust.certificates import is_address
from paceline.net.trust.folder import FleetFolder

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
    addresses: tuple[str, ...]
    """host:port of the issuer's join port, one for each way to reach it."""
    pin: bytes
    """The CA's public key, compressed (`FleetRoot.pin`)."""
    token_id: bytes
    secret: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """Text of the token, which a person carries to the other machine."""
        body = self.pin + self.token_id + self.secret + ",".join(self.addresses).encode()
        return PREFIX + base64.urlsafe_b64encode(_checksum(body) + body).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Parse a token.

        Raises:
            TokenError: the text is not a token, or was damaged on its way.
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
        """Return the proof that the sender of `request` holds this token (`PROOF_BYTES` bytes)."""
        return make_proof(self.secret, self.token_id, request, nonce)


def make_proof(secret: bytes, token_id: bytes, request: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"paceline join\0" + token_id + nonce + request, "sha256")


def proves(proof: bytes, secret: bytes, token_id: bytes, request: bytes, nonce: bytes) -> bool:
    return hmac.compare_digest(proof, make_proof(secret, token_id, request, nonce))


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:4]


JOIN_PORT = 8155
KEEP_EXPIRED_S = 7 * 86400
"""Seconds that the issuer remembers an expired token, so that its refusal can say that the token expired. Raising it: issuer.json holds more old
tokens; lowering it: an old token is reported as unknown sooner."""


@dataclass(slots=True)
class HeldToken:
    """A token as the issuer keeps it."""

    token_id: str
    secret: str
    expires_at: float
    uses_left: int
    nonces: list[str]
    trust: Trust
    """Trust given to nodes that join with this token."""
    voided: bool = False


@dataclass(slots=True)
class Issued:
    """Holder of an id that was issued."""

    key: str
    """SHA-256 of the public key."""
    at: int
    token: str = ""
    """Id of the token that it joined with; empty for the machine that began the fleet."""
    trust: Trust | None = None
    """Trust that its last certificate gives; None if unknown."""


@dataclass(slots=True)
class IssuerState:
    tokens: dict[str, HeldToken]
    issued: dict[NodeId, Issued]
    join_port: int


def read_state(folder: FleetFolder) -> IssuerState:
    """Load the issuer's state; an empty state where none was kept.

    Raises:
        IdentityError: the file is damaged.
    """
    kept = folder.issuer_state()
    try:
        tokens = {
            token_id: HeldToken(
                token_id,
                str(one["secret"]),
                float(one["expires_at"]),
                int(one["uses_left"]),
                list(map(str, one["nonces"])),
                Trust(one["trust"]),
                bool(one["voided"]),
            )
            for token_id, one in dict[str, Any](kept.get("tokens", {})).items()
        }
        issued = {
            NodeId(node_id): Issued(
                str(one["key"]), int(one["at"]), str(one["token"]), None if one.get("trust") is None else Trust(one["trust"])
            )
            for node_id, one in dict[str, Any](kept.get("issued", {})).items()
        }
        return IssuerState(tokens, issued, int(kept.get("join_port", JOIN_PORT)))
    except (KeyError, TypeError, ValueError) as error:
        raise IdentityError("The issuer's state (issuer.json) is damaged", "Remove it; tokens handed out so far are void then") from error


def keep_state(folder: FleetFolder, state: IssuerState, now: float) -> None:
    """Write the issuer's state, without tokens that expired more than `KEEP_EXPIRED_S` before `now` (Unix seconds).

    Raises:
        IdentityError: it can't be written.
    """
    folder.keep_issuer_state(
        {
            "join_port": state.join_port,
            "tokens": {
                token_id: {name: value for name, value in asdict(token).items() if name != "token_id"}
                for token_id, token in state.tokens.items()
                if token.expires_at > now - KEEP_EXPIRED_S
            },
            "issued": {node_id: asdict(one) for node_id, one in sorted(state.issued.items())},
        }
    )
