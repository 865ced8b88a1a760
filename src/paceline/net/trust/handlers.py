"""What interceptors of a server share: the same method with another behaviour, and requests that can't be read.

A message that protobuf can't parse would be an exception inside gRPC, logged with a traceback as if it were our bug. Here it is a refusal, in the
log with where it came from. A message may take 35 times its size once it is parsed (millions of empty parts), so of some methods they are counted.

gRPC would gather a request before any code looks at its sender, for as long as the sender likes. So here all requests are read as streams are: the
caller is known and trusted first, and of what it begins, both the bytes and the time are bounded. The same two bounds serve every method.

Answers are written as streams are, too, so that it is known which of them their caller has not taken: gRPC would hold them for as long as it likes.

While a read waits, gRPC gathers a whole message for it. Otherwise it holds one flow-control window of the call (64 KiB). So what a caller can make this
node hold is the number of reads that wait for it, times the largest message. An open client stream always has a read that waits.

Parts are counted before a message is decoded: an empty one takes two bytes on the wire and seventy in memory. Only the outermost fields are looked
at; what is inside of them is bounded by their length, and where it is opened.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paceline.core.errors import GossipRefused, MalformedMessage, MessageTooLarge, PacelineError, PeerFloods
from paceline.core.ids import Trust
from paceline.fleet.eligibility import TrustPolicy, Use
from paceline.net.rpc_faults import abort
from paceline.net.trust.certificates import Member
from paceline.net.trust.refusals import Refusals, remote_of

WHOLE_S = 60.0
"""Seconds for the first message of a call to come. Raising it: a caller holds longer what it never finishes; lowering it: a slow link can't send a
long prompt. Later messages of a stream have no clock: a stream may be silent, and holds one of its caller's `MOST_READS` meanwhile."""
MOST_BEGUN = 32
"""Calls of one node whose first message has not come, over all its connections. Raising it: each holds a flow-control window; lowering it: bursts over a
slow link are refused."""
MOST_READS = 13
"""Reads that wait for messages of one node; further calls wait their turn. Raising it: memory that a caller can hold by finishing no message,
`server.MAX_REQUEST_BYTES` each; lowering it: more calls of a node wait for its slow ones."""
MOST_OPEN_STREAMS = 11
"""Client streams of one node, which keep their reads: as many prompts as one node may lease elsewhere (`ways.kv.lease`), and one for drafts. Raising it:
fewer reads are left for its other calls."""
MOST_UNREAD_BYTES = 16 << 20
"""Of answers that one node has asked for and does not take; further ones are refused. Raising it: memory that a caller can hold, three times as much;
lowering it: a node that fetches much at once is refused."""
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
    least: Trust | Use = field(kw_only=True)
    """The least trust of a caller: a level, or the use whose level the node's policy has."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Lets callers in by the least trust of a method, before anything of a request is read.

    Args:
        peer: who calls, by a certificate that was checked.
        policy: the least trust for each use.
    """

    peer: Callable[[Context], Member]
    policy: TrustPolicy

    def check(self, context: Context, least: Trust | Use) -> None:
        """Raises NotTrusted where a caller is trusted less."""
        self.policy.check_trust(self.peer(context), least)


class _Caller:
    """What is under way of one caller. Lives on the event loop."""

    def __init__(self) -> None:
        self.calls = self.begun = self.streams = 0
        """Calls, those of them whose first message has not come, and client streams."""
        self.reads = asyncio.Semaphore(MOST_READS)
        self.unread = 0
        """Bytes of answers that it has not taken."""


class _Unread(PeerFloods):
    """A caller takes no answers."""


class _Answers:
    """The context of a call, whose answers count for its caller until it takes them."""

    def __init__(self, context: Context, caller: _Caller) -> None:
        self._context, self._caller = context, caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        size = len(message) if isinstance(message, bytes) else message.ByteSize()
        caller = self._caller
        if caller.unread and caller.unread + size > MOST_UNREAD_BYTES:
            raise _Unread(f"More than {MOST_UNREAD_BYTES} bytes of answers are not taken", retry_after_s=1)
        caller.unread += size
        try:
            await self._context.write(message)
        finally:
            caller.unread -= size


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """In place of a request that was not read."""

    error: GossipRefused


def rewrap(handler: Handler | None, wrap: Callable[[Behaviour], Behaviour], read: Callable[[Any], Any] | None = None) -> Handler | None:
    """A method's handler with its behaviour wrapped. With `read`, requests are read by it, and come as a stream also where there is but one; the wrapped
    behaviour writes its answers to its context, also where there is but one.

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
        make = grpc.stream_stream_rpc_method_handler
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
    """Refuses callers that are not trusted enough, and requests that can't be read. The last interceptor of a server, next to its services.

    Args:
        limits: by method (/package.Service/Method), what is read at most; others read what gRPC lets through.
        admission: of callers, by the trust in `limits`; methods that have none there do not exist then. None: callers are strangers.
    """

    def __init__(self, refusals: Refusals, limits: Mapping[str, Limit] | None = None, admission: Admission | None = None) -> None:
        self._refusals, self._limits, self._admission = refusals, {} if limits is None else limits, admission
        self._callers: dict[str, _Caller] = {}
        """Those with calls under way."""

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        limit = self._limits.get(method)
        if handler is None or (limit is None and self._admission is not None):  # no such method
            return None
        return rewrap(handler, lambda behaviour: self._checked(behaviour, handler, method), _reader(handler, limit))

    def _checked(self, behaviour: Behaviour, handler: Handler, method: str) -> Behaviour:
        async def checked(_: Any, context: Context) -> None:
            if self._admission is not None:
                try:
                    self._admission.check(context, self._limits[method].least)
                except PacelineError as error:
                    await abort(context, error)
            with self._caller(context) as caller:
                answers: Any = _Answers(context, caller)
                try:
                    answer = await answered(caller, context, answers)
                    if not handler.response_streaming:
                        await answers.write(answer)
                except _Unread as error:
                    await self._refuse(context, error, method)

        async def answered(caller: _Caller, context: Context, answers: Context) -> Any:
            async with self._reading(caller, context, method, is_stream=handler.request_streaming) as request:
                if handler.request_streaming:
                    return await behaviour(self._messages(request, context, method), answers)
            if request is grpc.aio.EOF:  # its caller hung up
                await abort(context, MalformedMessage("A call ended without its request"))
            return await behaviour(request, answers)

        return checked

    @contextmanager
    def _caller(self, context: Context) -> Generator[_Caller]:
        # Of strangers, who may be many behind one address, each connection.
        name = caller_of(context) if "x509_common_name" in context.auth_context() else context.peer()
        caller = self._callers.setdefault(name, _Caller())
        caller.calls += 1
        try:
            yield caller
        finally:
            caller.calls -= 1
            if not caller.calls:
                self._callers.pop(name, None)

    @asynccontextmanager
    async def _reading(self, caller: _Caller, context: Context, method: str, *, is_stream: bool) -> AsyncGenerator[Any]:
        """The time in which a call may have a read that waits, from its first message on."""
        if caller.begun >= MOST_BEGUN:
            await self._refuse(context, PeerFloods(f"More than {MOST_BEGUN} requests have begun to come", retry_after_s=1), method)
        if is_stream and caller.streams >= MOST_OPEN_STREAMS:
            await self._refuse(context, PeerFloods(f"More than {MOST_OPEN_STREAMS} streams are open", retry_after_s=1), method)
        caller.begun, caller.streams = caller.begun + 1, caller.streams + is_stream
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(WHOLE_S):
                        await held.enter_async_context(caller.reads)
                        request = await context.read()
                except TimeoutError:
                    error = MalformedMessage(f"A request has not come whole within {WHOLE_S:g} s")
                    await self._refuse(context, error, method)
                finally:
                    caller.begun -= 1
                if isinstance(request, _Unreadable):
                    await self._refuse(context, request.error, method)
                yield request
        finally:
            caller.streams -= is_stream

    async def _messages(self, first: Any, context: Context, method: str) -> AsyncIterator[Any]:
        """All messages of a stream."""
        message = first
        while message is not grpc.aio.EOF:
            if isinstance(message, _Unreadable):
                await self._refuse(context, message.error, method)
            yield message
            message = await context.read()

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
