"""Every RPC is checked as it starts: who calls, by the certificate that TLS verified, and whether it still belongs.

TLS checks a connection once, and a connection may last for days. So revocation is checked here, for each RPC. RPCs that are open when their caller
is revoked are cancelled and answered PERMISSION_DENIED, also those whose request has not come. Its connections stay open without calls until gRPC
closes them as idle. The log names what is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, cast

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from paceline.core.clock import Clock
from paceline.core.errors import NotTrusted, RevokedNode
from paceline.core.ids import NodeId
from paceline.net.trust.certificates import UNREADABLE, FleetRoot, Member
from paceline.net.trust.handlers import Behaviour, Context, Continuation, Handler, rewrap, told
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.seals import REVOCATION_KEY, Voids

TRUST_ITSELF = ("/paceline.v1.CapabilityService/", "/paceline.v1.RenewalService/", "/paceline.v1.ControlService/")
"""By what a node hears of revocations, and what it tells its own machine."""


GRACE_S = 1.0
"""Seconds for a revoked caller to take what is being sent to it."""


class _Call:
    """An RPC under way, as its handler's context: all that a context has, and sending that can be waited for.

    gRPC can't answer an RPC with an error while it sends on it; so an RPC is cancelled just after that. If its caller takes nothing for `GRACE_S`, the RPC
    ends without an answer.
    """

    def __init__(self, context: Context, member: Member, task: asyncio.Task[Any]) -> None:
        self._context = context
        self.member, self.task = member, task
        self.revoked = self.dropped = False
        self._sending = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        await self._send(self._context.write(message))

    async def send_initial_metadata(self, metadata: Any) -> None:
        await self._send(self._context.send_initial_metadata(metadata))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self._sending = True
        await self._context.abort(code, details, trailing_metadata)
        raise AssertionError("abort raises")

    def cancel(self) -> None:
        """End it, now or once what is being sent is sent."""
        self.revoked = True
        if self._sending:
            self.task.get_loop().call_later(GRACE_S, self._drop)
        else:
            self.task.cancel()

    def _drop(self) -> None:
        if self._sending and not self.task.done():
            self.dropped = True
            self.task.cancel()

    async def _send(self, sending: Awaitable[None]) -> None:
        self._sending = True
        try:
            await sending
        finally:
            self._sending = False
        if self.revoked:
            raise asyncio.CancelledError


class PeerGuard(grpc.aio.ServerInterceptor):
    """The interceptor of a node's gRPC server. Lives on one event loop.

    Args:
        voids: the revocations known; asked at each RPC.
        revocation_of: the CA's word on a node (a SignedRevocation), which a revoked caller is shown; None where there is none.
        check_age: raises NotTrusted where what is known here of revocations is too old to let in any node.
    """

    REMEMBERED = 1024

    def __init__(
        self,
        root: FleetRoot,
        voids: Voids,
        clock: Clock,
        refusals: Refusals,
        revocation_of: Callable[[NodeId], bytes | None] = lambda _: None,
        check_age: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self.voids, self._clock, self.refusals = root, voids, clock, refusals
        self._revocation_of, self._check_age = revocation_of, check_age
        self._calls: set[_Call] = set()
        self._read: dict[bytes, bytes] = {}

    def peer(self, context: Context) -> Member:
        """Who calls.

        Raises:
            NotTrusted: the connection shows no certificate of this fleet.
            RevokedNode: the caller was revoked.
        """
        (pem,) = context.auth_context().get("x509_pem_cert") or (b"",)
        certificate = self._read.get(pem)
        if certificate is None:
            try:
                certificate = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
            except UNREADABLE as error:
                raise NotTrusted("The caller shows no certificate", who="a caller") from error
            if len(self._read) >= self.REMEMBERED:
                self._read.clear()
            self._read[pem] = certificate
        member = self._root.member(certificate, self._clock.wall())
        if self.voids(member.node_id, member.issued_at):
            raise RevokedNode(f"{member.node_id} was revoked", who=member.node_id)
        return member

    def revoked(self, node_id: NodeId, not_after: int) -> None:
        """End the RPCs of a node whose certificates issued up to `not_after` were voided."""
        for call in list(self._calls):
            if call.member.node_id == node_id and call.member.issued_at <= not_after:
                call.cancel()

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        return rewrap(await continuation(handler_call_details), lambda behaviour: self._guarded(behaviour, handler_call_details.method))

    def _guarded(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def guarded(request: Any, context: Context) -> Any:
            async with self._admitted(context, method) as call:
                # All that a context has; a type with so many methods can't be made by delegation.
                return await told(behaviour)(request, cast("Context", call))

        return guarded

    @asynccontextmanager
    async def _admitted(self, context: Context, method: str) -> AsyncGenerator[_Call]:
        """The time of one RPC: entered only by a member that still belongs, left early when it no longer does."""
        try:
            member = self.peer(context)
            if not method.startswith(TRUST_ITSELF):
                self._check_age()
        except NotTrusted as error:
            await self._refuse(context, error, method)
        task = asyncio.current_task()
        assert task is not None, "an RPC runs in a task"
        call = _Call(context, member, task)
        self._calls.add(call)
        try:
            yield call
        except asyncio.CancelledError:
            if not call.revoked or call.dropped:
                raise
            while task.uncancel():
                pass
            await self._refuse(context, RevokedNode(f"{member.node_id} was revoked", who=member.node_id), method)
        finally:
            self._calls.discard(call)

    async def _refuse(self, context: Context, error: NotTrusted, method: str) -> NoReturn:
        self.refusals.note(error.who, f"{error.message} [{method}]", at=context.peer())
        status = grpc.StatusCode.PERMISSION_DENIED if isinstance(error, RevokedNode) else grpc.StatusCode.UNAUTHENTICATED
        proof = self._revocation_of(NodeId(error.who)) if isinstance(error, RevokedNode) else None
        await context.abort(status, error.message, () if proof is None else ((REVOCATION_KEY, proof),))
        raise AssertionError("abort raises")
