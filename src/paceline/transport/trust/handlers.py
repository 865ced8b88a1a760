"""What interceptors of a server share: the same method with another behaviour, and requests that can't be read.

A message that protobuf can't parse would be an exception inside gRPC, logged with a traceback as if it were our bug. Here it is a refusal,
in the log by the name of who sent it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paceline.transport.trust.refusals import Refusals
from paceline.transport.trust.sockets import remote_of

Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]
if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor  # generic in its stubs only


class _Unreadable:
    """In place of a request that could not be read."""


def rewrap(
    handler: grpc.RpcMethodHandler[Any, Any] | None, wrap: Callable[[Any], Behaviour], read: Callable[[Any], Any] | None = None
) -> grpc.RpcMethodHandler[Any, Any]:
    """A method's handler with its behaviour wrapped, and its requests read by another function if one is given."""
    if handler is None:  # no such method: gRPC answers that itself
        return cast("grpc.RpcMethodHandler[Any, Any]", None)
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]]
    make, behaviour = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }[handler.request_streaming, handler.response_streaming]
    return make(wrap(behaviour), read or handler.request_deserializer, handler.response_serializer)


class WellFormed(_Interceptor):
    """Refuses requests that can't be read. The last interceptor of a server, next to its services.

    Args:
        refusals: the log.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = cast("grpc.RpcMethodHandler[Any, Any] | None", await continuation(handler_call_details))
        if handler is None or handler.request_deserializer is None:
            return cast("grpc.RpcMethodHandler[Any, Any]", handler)
        return rewrap(handler, lambda behaviour: self._checked(behaviour, handler, handler_call_details.method), _reader(handler))

    def _checked(self, behaviour: Any, handler: grpc.RpcMethodHandler[Any, Any], method: str) -> Behaviour:
        async def ready(request: Any, context: Context) -> Any:
            if handler.request_streaming:
                return self._readable(request, context, method)
            if isinstance(request, _Unreadable):
                await self._refuse(context, method)
            return request

        async def one(request: Any, context: Context) -> Any:
            return await behaviour(await ready(request, context), context)

        async def many(request: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(cast("AsyncGenerator[Any]", behaviour(await ready(request, context), context))) as responses:
                async for response in responses:
                    yield response

        return many if isasyncgenfunction(behaviour) else one

    async def _readable(self, requests: AsyncIterator[Any], context: Context, method: str) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, _Unreadable):
                await self._refuse(context, method)
            yield request

    async def _refuse(self, context: Context, method: str) -> NoReturn:
        host, port = remote_of(context.peer())
        self._refusals.note(host, f"its request can't be read [{method}]", at=f"port {port}")
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "The request can't be read")
        raise AssertionError("abort raises")


def _reader(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[bytes], Any]:
    read = handler.request_deserializer
    assert read is not None, "only a handler that reads is wrapped"

    def reader(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _Unreadable()

    return reader
