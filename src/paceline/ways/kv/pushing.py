"""A prompt that a peer computes for this node: the call that registers it, keeps its lease, and hears how far it is.

Law: blocks are written through a fetch, which ends once: what comes after that, or of another call, is written nowhere. A peer that is silent, refuses
or is wrong costs what it did not send.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from enum import StrEnum
from typing import Final

import grpc
import grpc.aio

from paceline.core.background import came_within
from paceline.core.errors import FleetError, StreamCorrupt
from paceline.net.wire import kv_pb2 as wire
from paceline.net.wire.kv_pb2_grpc import KvServiceStub
from paceline.ways.kv.fetching import PeerFetch, PushedParts, Receiving, watched
from paceline.ways.kv.lease import HEARTBEAT_S, LEASE_S
from paceline.ways.kv.source import PeerKv

logger = logging.getLogger(__name__)

SILENT_S: Final = 4.0
"""Without a message of the peer. Raising it: one that is gone is waited for longer; lowering it: one that is busy is taken for gone."""
COMPLETION_S: Final = 2.0
"""For the peer to say that it sent all, once all is here."""
REST_S: Final = 10.0
WRONG_REST_S: Final = 600.0
"""For which a peer is not asked that was too slow or went away, or that sent other blocks than those asked for."""
TP_SIZE: Final = 1
"""Ranks among which this node's layers are shared."""

_STATUSES: Final = {status.value[0]: status for status in grpc.StatusCode}
Call = grpc.aio.StreamStreamCall[wire.PrefillRequest, wire.PrefillResponse]


class PushEnd(StrEnum):
    """How a push ended, for the node that asked for it."""

    WHOLE = "whole"
    HANDSHAKE_FAILED = "handshake_failed"
    """The peer could not be called, or opened no stream of blocks."""
    REFUSED = "refused"
    """It takes no registration now."""
    SILENT = "silent"
    """It said nothing for `SILENT_S`."""
    WATCHDOG = "watchdog"
    """It sent no block for too long, or what it has left takes longer than computing that here (`patience`)."""
    WRITE_FAILED = "write_failed"
    """The call or the stream ended before the last block."""
    UNMATCHED = "unmatched"
    """It was to have the prompt from a router, and did not, or not to its end."""
    UNASKED = "unasked"
    """It was to have the prompt from a router, and was not asked: all blocks were here, or as much was under way as may be."""
    LEASE_EXPIRED = "lease_expired"
    DAMAGED = "damaged"
    """It sent another block than the next one, or a completion that is not of this call."""
    LEFT = "left"
    """The answer is not wanted any more."""


def push_rest_s(end: PushEnd) -> float | None:
    """For how long the peer is asked for nothing; None: it may be."""
    match end:
        case PushEnd.WHOLE | PushEnd.LEFT | PushEnd.UNMATCHED | PushEnd.UNASKED:
            return None
        case PushEnd.DAMAGED:
            return WRONG_REST_S
        case _:
            return REST_S


class PushCall(ABC):
    """One prompt at one peer: what whole blocks and parts of them have in common."""

    def __init__(self, kv: PeerKv, fetch: PeerFetch | PushedParts, epoch: int, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        assert fetch.push is not None, "it is to be computed"
        self._kv, self._epoch, self._push, self._wanted, self._open_channel = kv, epoch, fetch.push, fetch, open_channel
        self._began = False
        """The peer has taken the registration."""
        self._has_all = asyncio.Event()
        """Set where the peer is to be told so."""

    async def run(self) -> PushEnd:
        """To its end: then nothing is written any more."""
        fetch, loop, over = self._wanted, asyncio.get_running_loop(), asyncio.Event()

        def hang_up() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(over.set)

        fetch.hang_up = hang_up
        try:
            end = await self._run(over)
        except StreamCorrupt as error:
            logger.warning("a prompt does not come from %s, and is computed: %s", fetch.peer.node_id, error)
            return PushEnd.DAMAGED
        except FleetError as error:
            logger.info("a prompt does not come from %s, and is computed: %s", fetch.peer.node_id, error)
            end = PushEnd.WRITE_FAILED if self._began else PushEnd.HANDSHAKE_FAILED
        finally:
            fetch.cancel()
        if fetch.filled == len(fetch.keys):
            return PushEnd.WHOLE
        # A peer may say that it sent all, and not all be here.
        if fetch.is_wrong:
            return PushEnd.DAMAGED
        return PushEnd.WATCHDOG if fetch.is_late else PushEnd.WRITE_FAILED if end is PushEnd.WHOLE else end

    @abstractmethod
    async def _run(self, over: asyncio.Event) -> PushEnd:
        """Until it ends, or the fetch is over. Nothing is asked for any more once this returns."""

    def _registration(self) -> wire.PrefillRequest:
        return wire.PrefillRequest(
            request_id=self._push.request_id,
            epoch=self._epoch,
            digest=self._kv.digest,
            numerics_id=self._kv.numerics_id,
            layout=self._kv.layout,
            prompt_ids=self._push.prompt_ids,
            keys=b"".join(self._wanted.keys),
            tp_size=TP_SIZE,
            lease_ms=int(1000 * LEASE_S),
        )

    def _on_began(self) -> None:  # noqa: B027 (whole blocks need nothing then)
        """The peer has taken the registration."""

    async def _hear(self, call: Call) -> PushEnd:
        """Register, keep the lease, and hear how far it is, to the end of the call.

        Raises:
            StreamCorrupt: the peer says that all was sent of something else.
        """
        beating: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(SILENT_S):
                await call.write(self._registration())
            beating = asyncio.create_task(self._beat(call))
            loop = asyncio.get_running_loop()
            until_s = loop.time() + SILENT_S
            while True:
                async with asyncio.timeout_at(until_s):
                    said = await call.read()
                if not isinstance(said, wire.PrefillResponse):
                    return self._end_of(await call.code())
                if said.epoch != self._epoch:
                    continue  # no sign of life
                until_s = loop.time() + SILENT_S
                if not self._began:
                    self._began = True
                    self._on_began()
                if said.status:
                    return self._end_of(_STATUSES.get(said.status, grpc.StatusCode.UNKNOWN))
                if said.completion:
                    if said.completion != f"{self._push.request_id}:{TP_SIZE}" or said.n_blocks != len(self._wanted.keys):
                        raise StreamCorrupt(f"{self._wanted.peer.node_id} says that it sent {said.completion!r}, {said.n_blocks} blocks")
                    if not self._push.ticket:
                        return PushEnd.WHOLE  # in parts, blocks are still to be fetched
        except TimeoutError:
            return PushEnd.SILENT
        except grpc.aio.AioRpcError as error:
            return self._end_of(error.code())
        except asyncio.InvalidStateError:
            return self._end_of(await call.code())  # it ended before it was registered
        finally:
            if beating is not None:
                beating.cancel()

    async def _beat(self, call: Call) -> None:
        """Until it is cancelled, or the call is over."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while not self._has_all.is_set():
                await came_within(self._has_all, HEARTBEAT_S)
                has_all = self._has_all.is_set()
                await call.write(wire.PrefillRequest(request_id=self._push.request_id, epoch=self._epoch, has_all=has_all))

    def _end_of(self, status: grpc.StatusCode) -> PushEnd:
        """What a call's status means."""
        match status:
            case grpc.StatusCode.DEADLINE_EXCEEDED if self._began:
                return PushEnd.LEASE_EXPIRED
            case grpc.StatusCode.NOT_FOUND if self._began:
                return PushEnd.UNMATCHED
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED if not self._began:
                return PushEnd.HANDSHAKE_FAILED
            case _:
                return PushEnd.WRITE_FAILED if self._began else PushEnd.REFUSED


class Push(PushCall):
    """One whose blocks come whole, through a stream of its own."""

    def __init__(
        self,
        kv: PeerKv,
        fetch: PeerFetch,
        epoch: int,
        receiving: Receiving,
        port: int,
        open_channel: Callable[[], grpc.aio.Channel],
        threads: Executor,
    ) -> None:
        super().__init__(kv, fetch, epoch, open_channel)
        self._fetch, self._receiving, self._port, self._threads = fetch, receiving, port, threads

    async def run(self) -> PushEnd:
        with watched(self._fetch, asyncio.get_running_loop()):
            return await super().run()

    async def _run(self, over: asyncio.Event) -> PushEnd:
        fetch, receiving = self._fetch, self._receiving
        call: Call | None = None
        hearing: asyncio.Task[PushEnd] | None = None
        ending = asyncio.create_task(over.wait())
        try:
            call = KvServiceStub(self._open_channel()).Prefill()
            if fetch.is_over:
                return PushEnd.LEFT
            hearing = asyncio.create_task(self._hear(call))
            taking = asyncio.get_running_loop().run_in_executor(self._threads, receiving.run, fetch)
            await asyncio.wait({hearing, taking, ending}, return_when=asyncio.FIRST_COMPLETED)
            if hearing.done() and not over.is_set() and hearing.result() is PushEnd.WHOLE:
                await asyncio.wait({taking}, timeout=COMPLETION_S)  # its last blocks are still on their way
            if fetch.filled < len(fetch.keys):
                self._kv.leave_out(fetch.peer.node_id)  # until it is known why
            fetch.cancel()  # what lacks is computed meanwhile
            if fetch.filled == len(fetch.keys) or not over.is_set():
                await asyncio.wait({hearing}, timeout=COMPLETION_S)
            receiving.close()
            await asyncio.wait({taking}, timeout=COMPLETION_S)
            if taking.done() and isinstance(wrong := taking.exception(), StreamCorrupt):
                raise wrong
            if hearing.done():
                return hearing.result()
            return PushEnd.LEFT
        finally:
            receiving.close()
            ending.cancel()
            if hearing is not None:
                hearing.cancel()
            if call is not None:
                call.cancel()
            await asyncio.gather(ending, *(() if hearing is None else (hearing,)), return_exceptions=True)

    def _registration(self) -> wire.PrefillRequest:
        leg, said = self._push.leg, super()._registration()
        said.tensor_port, said.ticket = self._port, self._receiving.ticket
        if self._receiving.offered is not None:
            said.nixl.CopyFrom(self._receiving.offered.message)
        if leg is not None:
            said.remote_engine_id, said.remote_request_id, said.remote_tp_size = (
                self._fetch.peer.node_id,
                leg.remote_request_id,
                leg.tp_size,
            )
        return said


class PushInParts(PushCall):
    """One whose blocks are fetched by who is to hold them.

    Args:
        begin: asks for a part's blocks.
    """

    def __init__(
        self,
        kv: PeerKv,
        fetch: PushedParts,
        epoch: int,
        begin: Callable[[PeerFetch], None],
        open_channel: Callable[[], grpc.aio.Channel],
    ) -> None:
        super().__init__(kv, fetch, epoch, open_channel)
        self._fetch, self._begin = fetch, begin

    async def _run(self, over: asyncio.Event) -> PushEnd:
        fetch = self._fetch
        if fetch.is_left:
            return PushEnd.LEFT  # before there was what hangs up
        call = KvServiceStub(self._open_channel()).Prefill()
        hearing, ending = asyncio.create_task(self._hear(call)), asyncio.create_task(over.wait())
        watching = ExitStack()
        try:
            for part in fetch.own:
                watching.enter_context(watched(part, asyncio.get_running_loop()))
            await asyncio.wait({hearing, ending}, return_when=asyncio.FIRST_COMPLETED)
            end, has_all = PushEnd.LEFT if fetch.is_left else PushEnd.WRITE_FAILED, fetch.filled == len(fetch.keys)
            if not has_all:
                self._kv.leave_out(fetch.peer.node_id)  # until it is known why
            fetch.cancel()
            if has_all:
                self._has_all.set()
                await asyncio.wait({hearing}, timeout=COMPLETION_S)
            return hearing.result() if hearing.done() else end
        finally:
            watching.close()
            hearing.cancel()
            ending.cancel()
            call.cancel()
            await asyncio.gather(hearing, ending, return_exceptions=True)

    def _registration(self) -> wire.PrefillRequest:
        said = super()._registration()
        said.in_parts, said.ticket = True, self._push.ticket
        return said

    def _on_began(self) -> None:
        self._fetch.begin(self._begin)
