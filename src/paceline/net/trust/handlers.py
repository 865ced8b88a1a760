"""Shared parts of a server's interceptors: methods with a wrapped behaviour, and bounds on requests and answers.

A message that protobuf can't parse would raise inside gRPC, which logs a traceback as if the fault were ours. Here such a message is refused, and
the log names its sender. A parsed message may take 35 times its size (millions of empty parts), so some methods count the parts first.

gRPC would gather a request before any code looks at its sender, for as long as the sender likes. So every request is read as a stream is: the caller
is identified and checked first, then both the bytes and the time of what it begins are bounded. The same two bounds serve every method.

Answers are written as streams are, too, so that this node knows which of them a caller has not taken. gRPC would hold them without a bound.

While a read waits, gRPC gathers a whole message for it. Otherwise it holds one flow-control window of the call (64 KiB). So a caller can make this
node hold at most the number of reads that wait for it, times the largest message. An open client stream always has a read that waits.

Parts are counted before a message is decoded: an empty one takes two bytes on the wire and seventy in memory. Only the outermost fields are counted.
The length of a field bounds what is inside it, and code that opens a field checks its content.
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
"""Seconds for the first message of a call to arrive. Raising it: a caller can hold an unfinished call longer; lowering it: a slow link can't send a
long prompt. Later messages of a stream have no time limit: a stream may be silent, and holds one of its caller's `MOST_READS` meanwhile."""
MOST_BEGUN = 32
"""Calls of one node that wait for their first message, over all its connections. Raising it: a node can hold more flow-control windows; lowering it:
bursts over a slow link are refused."""
MOST_READS = 13
"""Reads that may wait for messages of one node; its further calls wait their turn. Raising it: a caller that finishes no message can hold more memory,
`server.MAX_REQUEST_BYTES` for each read; lowering it: more calls of a node wait for its slow ones."""
MOST_OPEN_STREAMS = 11
"""Open client streams of one node, each of which keeps a read. The number is the prompts that one node may lease elsewhere (`ways.kv.lease`), and one
stream for drafts. Raising it: fewer reads are left for the node's other calls."""
MOST_UNREAD_BYTES = 16 << 20
"""Bytes of answers that one node has asked for and not taken; further answers are refused. Raising it: a caller can hold more memory, three times the
increase; lowering it: a node that fetches much at once is refused."""
_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5


def check_parts(data: bytes, most: int, inner_bytes: int | None = None, bulk: int | None = None) -> None:
    """Check that a serialised message has at most `most` fields, none of them too long.

    Args:
        data: the serialised message.
        most: the largest number of outermost fields.
        inner_bytes: the largest size of one field; None: no bound.
        bulk: the number of a field that may be longer.

    Raises:
        MessageTooLarge: the message has more fields, or one field is too long.
        MalformedMessage: the bytes are not a message.
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
    """Decode the varint at `at`. Returns: its value, and the offset of the byte after it."""
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
    """Return the id of the calling node, from the certificate that the guard has checked; without a certificate, the host that the call comes from."""
    name = next(iter(context.auth_context().get("x509_common_name") or ()), b"")
    return name.decode("utf-8", "replace") or remote_of(context.peer())[0]


Behaviour = Callable[[Any, Context], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
"""The gRPC call that gives an interceptor the handler of a method; None: no such method exists."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds on the requests of a method, checked before anything is decoded."""

    nbytes: int
    parts: int
    """The largest number of outermost fields."""
    inner_bytes: int = 64 << 10
    """The largest size of a field other than `bulk`. A field may hold as many parts as fit in this size."""
    bulk: int | None = None
    """The number of the one field that may be long: it holds numbers, which take no more room once decoded."""
    least: Trust | Use = field(kw_only=True)
    """The least trust of a caller: a level, or a use. The node's policy says which level a use requires."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Check of a caller's trust against what a method requires, before any of its request is read.

    Args:
        peer: returns the member that calls, by its checked certificate.
        policy: the least trust for each use.
    """

    peer: Callable[[Context], Member]
    policy: TrustPolicy

    def check(self, context: Context, least: Trust | Use) -> None:
        """Raise NotTrusted if the caller has less trust than `least`."""
        self.policy.check_trust(self.peer(context), least)


class _Caller:
    """Counters and limits of one caller's open calls. Lives on the event loop."""

    def __init__(self) -> None:
        self.calls = self.begun = self.streams = 0
        """Open calls; calls that wait for their first message; open client streams."""
        self.reads = asyncio.Semaphore(MOST_READS)
        self.unread = 0
        """Bytes of answers that the caller has not taken."""


class _Unread(PeerFloods):
    """Error raised when a caller does not take its answers."""


class _Answers:
    """Context of a call. Answers written to it count against their caller until it takes them."""

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
    """Placeholder for a request that could not be read."""

    error: GossipRefused


def rewrap(handler: Handler | None, wrap: Callable[[Behaviour], Behaviour], read: Callable[[Any], Any] | None = None) -> Handler | None:
    """Return a method's handler with its behaviour wrapped; None for None.

    If `read` is given, it decodes requests, and a unary request arrives as a stream too. The wrapped behaviour then writes every answer to its
    context, also a single one.

    Behaviours that answer with a stream write it to their context. A generator that is not asked for more would be closed only when it is collected.
    """
    if handler is None:  # gRPC itself answers a call of a method that does not exist
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
    """Wrap a behaviour so that a `PacelineError` it raises reaches the caller as a status."""

    async def telling(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except PacelineError as error:
            await abort(context, error)

    return telling


class WellFormed(grpc.aio.ServerInterceptor):
    """Interceptor that refuses callers with too little trust, and requests that can't be read. The last interceptor of a server, before its services.

    Args:
        limits: bounds by method (/package.Service/Method); a method without an entry reads what gRPC lets through.
        admission: the check of callers against the trust in `limits`. With it, a method without an entry does not exist. None: callers are
            unauthenticated.
    """

    def __init__(self, refusals: Refusals, limits: Mapping[str, Limit] | None = None, admission: Admission | None = None) -> None:
        self._refusals, self._limits, self._admission = refusals, {} if limits is None else limits, admission
        self._callers: dict[str, _Caller] = {}
        """Callers with open calls, by node id or connection."""

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
        # Unauthenticated callers are counted by connection, since many may share one address.
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
        """Hold a place for a call and yield its first message. The call keeps its read until the block ends.

        Refuses the call if the caller has too many requests or streams open, or if the first message is late or unreadable.
        """
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
        """Yield all messages of a stream, the first of which has been read already."""
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
