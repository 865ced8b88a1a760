"""What interceptors of a server share: the same method with another behaviour, and requests that can't be read.

A message that protobuf can't parse would be an exception inside gRPC, logged with a traceback as if it were our bug. Here it is a refusal, in the
log with where it came from. A message may take 35 times its size once it is parsed (millions of empty parts), so of some methods they are counted.

gRPC would gather a single request before anybody looks whose it is, for as long as its sender likes. So here all requests are read as streams are:
who calls is known first, and how many requests of a caller have begun to come, and for how long, is bounded.

Parts are counted before a message is decoded: an empty one takes two bytes on the wire and seventy in memory. Only the outermost fields are looked
at; what is inside of them is bounded by their length, and where it is opened.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paceline.core.errors import GossipRefused, MalformedMessage, MessageTooLarge, PacelineError, PeerFloods
from paceline.net.rpc_faults import abort
from paceline.net.trust.connections import Refusals, remote_of

WHOLE_S = 60.0
"""For a request to come. Raising it: a caller holds longer what it never finishes; lowering it: a slow link can't send a long prompt."""
MOST_BEGUN = 32
"""Requests of one node on their way at once, over all its connections. Raising it: memory that it can hold by finishing none, 2.3 MiB each;
lowering it: bursts over a slow link are refused."""
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5


def check_parts(data: bytes, most: int, inner_bytes: int | None = None, bulk: int | None = None) -> None:
    """Raise unless these bytes are at most `most` fields.

    Args:
        inner_bytes: of one of them, at most; None: any.
        bulk: the number of a field that may be longer.

    Raises:
        MessageTooLarge: there are more, or one is too long.
        MalformedMessage: they are no message.
    """
    at, count = 0, 0
    while at < len(data):
        count += 1
        if count > most:
            raise MessageTooLarge(f"A message has more than {most} parts")
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _LEN:
            size, at = _varint(data, at)
            if inner_bytes is not None and size > inner_bytes and tag >> 3 != bulk:
                raise MessageTooLarge(f"A part of a message has {size} bytes; the bound is {inner_bytes}")
            at += size
        elif kind == _I64:
            at += 8
        elif kind == _I32:
            at += 4
        else:
            raise MalformedMessage("A message can't be read")
    if at != len(data):
        raise MalformedMessage("A message can't be read: it ends early")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where the next thing begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise MalformedMessage("A message can't be read: it ends early")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise MalformedMessage("A message can't be read")


Context = grpc.aio.ServicerContext[Any, Any]


def caller_of(context: Context) -> str:
    """The node that calls, as its certificate names it: the guard has checked it. Without one, where it calls from."""
    name = next(iter(context.auth_context().get("x509_common_name") or ()), b"")
    return name.decode("utf-8", "replace") or remote_of(context.peer())[0]


Behaviour = Callable[[Any, Context], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
"""What gives an interceptor a method's handler; None: there is no such method."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Of a method's requests, looked at before anything is decoded."""

    nbytes: int
    parts: int
    """Outermost fields."""
    inner_bytes: int = 64 << 10
    """In one of them, where it is not `bulk`: what is inside of it may be as many parts as it has room for."""
    bulk: int | None = None
    """The number of the field that may be long: it holds numbers, which take no more room decoded."""


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """In place of a request that was not read."""

    error: GossipRefused


def rewrap(handler: Handler | None, wrap: Callable[[Behaviour], Behaviour], read: Callable[[Any], Any] | None = None) -> Handler | None:
    """A method's handler with its behaviour wrapped. With `read`, requests are read by it, and come as a stream also where there is but one.

    Behaviours that answer with a stream write it to their context: a generator that is not asked for more would be closed only when it
    is collected.
    """
    if handler is None:  # no such method: gRPC answers that itself
        return None
    make: Callable[..., Handler]
    behaviour: Any
    make, behaviour = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }[handler.request_streaming, handler.response_streaming]
    assert not isasyncgenfunction(behaviour), "a handler writes its stream to the context"
    if read is not None:
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return make(wrap(behaviour), read or handler.request_deserializer, handler.response_serializer)


def told(behaviour: Behaviour) -> Behaviour:
    """Has a caller hear what its handler raises, where that is a `PacelineError`."""

    async def telling(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except PacelineError as error:
            await abort(context, error)

    return telling


class WellFormed(grpc.aio.ServerInterceptor):
    """Refuses requests that can't be read. The last interceptor of a server, next to its services.

    Args:
        limits: by method (/package.Service/Method), what is read at most; others read what gRPC lets through.
    """

    def __init__(self, refusals: Refusals, limits: Mapping[str, Limit] | None = None) -> None:
        self._refusals, self._limits = refusals, {} if limits is None else limits
        self._begun: Counter[str] = Counter()
        """Requests that are on their way, by caller."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        method = handler_call_details.method
        return rewrap(handler, lambda behaviour: self._checked(behaviour, handler, method), _reader(handler, self._limits.get(method)))

    def _checked(self, behaviour: Behaviour, handler: Handler, method: str) -> Behaviour:
        async def checked(requests: AsyncIterator[Any], context: Context) -> Any:
            if handler.request_streaming:
                return await behaviour(self._readable(requests, context, method), context)
            return await behaviour(await self._whole(context, method), context)

        return checked

    async def _whole(self, context: Context, method: str) -> Any:
        """The one request of a call."""
        # Of strangers, who may be many behind one address, each connection.
        caller = caller_of(context) if "x509_common_name" in context.auth_context() else context.peer()
        if self._begun[caller] >= MOST_BEGUN:
            await self._refuse(context, PeerFloods(f"More than {MOST_BEGUN} requests have begun to come", retry_after_s=1), method)
        self._begun[caller] += 1
        try:
            async with asyncio.timeout(WHOLE_S):
                request = await context.read()
        except TimeoutError:
            await self._refuse(context, MalformedMessage(f"A request has not come whole within {WHOLE_S:g} s"), method)
        finally:
            self._begun[caller] -= 1
            if not self._begun[caller]:
                del self._begun[caller]
        if request is grpc.aio.EOF:  # its caller hung up
            await abort(context, MalformedMessage("A call ended without its request"))
        if isinstance(request, _Unreadable):
            await self._refuse(context, request.error, method)
        return request

    async def _readable(self, requests: AsyncIterator[Any], context: Context, method: str) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, _Unreadable):
                await self._refuse(context, request.error, method)
            yield request

    async def _refuse(self, context: Context, error: GossipRefused, method: str) -> NoReturn:
        host, port = remote_of(context.peer())
        self._refusals.note(host, f"{error.message} [{method}]", at=f"port {port}")
        await abort(context, error)


def _reader(handler: Handler, limit: Limit | None) -> Callable[[bytes], Any]:
    read = handler.request_deserializer or bytes

    def reader(data: bytes) -> Any:
        try:
            if limit is not None:
                if len(data) > limit.nbytes:
                    raise MessageTooLarge(f"A request of {len(data)} bytes; the bound is {limit.nbytes}")
                check_parts(data, limit.parts, limit.inner_bytes, limit.bulk)
            return read(data)
        except GossipRefused as error:
            return _Unreadable(error)
        except DecodeError:
            return _Unreadable(MalformedMessage("A request can't be read"))

    return reader
