"""mTLS between members: the credentials of servers and callers, and the request for the card of the node at an address.

TLS proves only that the other side is a member of this fleet; its names are not addresses. A caller that knows a node's certificate (from its card) asks
for the name that only this certificate carries (`Member.tls_name`), so no other node can answer. A caller that knows only an address asks the node there,
by `NODE_NAME`, for its card, and calls again by the name in it.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import grpc
import grpc.aio

from paceline.core.errors import RevokedNode
from paceline.fleet.card import SealedCard
from paceline.fleet.eligibility import Voids
from paceline.net.protocol import PROGRAM, Versions
from paceline.net.trust.certificates import FleetRoot, Member
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import open_card
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire import fleet_pb2_grpc as rpc


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """Return the credentials of a node's gRPC port. They accept only callers with a certificate of this fleet's CA, and show a renewed certificate."""
    shows = identity.member

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(identity.key_pem, identity.certificate_pem)], identity.root.pem)

    def fetch() -> grpc.ServerCertificateConfiguration:
        nonlocal shows
        if shows is not identity.member:
            shows = identity.member
            return configuration()
        # None leaves the certificate as it is. The type stubs don't allow it.
        return cast("grpc.ServerCertificateConfiguration", None)

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """Return the credentials with which a member calls others. They accept only a server with a certificate of this fleet's CA."""
    return grpc.ssl_channel_credentials(identity.root.pem, identity.key_pem, identity.certificate_pem)


async def ask_card(
    channel: grpc.aio.Channel,
    root: FleetRoot,
    voids: Voids,
    now: float,
    timeout_s: float,
    versions: Versions = PROGRAM,
) -> SealedCard:
    """Ask the node at the other end of a channel to `NODE_NAME` for its own card. That it is this node is proved only by a call to its `tls_name`.

    Args:
        now: Unix seconds.
        versions: the protocol version of this node, and the check of the other node's version, which is made before the card is read.

    Raises:
        grpc.aio.AioRpcError: no node of this fleet answers there.
        NotTrusted: the card or its certificate fails its check.
        OtherProtocol: the node speaks another version.
        RevokedNode: the node that answers there was revoked.
        MalformedMessage: the answer is not a card.
    """
    answer = await rpc.CapabilityServiceStub(channel).GetNodeCapability(
        wire.GetNodeCapabilityRequest(protocol=versions.own), timeout=timeout_s
    )
    versions.check(root.member(answer.card.card.certificate, now).node_id, answer.protocol)
    return open_card(answer.card.card, root=root, voids=voids, now=now)


def check_callable(member: Member, voids: Voids) -> None:
    """Check before a call that the node was not revoked.

    Raises:
        RevokedNode: the node was revoked.
    """
    if voids(member.node_id, member.issued_at):
        raise RevokedNode(f"{member.node_id} was revoked, so it is not called", who=member.node_id)


def server_context(identity: Identity) -> ssl.SSLContext:
    """Return the TLS context of a listening socket. Callers must show a certificate of the fleet."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.verify_mode = ssl.CERT_REQUIRED
    # On a resumed session the caller would show no certificate.
    context.num_tickets = 0
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """Return the TLS context of a dialling socket. The caller pins the other node by name (`Member.tls_name`)."""
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
    """Yield a path from which OpenSSL, which reads keys only from files, can read a secret. The file is in memory if the system supports that."""
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
