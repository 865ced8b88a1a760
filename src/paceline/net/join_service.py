"""JoinService on the wire: hands a join request to the issuer, and says in the log who came and who was refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

import grpc
import grpc.aio

from paceline.core.errors import FleetError, JoinRefused, NotTrusted, UserError
from paceline.core.ids import NodeId
from paceline.net.trust.connections import ConnectionWatch
from paceline.net.trust.folder import FleetFolder
from paceline.net.trust.issuer import Issuer, JoinAttempt
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.requests import open_request
from paceline.net.trust.sockets import remote_of
from paceline.net.wire import fleet_pb2 as wire
from paceline.net.wire.fleet_pb2_grpc import JoinServiceServicer

logger = logging.getLogger(__name__)

HINT_KEY = "paceline-hint"
MAX_PEERS = 64
MAX_AT_ONCE = 4
"""Joins that are decided at a time; others wait. Each holds the folder's lock."""
Context = grpc.aio.ServicerContext[wire.JoinRequest, Awaitable[wire.JoinResponse]]


class JoinServicer(JoinServiceServicer):
    """Lets machines in.

    Args:
        folder: where revocations are, for the newcomer.
        peers: addresses (host:port) of members, for the newcomer.
        on_joined: told the id of each machine that came.
        here: ids of members, whose names no other machine may take.
    """

    def __init__(
        self,
        issuer: Issuer,
        folder: FleetFolder,
        peers: Callable[[], Iterable[str]],
        refusals: Refusals,
        on_joined: Callable[[str], None] | None = None,
        here: Callable[[], Collection[NodeId]] = tuple,
    ) -> None:
        self._issuer, self._folder, self._peers, self._refusals = issuer, folder, peers, refusals
        self._on_joined, self._here = on_joined, here
        self._deciding = asyncio.Semaphore(MAX_AT_ONCE)
        self.watch: ConnectionWatch | None = None
        """Told of calls; as long as the port is open."""

    async def Join(self, request: wire.JoinRequest, context: Context) -> wire.JoinResponse:
        watch, peer = self.watch, context.peer()
        if watch is None:
            return await self._join(request, context)
        watch.began(peer)
        try:
            return await self._join(request, context)
        finally:
            watch.ended(peer)

    async def _join(self, request: wire.JoinRequest, context: Context) -> wire.JoinResponse:
        attempt = JoinAttempt(request.certificate_request, request.token_id, request.proof, request.nonce)
        try:
            # Signing and waiting for the disk are not for the event loop.
            async with self._deciding:
                node_id, certificate = await asyncio.to_thread(self._issuer.admit, attempt, self._here())
            revocations = await asyncio.to_thread(self._folder.sealed_revocations)
        except (JoinRefused, NotTrusted) as error:
            host, port = remote_of(context.peer())
            self._refusals.note(host, f"{error.message} (a join as {_claimed(attempt)})", at=f"port {port}")
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, error.message, ((HINT_KEY, error.hint),))
        except (UserError, FleetError) as error:
            logger.error("could not let %s in: %s", _claimed(attempt), error)  # noqa: TRY400 - it says all there is
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "The machine that issues certificates has trouble of its own: see its log"
            )
        logger.info("%s joined from %s", node_id, context.peer())
        if self._on_joined is not None:
            self._on_joined(node_id)
        return wire.JoinResponse(
            certificate=certificate,
            ca_certificate=self._issuer.authority.root.der,
            peer_addresses=list(dict.fromkeys(self._peers()))[:MAX_PEERS],
            revocations=[wire.SignedRevocation.FromString(one) for one in revocations],
        )


def _claimed(attempt: JoinAttempt) -> str:
    try:
        return open_request(attempt.request)[0]
    except NotTrusted:
        return "nobody in particular"
