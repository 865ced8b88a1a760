"""The API's own certificate, where none is given: made by this machine, for its names and addresses, and kept.

A node's certificate can't be used: it names no address, so no client of the API would take it, and its CA is the fleet's, which should vouch for
nodes alone. This one vouches for itself: a client is given the file, and then trusts this machine and no other.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import ifaddr
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from paceline.core.errors import ConfigError
from paceline.core.files import write_file
from paceline.server.settings import TlsFiles
from paceline.store.home import Home

LASTS, RENEWED_BEFORE = timedelta(days=800), timedelta(days=30)
"""Apple's systems take no certificate that is good for more than 825 days."""
BACKDATED = timedelta(days=1)


def own_certificate(home: Home, hosts: Sequence[str], now: float) -> TlsFiles:
    """The certificate and its key; made anew where there is none, or it ends soon, or lacks one of the names.

    Args:
        hosts: names that clients use for this machine, beside its own.
        now: Unix seconds.

    Raises:
        ConfigError: they can't be kept.
    """
    files = TlsFiles(home.api / "cert.pem", home.api / "key.pem", own=True)
    names = sorted({*own_names(), *hosts})
    moment = datetime.fromtimestamp(now, UTC)
    if _is_good(files, names, moment):
        return files
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Paceline on {socket.gethostname()}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - BACKDATED)
        .not_valid_after(moment + LASTS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([*map(x509.DNSName, names), *map(x509.IPAddress, own_addresses())]), critical=False)
        .sign(key, hashes.SHA256())
    )
    try:
        home.api.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(files.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), durable=True)
        write_file(files.certificate, certificate.public_bytes(Encoding.PEM), durable=True)
    except OSError as error:
        raise ConfigError(f"{home.api} can't be written: {error.strerror}", "PACELINE_HOME names another folder.") from error
    return files


def own_names() -> set[str]:
    """What this machine is called."""
    name = socket.gethostname().lower().rstrip(".")
    plain = name.isascii() and bool(name)
    return {"localhost", *((name, f"{name.partition('.')[0]}.local") if plain else ())}


def own_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Where it is reached, itself included."""
    found = {ip.ip if isinstance(ip.ip, str) else ip.ip[0] for adapter in ifaddr.get_adapters() for ip in adapter.ips}
    return sorted({*map(ipaddress.ip_address, found | {"127.0.0.1", "::1"})}, key=lambda one: (one.version, one.packed))


def _is_good(files: TlsFiles, names: Sequence[str], now: datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        is_kept = files.key.is_file()
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    lasts = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc - RENEWED_BEFORE
    return is_kept and lasts and set(names) <= set(held.get_values_for_type(x509.DNSName))
