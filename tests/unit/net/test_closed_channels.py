"""A channel that is closed under a call, since its node left: whoever waits hears of it, and nobody's task ends by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.unit.net.member.nodes import in_loop

from paceline.core.errors import NodeUnreachable, PacelineError, SourceLost
from paceline.net.rpc_faults import unless_closed
from paceline.net.weights_client import WeightsClient
from paceline.ways.forward.client import describe_model


class Silent(grpc.GenericRpcHandler):
    """Takes every call and answers none."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        del handler_call_details
        return grpc.unary_stream_rpc_method_handler(self._never)

    async def _never(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        del request, context
        self.asked.set()
        await asyncio.Event().wait()
        yield b""


CLIENTS: list[tuple[Callable[[grpc.aio.Channel], Coroutine[Any, Any, object]], type[PacelineError]]] = [
    (lambda channel: describe_model(channel, "b", "m", known=frozenset(), most_bytes=1, timeout_s=60), NodeUnreachable),
    (lambda channel: WeightsClient(channel, "b").describe("d", lambda _done, _of: None), SourceLost),
]


@pytest.mark.parametrize(("client", "error"), CLIENTS)
@in_loop
async def test_whoever_waits_hears_of_it(
    client: Callable[[grpc.aio.Channel], Coroutine[Any, Any, object]], error: type[PacelineError]
) -> None:
    server, silent = grpc.aio.server(), Silent()
    server.add_generic_rpc_handlers((silent,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    waiting = asyncio.create_task(client(channel))
    await silent.asked.wait()
    await channel.close()
    with pytest.raises(error, match="b is gone"):
        await waiting
    await server.stop(None)


@pytest.mark.parametrize(("client", "error"), CLIENTS)
@in_loop
async def test_whoever_asks_over_one_that_was_closed_before_hears_of_it(
    client: Callable[[grpc.aio.Channel], Coroutine[Any, Any, object]], error: type[PacelineError]
) -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    await channel.close()
    with pytest.raises(error, match="The connection to b was closed"):
        await client(channel)


@in_loop
async def test_who_is_cancelled_is_cancelled() -> None:
    began = asyncio.Event()

    async def wait() -> None:
        with unless_closed("b"):
            began.set()
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
