"""A node's identity: its key, its certificate, and the CA it trusts. All three are in one file, so that they can't disagree.

Key files are readable by their owner only.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from paceline.core.errors import IdentityError, NotTrusted
from paceline.core.ids import NodeId
from paceline.net.trust.certificates import UNREADABLE, FleetRoot, Member, key_pem
from paceline.net.trust.signing import PrivateKey, SignedKind, sign_as

MAX_FILE_BYTES = 16 << 20


def read_secret(path: Path) -> bytes:
    """Read a file that must be readable by its owner only.

    Raises:
        IdentityError: others can read it, it is another user's, or it can't be read.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise IdentityError(
                    f"{path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o}), so it is not used",
                    f"Make it yours alone: chmod 600 {path}. If others may have read it, revoke this node and join again",
                )
            if status.st_uid != os.geteuid():
                raise IdentityError(f"{path} belongs to another user, so it is not used", "Run as the user who made it")
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise IdentityError(f"{path} can't be read: {error.strerror}") from error


SUFFIX_BYTES = 2
"""Random bytes in a node id, so that two machines called `macbook` can be in one fleet."""


@dataclass(slots=True)
class Identity:
    """A member's key, certificate and CA. A process has one such object, and only its certificate changes (`renewed`)."""

    key: PrivateKey
    member: Member
    root: FleetRoot

    @property
    def node_id(self) -> NodeId:
        return self.member.node_id

    @property
    def key_pem(self) -> bytes:
        return key_pem(self.key)

    @property
    def certificate_pem(self) -> bytes:
        return x509.load_der_x509_certificate(self.member.certificate).public_bytes(Encoding.PEM)

    def sign(self, kind: SignedKind, data: bytes) -> bytes:
        """Return this node's signature (DER) on `data` as data of that kind."""
        return sign_as(self.key, kind, data)

    def to_pem(self) -> bytes:
        """Return key, certificate and the CA's certificate as PEM. The result is a secret: any machine that holds it can act as this node."""
        return self.key_pem + self.certificate_pem + self.root.pem

    @classmethod
    def assemble(cls, key: PrivateKey, certificate: bytes, root: FleetRoot, now: float) -> Identity:
        """Build an identity from the certificate (DER) that the CA issued.

        Raises:
            NotTrusted: the certificate is not the CA's, or is for another key.
        """
        member = root.member(certificate, now)
        if member.public_key != key.public_key():
            raise NotTrusted("The certificate is for another key than this node's", who=member.node_id)
        return cls(key, member, root)

    def renewed(self, certificate: bytes, now: float) -> None:
        """Take a newer certificate for the same name and key.

        Raises:
            NotTrusted: the certificate is not newer, is for another node, or has not begun. In the last case the CA's clock is ahead, and no node would
                accept it.
        """
        again = self.assemble(self.key, certificate, self.root, now).member
        if again.begins_at > now:
            raise NotTrusted(
                "A renewed certificate begins ahead of this machine's clock: that one, or the CA's, is wrong", who=again.node_id
            )
        if again.node_id != self.node_id or again.expires_at <= self.member.expires_at:
            raise NotTrusted("The renewed certificate is for another node, or not newer", who=again.node_id)
        self.member = again

    @classmethod
    def from_pem(cls, data: bytes) -> Identity:
        """Load an identity from the bytes that `to_pem` wrote.

        Raises:
            IdentityError: the file is damaged, or the certificate has expired.
        """
        again = "Restore the file, or remove it and join again: paceline join"
        try:
            key = load_pem_private_key(data, None)
            own, authority = x509.load_pem_x509_certificates(data)
        except UNREADABLE as error:
            raise IdentityError("The file of this node's identity is damaged", again) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise IdentityError("The file of this node's identity holds a key of another kind", again)
        ends, now = own.not_valid_after_utc, time.time()
        if ends.timestamp() < now:
            raise IdentityError(
                f"This node's certificate ended on {ends:%Y-%m-%d}, and this machine's clock says {datetime.fromtimestamp(now, UTC):%Y-%m-%d}",
                "If the clock is wrong, set it. Else remove the fleet's folder and join again: paceline join",
            )
        try:
            return cls.assemble(key, own.public_bytes(Encoding.DER), FleetRoot(authority), now)
        except NotTrusted as error:
            raise IdentityError(f"This node's identity can't be used: {error.message}", again) from error


def choose_node_id(hostname: str) -> NodeId:
    """Choose a new node id for this machine: the host's first label and a random suffix."""
    label = re.sub(r"[^a-z0-9]+", "-", hostname.partition(".")[0].lower()).strip("-")[:40].strip("-") or "node"
    return NodeId(f"{label}-{secrets.token_hex(SUFFIX_BYTES)}")
