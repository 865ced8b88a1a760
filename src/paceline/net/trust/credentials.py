"""mTLS between members: what a server shows and asks for, what a caller shows, and who is at an address.

TLS proves only "a member of this fleet"; names in it are no addresses. A caller that knows a node's certificate (from its card) asks for the
name which that certificate alone carries (`Member.tls_name`), so no other node can answer. One that knows only an address asks the node
there, by `NODE_NAME`, for its card, and calls again by the name it learned.
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
from paceline.net.protocol import PROGRAM, Versions
from paceline.net.trust.certificates import FleetRoot, Member
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import Voids, open_card
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire import fleet_pb2_grpc as rpc


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """What a node's gRPC port shows. It lets in only those whose certificate this fleet's CA issued."""
    shows = identity.member

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(identity.key_pem, identity.certificate_pem)], identity.root.pem)

    def fetch() -> grpc.ServerCertificateConfiguration:
        nonlocal shows
        if shows is not identity.member:
            shows = identity.member
            return configuration()
        # None: as before. The stubs don't know that it may be.
        return cast("grpc.ServerCertificateConfiguration", None)

    return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=True)


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """What a member shows to those it calls, and that it speaks to members only."""
    return grpc.ssl_channel_credentials(identity.root.pem, identity.key_pem, identity.certificate_pem)


async def ask_card(
    channel: grpc.aio.Channel,
    root: FleetRoot,
    voids: Voids,
    now: float,
    timeout_s: float,
    versions: Versions = PROGRAM,
) -> SealedCard:
    """The own card of the node at the far end of a channel made by `NODE_NAME`. Proved only once it is called by its `tls_name`.

    Args:
        versions: of the protocol. The node's is checked before its card is read.

    Raises:
        grpc.aio.AioRpcError: no node of this fleet answers there.
        NotTrusted: the card is not good.
        OtherProtocol: the node speaks another version.
        RevokedNode: the node that answers there was revoked.
        MalformedMessage: what it sent is no card.
    """
    answer = await rpc.CapabilityServiceStub(channel).GetNodeCapability(
        wire.GetNodeCapabilityRequest(protocol=versions.own), timeout=timeout_s
    )
    versions.check(root.member(answer.card.card.certificate, now).node_id, answer.protocol)
    return open_card(answer.card.card, root=root, voids=voids, now=now)


def check_callable(member: Member, voids: Voids) -> None:
    """Before a node is called: a revoked one is not told anything.

    Raises:
        RevokedNode: it was revoked.
    """
    if voids(member.node_id, member.issued_at):
        raise RevokedNode(f"{member.node_id} was revoked, so it is not called", who=member.node_id)


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
