"""The fleet's CA: issues certificates to nodes and join ports, and signs revocations. Its key stays on the node that ran `paceline init`, and is never
used for TLS.

One file holds key and certificate, so a copy of it (`paceline ca export`) is a complete backup. For processes that serve others, a separate process
(this module, run) makes each signature. Only that process reads the key, and it ends after one signature.

Law: a process that serves unauthenticated peers, parses models or speaks HTTP never has the key in its memory. Unauthenticated peers can't start a
process: a join's proof and a member's certificate are checked before anything is signed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.core.errors import IdentityError, NotTrusted, PacelineError
from paceline.core.ids import NodeId, Trust
from paceline.core.processes import python_command
from paceline.net.trust.certificates import (
    BACKDATED,
    FORMAT,
    JOIN_NAME,
    NODE_NAME,
    URI_PREFIX,
    FleetRoot,
    draw_serial,
    key_pem,
    make_key,
    open_request,
    tls_name,
    whole_second,
)
from paceline.net.trust.identity import read_secret
from paceline.net.trust.signing import PrivateKey, PublicKey, SignedKind, sign_as

CA_YEARS = timedelta(days=20 * 365)
NODE_HOLDS = timedelta(days=365)
"""Validity of a node's certificate. A node renews it long before its end (`net.join_client`). Raising it: a stolen key stays usable longer at nodes
that have not heard of the revocation."""
JOIN_PORT_HOLDS = timedelta(days=7)
"""Validity of a join port's certificate. A port draws a new key each day that it is open; the other days allow for wrong clocks. Raising it: a stolen
port key is good for longer; lowering it: a joiner with a wrong clock is refused."""


class CertificateAuthority(Protocol):
    """The CA as its users see it: with the key in this process, or in another (`AuthorityProcess`)."""

    @property
    def root(self) -> FleetRoot:
        """The CA's certificate, which every member trusts."""
        ...

    def issue(self, request: bytes, node_id: NodeId, now: float, *, after: int = 0, trust: Trust = Trust.MEMBER) -> bytes: ...

    def issue_to_join_port(self, request: bytes, now: float) -> bytes: ...

    def sign(self, kind: SignedKind, data: bytes) -> bytes:
        """Return the CA's signature (DER) on `data`. It is valid for data of that kind only."""
        ...


class Authority:
    """The CA with its key in this process. A `CertificateAuthority`."""

    def __init__(self, key: PrivateKey, root: FleetRoot) -> None:
        if key.public_key() != root.public_key:
            raise IdentityError("The CA's key is not the one in its certificate")
        self._key, self.root = key, root

    @classmethod
    def create(cls, now: float) -> Authority:
        """Create the CA of a new fleet. `now` is in Unix seconds."""
        key = make_key()
        serial = draw_serial()
        name = _name(f"paceline fleet {serial & 0xFFFFFFFF:08x}", FORMAT)
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
            .sign(key, hashes.SHA256())
        )
        return cls(key, FleetRoot(certificate))

    @classmethod
    def from_pem(cls, data: bytes, passphrase: str | None = None) -> Authority:
        """Load a CA from the bytes that `to_pem` wrote.

        Raises:
            IdentityError: the file is damaged, its key and certificate don't match, or the passphrase is wrong, missing or not needed.
        """
        if (passphrase is not None) != is_encrypted(data):
            what = "is encrypted, and no passphrase was given" if passphrase is None else "is not encrypted, and a passphrase was given"
            raise IdentityError(f"The file of the fleet's CA {what}", "paceline ca import asks for it where it is needed")
        try:
            key = load_pem_private_key(data, None if passphrase is None else passphrase.encode())
            root = FleetRoot(x509.load_pem_x509_certificate(data))
        except (ValueError, TypeError, NotTrusted) as error:
            what = "is damaged" if passphrase is None else "is damaged, or the passphrase is another"
            raise IdentityError(f"The file of the fleet's CA {what}", "Restore it: paceline ca import FILE") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise IdentityError("The file of the fleet's CA holds a key of another kind", "Restore it: paceline ca import FILE")
        return cls(key, root)

    def to_pem(self, passphrase: str | None = None) -> bytes:
        """Return the key (encrypted if a passphrase is given) and the certificate as PEM. The result is a secret: its holder can admit any machine."""
        if passphrase is None:
            return self.key_pem + self.root.pem
        encryption = BestAvailableEncryption(passphrase.encode())
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption) + self.root.pem

    @property
    def key_pem(self) -> bytes:
        return key_pem(self._key)

    def issue(self, request: bytes, node_id: NodeId, now: float, *, after: int = 0, trust: Trust = Trust.MEMBER) -> bytes:
        """Issue a node's certificate for the key in a request. Everything else that the request asks for is ignored.

        Args:
            request: PKCS #10, DER.
            node_id: must be the name the request asks for.
            now: Unix seconds.
            after: Unix seconds; the certificate counts as issued later than this (the `not_after` of the node's last revocation).
            trust: the trust that the certificate grants.

        Returns:
            The certificate, DER.

        Raises:
            NotTrusted: the request is damaged, is not signed by its key, asks for another name, or holds a key of another kind.
            IdentityError: the certificate would begin outside of the CA's own validity.
        """
        asked, key = open_request(request)
        if asked != node_id:
            raise NotTrusted(f"A certificate request asks for {asked}, not {node_id}", who=asked)
        serial = draw_serial()
        names = (x509.UniformResourceIdentifier(URI_PREFIX + node_id), x509.DNSName(NODE_NAME), x509.DNSName(tls_name(serial)))
        return self._certificate(key, _name(node_id, str(trust)), names, serial, max(now, after + 1), NODE_HOLDS)

    def issue_to_join_port(self, request: bytes, now: float) -> bytes:
        """Issue a certificate for a join port's key. It identifies no node.

        Args:
            request: PKCS #10, DER.
            now: Unix seconds.

        Returns:
            The certificate, DER.

        Raises:
            NotTrusted: the request is damaged, is not signed by its key, names no node, or holds a key of another kind.
            IdentityError: `now` is outside of the CA's own validity.
        """
        _, key = open_request(request)
        return self._certificate(key, _name("paceline join"), (x509.DNSName(JOIN_NAME),), draw_serial(), now, JOIN_PORT_HOLDS)

    def sign(self, kind: SignedKind, data: bytes) -> bytes:
        """Return the CA's signature (DER) on `data`. It is valid for data of that kind only."""
        return sign_as(self._key, kind, data)

    def _certificate(
        self, key: PublicKey, name: x509.Name, names: Iterable[x509.GeneralName], serial: int, at: float, holds: timedelta
    ) -> bytes:
        root = self.root.certificate
        if not root.not_valid_before_utc.timestamp() <= at < root.not_valid_after_utc.timestamp():
            raise IdentityError(
                f"A certificate that begins {_shown(at)} is outside of what the fleet's CA holds for: "
                f"{root.not_valid_before_utc:%Y-%m-%d} to {root.not_valid_after_utc:%Y-%m-%d}",
                "Set this machine's clock. Where it is right, the node was revoked while the clock was wrong: join under another --name",
            )
        start = whole_second(at)
        issuer_key = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(root.subject)
            .public_key(key)
            .serial_number(serial)
            .not_valid_before(start - BACKDATED)
            .not_valid_after(min(start + holds, root.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key), critical=False)
            .sign(self._key, hashes.SHA256())
            .public_bytes(Encoding.DER)
        )


def is_encrypted(data: bytes) -> bool:
    """Return whether a CA file needs a passphrase."""
    return b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in data


def _name(common: str, *units: str) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    return x509.Name([*attributes, *(x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit) for unit in units)])


def _shown(at: float) -> str:
    """Format a time for a message, also one that a calendar can't represent."""
    try:
        return f"on {whole_second(at):%Y-%m-%d}"
    except (OverflowError, OSError, ValueError):
        return f"{at:.0f} seconds after 1970"


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


BOUND_S = 60.0
"""Seconds that one signature may take, on a busy machine. Raising it: a process that hangs blocks a join longer; lowering it: a busy machine fails to
sign."""


@dataclass(frozen=True, slots=True)
class AuthorityProcess:
    """The CA behind a key file. Each signature starts a process of its own. A `CertificateAuthority`."""

    file: Path
    root: FleetRoot

    def issue(self, request: bytes, node_id: NodeId, now: float, *, after: int = 0, trust: Trust = Trust.MEMBER) -> bytes:
        return self._ask("issue", request, now, node_id=node_id, after=after, trust=str(trust))

    def issue_to_join_port(self, request: bytes, now: float) -> bytes:
        return self._ask("issue_to_join_port", request, now)

    def sign(self, kind: SignedKind, data: bytes) -> bytes:
        return self._ask("sign", data, 0.0, kind=kind.name)

    def _ask(self, what: str, data: bytes, now: float, **more: str | int) -> bytes:
        asked = json.dumps({"what": what, "data": b64encode(data).decode(), "now": now, **more})
        command = python_command("-m", __name__, str(self.file))
        try:
            done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=BOUND_S, check=True)  # noqa: S603  our own
            said: dict[str, str] = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise IdentityError(
                f"The process that signs for the fleet's CA failed ({type(error).__name__})", "See whether this machine has memory left"
            ) from error
        if "signed" in said:
            return b64decode(said["signed"])
        if "who" in said:
            raise NotTrusted(said["message"], said["hint"], who=said["who"])
        raise IdentityError(said["message"], said["hint"])


def answer(authority: Authority, asked: dict[str, Any]) -> bytes:
    """Perform one request of an `AuthorityProcess`, and return the certificate or the signature (DER)."""
    data, now = b64decode(asked["data"]), float(asked["now"])
    match asked["what"]:
        case "issue":
            return authority.issue(data, NodeId(asked["node_id"]), now, after=int(asked["after"]), trust=Trust(asked["trust"]))
        case "issue_to_join_port":
            return authority.issue_to_join_port(data, now)
        case _:
            return authority.sign(SignedKind[asked["kind"]], data)


def main() -> None:
    """Read one request from standard input, and write one answer to standard output."""
    try:
        signed = answer(Authority.from_pem(read_secret(Path(sys.argv[1]))), json.loads(sys.stdin.read()))
        said = {"signed": b64encode(signed).decode()}
    except PacelineError as error:
        said = {"message": error.message, "hint": error.hint}
        if isinstance(error, NotTrusted):
            said["who"] = error.who
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
