"""Joining a fleet: from a token to an identity.

Nothing is sent before the other side has shown a certificate for join ports that the CA of the token's pin signed. TLS proves that the other side has the
certificate's key. All of the token's addresses are tried at once, because some of them may lead nowhere.

The node that holds the CA renews a certificate over mTLS, long before it expires: for the same name, the same key and the same trust.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import cast

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from paceline.core.background import end_tasks
from paceline.core.clock import Clock
from paceline.core.errors import FleetError, GossipRefused, JoinRefused, NotTrusted, Unreachable, UserError
from paceline.core.ids import NodeId, Trust
from paceline.core.text import printable
from paceline.fleet.card import SealedRevocation
from paceline.net.join_host import HINT_KEY, MAX_PEERS
from paceline.net.protocol import PROTOCOL_VERSION
from paceline.net.rpc_faults import fleet_error_of, unless_closed
from paceline.net.server import KIB, Service
from paceline.net.trust.certificates import JOIN_NAME, FleetRoot, is_address, make_key, make_request, read_join_certificate
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Context, Limit
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import Issuer
from paceline.net.trust.seals import open_revocation
from paceline.net.trust.tokens import NONCE_BYTES, JoinToken
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import (
    JoinServiceStub,
    RenewalServiceServicer,
    RenewalServiceStub,
    add_RenewalServiceServicer_to_server,
)

logger = logging.getLogger(__name__)

CONNECT_S = 15.0
ANSWER_S = 60.0
"""Seconds for an answer, enough for a busy machine. Raising it or `CONNECT_S`: a join takes longer to report that no machine is there."""
MAX_ANSWER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of a join, which the new node must keep."""

    identity: Identity
    peers: tuple[str, ...]
    revocations: tuple[SealedRevocation, ...]


@dataclass(frozen=True, slots=True)
class _Tried:
    """The result of trying an address: the certificate of the join port, or the problem."""

    address: str
    shown: x509.Certificate | None
    problem: str = ""
    impostor: bool = False


async def join(token: JoinToken, node_id: NodeId, clock: Clock) -> Joined:
    """Join the fleet of a token and return the new identity.

    Raises:
        JoinRefused: the issuer refuses, another machine answers in its place, or this machine's clock is wrong.
        Unreachable: no machine answers at any of the token's addresses.
    """
    tried: list[_Tried] = []
    asking = [asyncio.create_task(_ask(address, token.pin)) for address in token.addresses]
    try:
        for next_answer in asyncio.as_completed(asking):
            found = await next_answer
            if found.shown is not None:
                try:
                    return await _join_at(found.address, found.shown, token, node_id, clock)
                except grpc.aio.AioRpcError as error:
                    found = _Tried(found.address, None, f"{error.code().name.lower()}: {printable(error.details() or '')}")
            tried.append(found)
    finally:
        await end_tasks(*asking)
    impostors = [one.address for one in tried if one.impostor]
    if impostors:
        raise JoinRefused(
            f"The machine that answers at {', '.join(impostors)} did not make this token: it shows a certificate of another CA",
            "Another machine may intercept the connection, or the right one is in another fleet. Nothing was sent. Ask for another token: paceline token",
        )
    raise Unreachable(
        "The machine that the token is from can't be reached: " + "; ".join(f"{one.address} ({one.problem})" for one in tried),
        "It must be running paceline up or paceline token, on a network this machine is on, with no firewall before that port. Or the token was used, or has expired: paceline token makes another",
    )


async def _ask(address: str, pin: bytes) -> _Tried:
    """Return the certificate of the join port at an address, which TLS shows before any request is sent."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the CA's key is checked instead
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except TimeoutError:
        return _Tried(address, None, "no answer")
    except OSError as error:
        return _Tried(address, None, _why(error))
    try:
        certificate: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
    try:
        return _Tried(address, read_join_certificate(certificate, pin))
    except NotTrusted as error:
        logger.warning("refused %s: %s", address, error.message)
        return _Tried(address, None, error.message, impostor=True)


async def _join_at(address: str, shown: x509.Certificate, token: JoinToken, node_id: NodeId, clock: Clock) -> Joined:
    """Send one join request and check the answer.

    Raises:
        grpc.aio.AioRpcError: the call failed.
        JoinRefused: the issuer refuses, its answer can't be used, or this machine's clock is wrong.
    """
    _check_clock(shown, clock)
    key = make_key()
    request, nonce = make_request(key, node_id), secrets.token_bytes(NONCE_BYTES)
    options = (
        ("grpc.ssl_target_name_override", JOIN_NAME),
        ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # a request sent twice would be a replay
    )
    credentials = grpc.ssl_channel_credentials(shown.public_bytes(Encoding.PEM))  # that certificate and no other
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        try:
            answer = await JoinServiceStub(channel).Join(
                wire.JoinRequest(
                    certificate_request=request,
                    token_id=token.token_id.hex(),
                    proof=token.proof(request, nonce),
                    nonce=nonce,
                    protocol=PROTOCOL_VERSION,
                ),
                timeout=ANSWER_S,
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION}:
                raise JoinRefused(printable(error.details() or "The join was refused"), printable(_hint(error))) from error
            raise
    try:
        root = FleetRoot.from_der(answer.ca_certificate)
        if root.pin != token.pin:
            raise NotTrusted("its CA is another than the token's", who=address)
        identity = Identity.assemble(key, answer.certificate, root, clock.wall())
        _check_clock(x509.load_der_x509_certificate(answer.certificate), clock)
        revocations = tuple(open_revocation(one, root) for one in answer.revocations)
    except FleetError as error:
        raise JoinRefused(
            f"{address} answered with something that can't be used: {error.message}", "Use the same version on all machines"
        ) from error
    if identity.node_id != node_id:
        raise JoinRefused(f"{address} answered with a certificate for {identity.node_id}, not {node_id}")
    peers = tuple(peer for peer in answer.peer_addresses[:MAX_PEERS] if is_address(peer))
    return Joined(identity, peers, revocations)


def _why(error: OSError) -> str:
    """Return the reason of a failed connection in a few words. The text of asyncio repeats the address, and a resolver's error numbers are not errnos."""
    if isinstance(error, socket.gaierror):
        return "no such name"
    return os.strerror(error.errno).lower() if error.errno else type(error).__name__


def _check_clock(certificate: x509.Certificate, clock: Clock) -> None:
    """Check this machine's clock against a certificate, which is backdated by a day. With a wrong clock TLS would fail without a reason.

    Raises:
        JoinRefused: the certificate is not valid at the time of this machine.
    """
    here = datetime.fromtimestamp(clock.wall(), UTC)
    if not certificate.not_valid_before_utc <= here <= certificate.not_valid_after_utc:
        raise JoinRefused(
            f"This machine's clock is wrong: it says {here:%Y-%m-%d %H:%M} UTC, and the fleet's certificates "
            f"hold from {certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}",
            "Set the clock and join again",
        )


def _hint(error: grpc.aio.AioRpcError) -> str:
    # grpc's type stubs declare metadata as one pair, but it is a sequence of pairs.
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in metadata:
        if key == HINT_KEY:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return ""


RENEW_S = 30.0


class RenewalServicer(RenewalServiceServicer):
    """The service that renews the certificates of members.

    Args:
        issuer: returns the issuer, or None on a node without the CA. It is asked at each call, because a restored backup may bring the CA.
    """

    def __init__(self, issuer: Callable[[], Issuer | None], guard: PeerGuard) -> None:
        self._issuer, self._guard = issuer, guard

    async def Renew(self, request: wire.RenewRequest, context: Context) -> wire.RenewResponse:
        member, issuer = self._guard.peer(context), self._issuer()
        if issuer is None:
            raise GossipRefused("The fleet's CA is not on this node")
        try:
            # Signing and waiting for the disk would block the event loop.
            certificate = await asyncio.to_thread(issuer.renew, request.certificate_request, member)
        except UserError as error:
            logger.error("no certificate could be renewed: %s", error)  # noqa: TRY400 - it says all there is
            raise GossipRefused("The machine that issues certificates has trouble of its own: see its log") from error
        logger.info("renewed the certificate of %s", member.node_id)
        return wire.RenewResponse(certificate=certificate)


async def ask_to_renew(channel: grpc.aio.Channel, identity: Identity, issuer: str) -> bytes:
    """Return a new certificate (DER, unchecked) for this node from the node that holds the CA.

    Raises:
        FleetError: that node can't be reached, or refuses.
    """
    request = await asyncio.to_thread(make_request, identity.key, identity.node_id)
    try:
        with unless_closed(issuer):
            answer = await RenewalServiceStub(channel).Renew(wire.RenewRequest(certificate_request=request), timeout=RENEW_S)
    except grpc.aio.AioRpcError as error:
        failure = fleet_error_of(error, issuer)
    else:
        return answer.certificate
    raise failure


def renewal_service(issuer: Callable[[], Issuer | None], guard: PeerGuard) -> Service:
    servicer = RenewalServicer(issuer, guard)
    return Service(partial(add_RenewalServiceServicer_to_server, servicer), {"RenewalService/Renew": Limit(8 * KIB, 8, least=Trust.GUEST)})
