"""Check of every RPC as it starts: which node calls, by the certificate that TLS verified, and whether it is still a member.

TLS checks a connection once, and a connection may last for days. So revocation is checked here, for each RPC. When a caller is revoked, its open
RPCs are cancelled and answered PERMISSION_DENIED, also those that still wait for their request. Its connections stay open without calls until gRPC
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
from paceline.fleet.eligibility import Voids
from paceline.net.trust.certificates import UNREADABLE, FleetRoot, Member
from paceline.net.trust.handlers import Behaviour, Context, Continuation, Handler, rewrap, told
from paceline.net.trust.refusals import Refusals
from paceline.net.trust.seals import REVOCATION_KEY

TRUST_ITSELF = ("/paceline.v1.CapabilityService/", "/paceline.v1.RenewalService/", "/paceline.v1.ControlService/")
"""Services that members may call even when this node's list of revocations is too old: they carry news of revocations, renew certificates, and serve
this machine's own tools."""


GRACE_S = 1.0
"""Seconds that a revoked caller has to take the message in flight. Raising it: a revoked caller that takes nothing keeps its RPC open longer; lowering
it: a slow caller gets no reason."""


class _Call:
    """An open RPC. Stands in for its handler's context: it offers everything that a context does, and tracks whether a message is being sent.

    gRPC can't answer an RPC with an error while a message is being sent on it. So a cancelled RPC ends just after that message. If its caller takes
    nothing for `GRACE_S`, the RPC ends without an answer.
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
        """Cancel the RPC, now or as soon as the message in flight is sent."""
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
        voids: the revocations known; looked up at each RPC.
        revocation_of: returns the SignedRevocation of a node, which is sent to a revoked caller; None if there is none.
        check_age: raises NotTrusted if this node's list of revocations is too old to admit any node.
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
        """Return the member that calls.

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
        """Cancel the open RPCs of a revoked node.

        Args:
            node_id: the revoked node.
            not_after: certificates issued up to this time (Unix seconds) are revoked.
        """
        for call in list(self._calls):
            if call.member.node_id == node_id and call.member.issued_at <= not_after:
                call.cancel()

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        return rewrap(await continuation(handler_call_details), lambda behaviour: self._guarded(behaviour, handler_call_details.method))

    def _guarded(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def guarded(request: Any, context: Context) -> Any:
            async with self._admitted(context, method) as call:
                # `_Call` offers everything that a context does; no type can express that delegation.
                return await told(behaviour)(request, cast("Context", call))

        return guarded

    @asynccontextmanager
    async def _admitted(self, context: Context, method: str) -> AsyncGenerator[_Call]:
        """Admit one RPC of a current member, and end the block early if the member is revoked meanwhile."""
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
