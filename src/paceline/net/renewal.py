"""A certificate is made anew by the node that holds the CA, over mTLS, long before it ends: for the same name, the same key, the same trust."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio

from paceline.core.errors import FleetError, GossipRefused, UserError
from paceline.net.rpc_faults import abort, fleet_error_of, unless_closed
from paceline.net.server import KIB, Service
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Limit
from paceline.net.trust.identity import Identity
from paceline.net.trust.issuer import Issuer
from paceline.net.trust.requests import make_request
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import RenewalServiceServicer, RenewalServiceStub, add_RenewalServiceServicer_to_server

logger = logging.getLogger(__name__)

RENEW_S = 30.0
Context = grpc.aio.ServicerContext[Any, Any]


class RenewalServicer(RenewalServiceServicer):
    """Answers members.

    Args:
        issuer: the CA at work, or None on a node without it; asked at each call. It may come with a backup.
    """

    def __init__(self, issuer: Callable[[], Issuer | None], guard: PeerGuard) -> None:
        self._issuer, self._guard = issuer, guard

    async def Renew(self, request: wire.RenewRequest, context: Context) -> wire.RenewResponse:
        try:
            member, issuer = self._guard.peer(context), self._issuer()
            if issuer is None:
                raise GossipRefused("The fleet's CA is not on this node")
            # Signing and waiting for the disk are not for the event loop.
            certificate = await asyncio.to_thread(issuer.renew, request.certificate_request, member)
        except FleetError as error:
            await abort(context, error)
        except UserError as error:
            logger.error("no certificate could be renewed: %s", error)  # noqa: TRY400 - it says all there is
            await abort(context, GossipRefused("The machine that issues certificates has trouble of its own: see its log"))
        logger.info("renewed the certificate of %s", member.node_id)
        return wire.RenewResponse(certificate=certificate)


async def ask_to_renew(channel: grpc.aio.Channel, identity: Identity, issuer: str) -> bytes:
    """A new certificate (DER, unchecked) for this node, from the one with the CA.

    Raises:
        FleetError: it can't be reached, or refuses.
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
    """What a node's server registers."""
    servicer = RenewalServicer(issuer, guard)
    return Service(partial(add_RenewalServiceServicer_to_server, servicer), {"RenewalService/Renew": Limit(8 * KIB, 8)})
