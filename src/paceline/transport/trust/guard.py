"""Every RPC is checked as it starts: who calls, by the certificate that TLS verified, and whether it still belongs.

TLS checks a connection once, and a connection may last for days; so revocation is checked here, for each RPC, and RPCs that are open
when their caller is revoked are cancelled and answered PERMISSION_DENIED. What is refused is named in the log.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from paceline.core.clock import Clock
from paceline.core.errors import NotTrusted, RevokedNode
from paceline.core.ids import NodeId
from paceline.transport.trust.certificates import UNREADABLE, FleetRoot, Member
from paceline.transport.trust.refusals import Refusals
from paceline.transport.trust.seals import Voids

Context = grpc.aio.ServicerContext[Any, Any]
if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor  # generic in its stubs only


@dataclass(eq=False, slots=True)
class _Call:
    """An RPC under way."""

    member: Member
    task: asyncio.Task[Any]
    revoked: bool = False


class PeerGuard(_Interceptor):
    """The interceptor of a node's gRPC server.

    Args:
        root: the fleet's CA.
        voids: the revocations known; asked at each RPC.
        clock: for certificates' ends.
        refusals: the log.
        on_caller: told the address (as gRPC writes it) of every caller that a certificate of the fleet let in.
    """

    REMEMBERED = 1024

    def __init__(
        self, root: FleetRoot, voids: Voids, clock: Clock, refusals: Refusals, on_caller: Callable[[str], None] | None = None
    ) -> None:
        self._root, self._voids, self._clock, self._refusals = root, voids, clock, refusals
        self._on_caller = on_caller
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
                raise NotTrusted("The caller shows no certificate", who=context.peer()) from error
            if len(self._read) >= self.REMEMBERED:
                self._read.clear()
            self._read[pem] = certificate
        member = self._root.member(certificate, self._clock.wall())
        if self._voids(member.node_id, member.issued_at):
            raise RevokedNode(f"{member.node_id} was revoked", who=member.node_id)
        return member

    def revoked(self, node_id: NodeId, not_after: int) -> None:
        """Cancel the RPCs of a node whose certificates issued up to `not_after` were voided."""
        for call in list(self._calls):
            if call.member.node_id == node_id and call.member.issued_at <= not_after and not call.revoked:
                call.revoked = True
                call.task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = cast("grpc.RpcMethodHandler[Any, Any] | None", await continuation(handler_call_details))
        method = handler_call_details.method
        if handler is None:  # no such method: gRPC answers that itself, and tells nothing by it
            return cast("grpc.RpcMethodHandler[Any, Any]", None)
        make: Callable[..., grpc.RpcMethodHandler[Any, Any]]
        make, behaviour = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }[handler.request_streaming, handler.response_streaming]
        guarded = self._generator(behaviour, method) if inspect.isasyncgenfunction(behaviour) else self._coroutine(behaviour, method)
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _coroutine(self, behaviour: Any, method: str) -> Callable[[Any, Context], Awaitable[Any]]:
        async def guarded(request: Any, context: Context) -> Any:
            async with self._admitted(context, method):
                return await behaviour(request, context)

        return guarded

    def _generator(self, behaviour: Any, method: str) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self._admitted(context, method):
                async for response in behaviour(request, context):
                    yield response

        return guarded

    @asynccontextmanager
    async def _admitted(self, context: Context, method: str) -> AsyncGenerator[None]:
        """The time of one RPC: entered only by a member that still belongs, left early when it no longer does."""
        try:
            member = self.peer(context)
        except NotTrusted as error:
            await self._refuse(context, error, method)
        if self._on_caller is not None:
            self._on_caller(context.peer())
        task = asyncio.current_task()
        assert task is not None, "an RPC runs in a task"
        call = _Call(member, task)
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if not call.revoked:
                raise
            task.uncancel()
            await self._refuse(context, RevokedNode(f"{member.node_id} was revoked", who=member.node_id), method)
        finally:
            self._calls.discard(call)

    async def _refuse(self, context: Context, error: NotTrusted, method: str) -> NoReturn:
        self._refusals.note(f"{error.who} ({context.peer()})", f"{error.message} [{method}]")
        status = grpc.StatusCode.PERMISSION_DENIED if isinstance(error, RevokedNode) else grpc.StatusCode.UNAUTHENTICATED
        await context.abort(status, error.message)
        raise AssertionError("abort raises")
