"""TLS 1.3, and members only: what Python's `ssl` is told of this node's identity."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

from paceline.transport.trust.identity import Identity


def server_context(identity: Identity) -> ssl.SSLContext:
    """For those who listen: callers show a certificate of the fleet."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.verify_mode = ssl.CERT_REQUIRED
    # A session that is taken up again would show no certificate.
    context.num_tickets = 0
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """For those who dial: whom they meet is pinned by name (`Member.tls_name`)."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    assert context.check_hostname, "is on for clients"
    return context


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=identity.root.pem.decode())
    with _readable(identity.key_pem + identity.certificate_pem) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _readable(secret: bytes) -> Generator[str]:
    """A path for OpenSSL, which takes keys from files only: in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, secret)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile(prefix="paceline-") as file:
            file.write(secret)
            file.flush()
            yield file.name
