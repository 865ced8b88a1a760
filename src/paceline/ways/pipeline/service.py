"""ShardService: layers of this machine, run for other members. Only rare and small things pass here; activations have sockets of their own.

A session is the call that opened it: grpc cancels the handler when the caller goes away, is cut off or is revoked, and closing the host's
events then ends the session and gives its KV back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import grpc.aio

from paceline.core.errors import PacelineError, ShardUnavailable
from paceline.net.rpc_faults import abort
from paceline.net.server import KIB, Service
from paceline.net.trust.certificates import Member
from paceline.net.trust.handlers import Limit
from paceline.net.wire import shard_pb2 as wire
from paceline.net.wire.shard_pb2_grpc import ShardServiceServicer, add_ShardServiceServicer_to_server
from paceline.ways.pipeline.codec import read_connect, read_open, read_warm, write_event
from paceline.ways.pipeline.executor.sessions import NextStage, StageEvent, StageLoading, StageRequest

WRITE_S = 20.0
"""How long a caller may take no reports. Raising it keeps the KV of callers that hang."""

Context = grpc.aio.ServicerContext[Any, Any]


class ShardHost(Protocol):
    """What a node must have to serve shards."""

    def admit(self, caller: Member) -> None:
        """Asked before anything else is looked at.

        Raises:
            NotTrusted: this caller is not served.
            PipelineDisabled: no caller is.
        """
        ...

    def open(self, request: StageRequest, caller: Member) -> AsyncGenerator[StageEvent]:
        """A session: loading, opened, then reports, at worst a fault as the last. Closing it ends the session.

        Raises:
            PipelineError: it can't be had.
        """
        ...

    def warm_layers(self, request: StageRequest) -> StageLoading | None:
        """Load layers that may come to be needed, or go on keeping them. Returns how far the load is; None: they are in memory.

        Raises:
            ShardUnavailable: memory, or the machine, is wanted for others.
        """
        ...

    async def connect(self, session_id: bytes, caller: Member, to: NextStage) -> None:
        """Say where a session's results go, and let it begin.

        Raises:
            BadPipelineRequest: the caller has no such session, or it is connected, or there is no such node.
            ShardUnavailable: that node can't be reached.
            NotTrusted: it may not be reached.
        """
        ...


class ShardServicer(ShardServiceServicer):
    """Answers members.

    Args:
        host: does what is asked.
        who: the caller of a context (`PeerGuard.peer`).
    """

    def __init__(self, host: ShardHost, who: Callable[[Context], Member]) -> None:
        self._host, self._who = host, who

    # Written to the context rather than yielded: a generator that is not asked for more would be closed only when it is collected.
    async def OpenStage(self, request: wire.OpenStageRequest, context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            caller = self._admitted(context)
            async with aclosing(self._host.open(read_open(request), caller)) as events:
                async for event in events:
                    async with asyncio.timeout(WRITE_S):
                        await context.write(write_event(event))
        except TimeoutError:
            await abort(context, ShardUnavailable("The caller takes no reports, so its session ended"))
        except PacelineError as error:
            await abort(context, error)

    async def ConnectStage(self, request: wire.ConnectStageRequest, context: Context) -> wire.ConnectStageResponse:
        try:
            await self._host.connect(request.session_id, self._admitted(context), read_connect(request))
        except PacelineError as error:
            await abort(context, error)
        return wire.ConnectStageResponse()

    async def WarmLayers(self, request: wire.WarmLayersRequest, context: Context) -> wire.WarmLayersResponse:
        try:
            self._admitted(context)
            loading = self._host.warm_layers(read_warm(request))
        except PacelineError as error:
            await abort(context, error)
        if loading is None:
            return wire.WarmLayersResponse(loaded=True)
        told = wire.StageLoading(bytes_done=loading.bytes_done, bytes_total=loading.bytes_total)
        return wire.WarmLayersResponse(loading=told)

    async def EchoRows(self, request: wire.EchoRowsRequest, context: Context) -> wire.EchoRowsResponse:
        del request
        try:
            self._admitted(context)
        except PacelineError as error:
            await abort(context, error)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Rows are no longer read back")

    def _admitted(self, context: Context) -> Member:
        caller = self._who(context)
        self._host.admit(caller)
        return caller


def shard_service(host: ShardHost, who: Callable[[Context], Member]) -> Service:
    """What a node's server registers."""
    limits = {
        "ShardService/OpenStage": Limit(4 * KIB, 64),
        "ShardService/ConnectStage": Limit(64 * KIB, 128),
        "ShardService/WarmLayers": Limit(4 * KIB, 64),
        "ShardService/EchoRows": Limit(KIB, 16),
    }
    return Service(partial(add_ShardServiceServicer_to_server, ShardServicer(host, who)), limits)
