"""Prompts computed for other nodes: a request that draws one token runs on this node's engine, and each block is sent once it stands.

Law: a prompt's blocks are held for its caller while its lease lasts, a window at a time while they are sent, and by the engine alone where they are not.
Whatever ends the lease ends the request, the stream and the call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from paceline.core.background import came_within
from paceline.core.errors import FleetError, InvalidRequest, Overloaded, PacelineError
from paceline.core.generation import FinishReason, GenerationRequest, SamplingParams
from paceline.core.ids import NodeId, RequestId
from paceline.engine.kv_source import KvLoan
from paceline.engine.prefix_cache import prompt_keys, root_key
from paceline.net.mapper import split_bytes
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.net.wire import kv_pb2 as wire
from paceline.ways.kv.fetching import KEY_BYTES, MOST_KEYS, send_block
from paceline.ways.kv.lease import KvLease, KvLeases, LeaseEnd
from paceline.ways.kv.source import PeerKv
from paceline.ways.kv.staged import BlockSender

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.05
"""Between two looks whether a lease is over, while a block is waited for."""
PROGRESS_S: Final = 1.0
"""Between two messages to a caller. Raising it: a caller is longer in learning that this node is gone."""
HOLD_S: Final = 5.0
"""For a block that is being computed, until who asks for it is told to ask again. Raising it: one that is gone is noticed later."""
MOST_FETCHING: Final = 16
"""Parts of a prompt that are fetched, or waited for, at once. Raising it: one prompt takes more calls, which cost little while they wait."""
MOST_ID: Final = 200
"""Letters of a request's id."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Registration:
    """What a caller wants computed."""

    request_id: str
    epoch: int
    prompt_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    tp_size: int
    port: int
    ticket: bytes
    lease_s: float
    is_routed: bool
    """A router has the prompt computed here, by a request of its own."""
    remote_request_id: str
    """That request's id, as this node told it; empty: the caller was not told."""
    in_parts: bool = False
    """Its blocks are fetched from here, under its ticket."""

    @property
    def completion(self) -> str:
        """What says that all was sent."""
        return f"{self.request_id}:{self.tp_size}"


def read_registration(message: wire.PrefillRequest, kv: PeerKv, own: NodeId) -> Registration:
    """The first message of a call.

    Args:
        own: this node.

    Raises:
        InvalidRequest: it makes no sense; `field` names what.
    """
    n_keys, rest = divmod(len(message.keys), KEY_BYTES)
    n_blocks, part = divmod(len(message.prompt_ids), kv.block_tokens)
    routed = bool(message.remote_engine_id)
    for field, wrong in {
        "request_id": not 0 < len(message.request_id) <= MOST_ID or ":" in message.request_id,
        "epoch": message.epoch == 0,
        "layout": message.layout != kv.layout,
        "prompt_ids": bool(message.prompt_ids) if routed else bool(part) or not n_blocks,
        "keys": bool(rest) or not 0 < n_keys <= (MOST_KEYS if routed else min(MOST_KEYS, n_blocks)),
        "remote_engine_id": message.remote_engine_id not in ("", own),
        "remote_request_id": len(message.remote_request_id) > MOST_ID,
        "remote_tp_size": message.remote_tp_size != (1 if routed else 0),
        "tp_size": message.tp_size != 1,
        "tensor_port": bool(message.tensor_port) if message.in_parts else not 0 < message.tensor_port < 1 << 16,
        "in_parts": routed if message.in_parts else kv.spread is not None,
        "ticket": len(message.ticket) != TICKET_BYTES,
        "lease_ms": message.lease_ms == 0,
    }.items():
        if wrong:
            raise InvalidRequest(f"A prompt can't be computed for another node: {field} is not what it takes", field=field)
    keys = split_bytes(message.keys, KEY_BYTES)
    prompt = tuple(message.prompt_ids)
    if not routed and keys != tuple(prompt_keys(root_key(kv.numerics_id, kv.digest), prompt, kv.block_tokens)[n_blocks - n_keys :]):
        raise InvalidRequest("The blocks asked for are not the last ones of the prompt", field="keys")
    return Registration(
        message.request_id,
        message.epoch,
        prompt,
        keys,
        message.tp_size,
        message.tensor_port,
        message.ticket,
        message.lease_ms / 1000,
        routed,
        message.remote_request_id,
        message.in_parts,
    )


class Prefilling:
    """One prompt, for one caller, whose blocks go through one stream. On the event loop, but for `send`."""

    def __init__(self, kv: PeerKv, registration: Registration, lease: KvLease, open_sender: Callable[[], BlockSender]) -> None:
        self.kv, self.registration, self.lease, self._open_sender = kv, registration, lease, open_sender
        self.sent = 0
        self.is_computed = False
        self._sender: BlockSender | None = None

    @property
    def transport(self) -> str:
        return "" if self._sender is None else self._sender.transport

    async def run(self, requests: AsyncIterator[wire.PrefillRequest], context: Context, threads: Executor, leases: KvLeases) -> None:
        """Until the lease is over. Returns with nothing held."""
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(self._send_in(threads))
        others = [sending, asyncio.create_task(self._compute()), asyncio.create_task(self._hear(requests))]
        try:
            while not sending.done() and self.lease.ended is None:
                leases.expire(loop.time())
                if self.lease.ended is None:
                    await context.write(self._progress())
                    wait_s = min(PROGRESS_S, max(0.01, self.lease.until_s - loop.time()))
                    await asyncio.wait({sending}, timeout=wait_s)
            if sending.done():
                sending.result()  # a failure of this node's own is told as one
            if self.lease.ended is LeaseEnd.WHOLE:
                await context.write(self._completion())
        finally:
            self.lease.end(LeaseEnd.LEFT)
            for task in others:
                task.cancel()
            if self._sender is not None:
                self._sender.close()
            await asyncio.gather(*others, return_exceptions=True)

    def _progress(self) -> wire.PrefillResponse:
        return wire.PrefillResponse(epoch=self.registration.epoch, n_blocks=self.sent)

    def _completion(self) -> wire.PrefillResponse:
        said = self.registration
        return wire.PrefillResponse(epoch=said.epoch, n_blocks=len(said.keys), completion=said.completion)

    async def _send_in(self, threads: Executor) -> None:
        await self._known()
        if self.lease.ended is None:
            await asyncio.get_running_loop().run_in_executor(threads, self.send)

    async def _known(self) -> None:
        """Until it is known what computes the prompt."""

    async def _compute(self) -> None:
        assert self.kv.compute is not None, "the service looked"
        name = f"{self.lease.holder}/{self.lease.request_id}/{self.lease.epoch}"
        sampling, prompt = SamplingParams(temperature=0, seed=0), self.registration.prompt_ids
        request = GenerationRequest(
            RequestId(name), prompt, 1, sampling, ignore_eos=True, draft="off", caller=self.lease.holder, shares_kv=True
        )
        stream = self.kv.compute(request)
        try:
            async for chunks in stream:
                if any(chunk.finish_reason is FinishReason.ERROR for chunk in chunks):
                    self.lease.end(LeaseEnd.NOT_COMPUTED)
            self.is_computed = True
        except PacelineError as error:
            logger.info("a prompt of %s is not computed: %s", self.lease.holder, error)
            self.lease.end(LeaseEnd.NOT_COMPUTED)
        finally:
            await stream.aclose()

    async def _hear(self, requests: AsyncIterator[wire.PrefillRequest]) -> None:
        async for message in requests:
            lives = self.lease.heartbeat(message.request_id, message.epoch, asyncio.get_running_loop().time())
            if message.has_all and lives and self.registration.in_parts:
                self.lease.end(LeaseEnd.WHOLE)
                return
        self.lease.end(LeaseEnd.LEFT)

    # ------------------------------------------------------------------------------------------------ in a thread of its own

    def send(self) -> None:
        """Send each block once it stands. Ends the lease."""
        keys = self.registration.keys
        try:
            sender = self._sender = self._open_sender()
            try:
                while self.sent < len(keys) and self.lease.ended is None:
                    if not self._send_next(sender, keys[self.sent : self.sent + self.kv.window]):
                        break
                sender.finish()
            finally:
                sender.close()
        except (FleetError, TimeoutError, CancelledError) as error:
            logger.info("KV is not pushed to its end: %s", error)
            self.lease.end(LeaseEnd.WRITE_FAILED)
        self.lease.end(LeaseEnd.WHOLE if self.sent == len(keys) else LeaseEnd.NOT_COMPUTED)

    def _send_next(self, sender: BlockSender, keys: Sequence[bytes]) -> bool:
        """Those that stand next. Returns whether there were any."""
        was_computed, before = self.is_computed, self.sent
        asked = self.kv.loans.ask(keys, when_computed=not was_computed)
        loan = self._taken(asked)
        if loan is None:
            return self.lease.ended is None and not was_computed
        try:
            for key in keys:
                if self.lease.ended is not None or not self.kv.read(loan, key, data := sender.space()):
                    break
                send_block(sender, key, data)
                self.sent += 1
        finally:
            self.kv.loans.give_back(loan)
        return self.sent > before

    def _taken(self, asked: Future[KvLoan]) -> KvLoan | None:
        """What was asked for; None: the lease is over, or the prompt is computed, and blocks of it may be gone."""
        was_computed = self.is_computed
        while True:
            try:
                return asked.result(LOOK_S)
            except TimeoutError:
                if (self.lease.ended is not None or self.is_computed > was_computed) and asked.cancel():
                    return None


class PrefillingInParts(Prefilling):
    """One whose blocks are fetched, each part by who is to hold it, while the lease lasts."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._over = asyncio.Event()
        self.n_fetching = 0
        self._wanted_s = 0.0
        """Until when it was being computed, or fetched."""

    def _progress(self) -> wire.PrefillResponse:
        return self._completion() if self.is_computed else super()._progress()

    async def _send_in(self, threads: Executor) -> None:
        del threads  # others send
        loop = asyncio.get_running_loop()
        self._wanted_s = loop.time()
        while not await came_within(self._over, PROGRESS_S):
            if self.n_fetching or not self.is_computed:
                self._wanted_s = loop.time()
            elif loop.time() - self._wanted_s >= self.lease.lease_s:
                self.lease.end(LeaseEnd.LEFT)
                return

    @contextmanager
    def fetching(self) -> Generator[None]:
        """One more part of it is waited for, then sent.

        Raises:
            Overloaded: there are as many as there may be.
        """
        if self.n_fetching >= MOST_FETCHING:
            raise Overloaded("Too many parts of one prompt are being fetched", "Ask again once one of them is here.", retry_after_s=1)
        self.n_fetching += 1
        try:
            yield
        finally:
            self.n_fetching -= 1
            self._wanted_s = asyncio.get_running_loop().time()

    async def _compute(self) -> None:
        await super()._compute()
        if self.lease.ended is not None:
            self._over.set()

    async def _hear(self, requests: AsyncIterator[wire.PrefillRequest]) -> None:
        await super()._hear(requests)
        self._over.set()

    async def lend(self, keys: Sequence[bytes]) -> KvLoan | None:
        """Those of these blocks that are computed, once one is; None: not yet, after `HOLD_S`."""
        while True:
            until = asyncio.get_running_loop().time() + HOLD_S
            is_over = self.is_computed or self.lease.ended is not None
            asked = self.kv.loans.ask(keys, when_computed=not is_over)
            came = asyncio.wrap_future(asked)
            try:
                while not came.done() and is_over is (self.is_computed or self.lease.ended is not None):
                    left_s = until - asyncio.get_running_loop().time()
                    if left_s <= 0:
                        return KvLoan({}) if is_over else None
                    await asyncio.wait({came}, timeout=min(left_s, LOOK_S))
                if came.done():
                    loan, asked = came.result(), None
                    return loan
            finally:
                if asked is not None:
                    self.kv.loans.leave(asked)
