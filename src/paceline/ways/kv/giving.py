"""KvService: tells peers which prefixes were used here last, and sends them the blocks that they ask for.

Law: only nodes that may share KV are answered. Blocks are lent a window at a time, so that a peer that takes them slowly holds little of the pool;
so many peers are served at once, half of them one node's; one that asks and does not take is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from paceline.core.errors import FleetError, NotTrusted, PacelineError
from paceline.core.model import LayerRange, LayerSpan
from paceline.engine.kv_source import KvLoan
from paceline.fleet.eligibility import Use
from paceline.machine.kv_spans import KvMove, KvPart
from paceline.net.mapper import split_bytes
from paceline.net.rpc_faults import abort
from paceline.net.server import KIB, Service
from paceline.net.tensor.frames import TICKET_BYTES
from paceline.net.trust.certificates import Member
from paceline.net.trust.handlers import Limit
from paceline.net.wire import kv_pb2 as wire
from paceline.net.wire.kv_pb2_grpc import KvServiceServicer, add_KvServiceServicer_to_server
from paceline.ways.kv.fetching import KEY_BYTES, MOST_KEYS, send_block
from paceline.ways.kv.lease import MOST_LEASES, MOST_ROUTED, KvLeases, LeaseEnd
from paceline.ways.kv.prefilling import Prefilling, PrefillingInParts, read_registration
from paceline.ways.kv.price import MARK_BYTES, MOST_PARTS
from paceline.ways.kv.routed import KvLegs, RoutedPrefilling
from paceline.ways.kv.source import PeerKv
from paceline.ways.kv.staged import BlockSender, offer_of

logger = logging.getLogger(__name__)

MOST_GIVEN: Final = 2 * MOST_PARTS
"""Fetches served at once, of which one of a pipeline is several. Raising it: more peers at a time, each of them slower."""
GIVE_S: Final = 30.0
"""For a stage to send the blocks of one turn. Raising it: they can't be handed out for longer where a peer takes them slowly."""
MOST_WATCHES: Final = 16
"""Of one node: one for each model here."""
LOOK_S: Final = 5.0
"""For the engine to say what it has: a step may take so long."""
PAUSE_S: Final = 0.25
"""Between two messages of what was used. Raising it: peers know later, and hear less often."""

Context = grpc.aio.ServicerContext[Any, Any]


class KvOwner(Protocol):
    """The node that gives."""

    def admit(self, context: Context) -> Member:
        """Who calls. Raises NotTrusted where it may not share KV."""
        ...

    def models(self) -> Sequence[PeerKv]:
        """What runs here."""
        ...

    async def used(self, kv: PeerKv, version: int) -> None:
        """Wait until a model's prefixes are other than those of a version."""
        ...

    def dial(self, to: Member, port: int, ticket: bytes, offer: wire.NixlOffer | None, block_bytes: int) -> Callable[[], BlockSender]:
        """How to send blocks to a node that asked; what it returns blocks."""
        ...

    def prefilled(self, why: LeaseEnd) -> None:
        """Hear how a prompt of another node ended."""
        ...

    def given(self, n_blocks: int, n_bytes: int, transport: str) -> None:
        """Hear what was sent, and how. In other threads."""
        ...


class KvServicer(KvServiceServicer):
    """Of one node."""

    def __init__(self, owner: KvOwner, legs: KvLegs) -> None:
        self._owner, self._legs = owner, legs
        self._threads = ThreadPoolExecutor(MOST_GIVEN, "paceline-kv-give")
        self._watches, self._served = Counter[str](), Counter[str]()
        self._senders: set[BlockSender] = set()
        self._in_parts: dict[bytes, PrefillingInParts] = {}
        """By their tickets."""
        self._leases, self._pushers = KvLeases(), ThreadPoolExecutor(MOST_LEASES + MOST_ROUTED, "paceline-kv-push")

    @property
    def n_leases(self) -> int:
        """Prompts that are computed for others now."""
        return len(self._leases.live)

    # Written to the context: a coroutine that is cancelled ends at once, a generator when it is collected.
    async def WatchPrefixes(self, request: wire.WatchPrefixesRequest, context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        caller = await self._admitted(context)
        kv = await self._model(request.digest, request.numerics_id, context)
        if self._watches[caller.node_id] >= MOST_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this node tells one caller of so many models")
        self._watches[caller.node_id] += 1
        try:
            while kv in self._owner.models():
                prefixes, shares = kv.loans.prefixes, kv.shares
                marks = b"".join(mark[:MARK_BYTES] for mark in prefixes.marks_for(caller.node_id) if shares)
                said = wire.WatchPrefixesResponse(
                    version=prefixes.version,
                    block_tokens=kv.block_tokens,
                    layout=kv.layout,
                    marks=marks,
                    prefills=kv.prefills and kv.spread is None,
                    prefills_in_parts=kv.prefills and shares,
                    prompts_per_s=0.0 if kv.spread is None else kv.prompts_per_s(),
                )
                for span in kv.spans(self._legs.node_id):
                    said.spans.add(first_layer=span.layers.start, stop_layer=span.layers.stop, node_id=span.node_id)
                await context.write(said)
                await asyncio.sleep(PAUSE_S)
                await self._owner.used(kv, prefixes.version)
        finally:
            self._watches[caller.node_id] -= 1

    async def FetchBlocks(self, request: wire.FetchBlocksRequest, context: Context) -> wire.FetchBlocksResponse:  # pyright: ignore[reportIncompatibleMethodOverride]
        caller = await self._admitted(context)
        kv = await self._model(request.digest, request.numerics_id, context)
        n_keys, rest = divmod(len(request.keys), KEY_BYTES)
        if rest or not 0 < n_keys <= MOST_KEYS or len(request.ticket) != TICKET_BYTES or not 0 < request.tensor_port < 1 << 16:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "blocks are asked for by keys of 16 bytes, with a port and a ticket")
        if request.layout != kv.layout:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this node's blocks of the model are others")
        keys = split_bytes(request.keys, KEY_BYTES)
        layers = LayerRange(request.first_layer, request.stop_layer) if request.stop_layer else kv.whole.layers
        own = self._legs.node_id
        spans = kv.spans(own) or (LayerSpan(own, kv.whole.layers),)
        holder = next((span for span in spans if span.layers.start <= layers.start < layers.stop <= span.layers.stop), None)
        if holder is None or not kv.shares:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no one machine holds these layers here now")
            raise AssertionError("abort raises")
        computing = self._in_parts.get(request.prefill)
        if computing is not None and computing.kv is not kv:
            computing = None
        loan: KvLoan | None = None
        over = ExitStack()
        try:
            if computing is not None:
                over.enter_context(computing.fetching())
                loan = await computing.lend(keys[: kv.window])
                if loan is None:
                    return wire.FetchBlocksResponse(in_turns=True)
            if self._served.total() >= MOST_GIVEN or self._served[caller.node_id] >= MOST_PARTS:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this node gives KV to as many others as it will")
            over.enter_context(self._serving(caller))
            if loan is None:
                loan = await _lent(kv, keys[: kv.window])
            n_blocks = next((place for place, key in enumerate(keys[: kv.window]) if not kv.has(loan, key)), min(len(keys), kv.window))
            if n_blocks and holder.node_id != own:
                assert kv.spread is not None, "others hold layers"
                move = KvMove(caller.node_id, kv.layout, layers=layers, tensor_port=request.tensor_port, ticket=request.ticket)
                blocks = [loan.blocks[key] for key in keys[:n_blocks]]
                sending = asyncio.wrap_future(kv.spread.give_part(move, keys[:n_blocks], blocks, GIVE_S))
                lent, loan, rest = loan, None, over.pop_all()
                opened = self._owner.dial(caller, request.tensor_port, request.ticket, None, kv.block_bytes)
                sending.add_done_callback(partial(self._tell_loss, opened))
                sending.add_done_callback(lambda _: kv.loans.give_back(lent))
                sending.add_done_callback(lambda done: _sent(rest, done))
                return wire.FetchBlocksResponse(n_blocks=n_blocks, from_node_id=holder.node_id, in_turns=True)
            if n_blocks:
                keys = keys if computing is None else keys[:n_blocks]
                part = replace(kv.whole, layers=layers)
                opened = self._owner.dial(caller, request.tensor_port, request.ticket, offer_of(request), part.block_bytes)
                work = partial(self._send, kv, part, keys, loan, opened)
                sending = asyncio.get_running_loop().run_in_executor(self._threads, work)
                loan, rest = None, over.pop_all()
                sending.add_done_callback(lambda done: _sent(rest, done))
                return wire.FetchBlocksResponse(n_blocks=n_blocks, in_turns=computing is not None)
        except PacelineError as error:
            await abort(context, error)
        finally:
            over.close()
            if loan is not None:
                kv.loans.give_back(loan)
        return wire.FetchBlocksResponse()

    async def Prefill(self, requests: AsyncIterator[wire.PrefillRequest], context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        caller = await self._admitted(context)
        reading = aiter(requests)
        first = await anext(reading, wire.PrefillRequest())
        kv = await self._model(first.digest, first.numerics_id, context)
        if not kv.prefills:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this node computes no prompts for others")
        try:
            said = await asyncio.to_thread(read_registration, first, kv, self._legs.node_id)
            now = asyncio.get_running_loop().time()
            lease = self._leases.take_lease(caller.node_id, said.request_id, said.epoch, said.lease_s, now, is_routed=said.is_routed)
            work: Prefilling | None = None
            try:
                opened = self._owner.dial(caller, said.port, said.ticket, offer_of(first), kv.block_bytes)
                if said.in_parts:
                    work = self._in_parts[said.ticket] = PrefillingInParts(kv, said, lease, opened)
                elif said.is_routed:
                    work = RoutedPrefilling(kv, said, lease, opened, self._legs.of(kv))
                else:
                    work = Prefilling(kv, said, lease, opened)
                await work.run(reading, context, self._pushers, self._leases)
            finally:
                self._leases.give_back(lease)
                if said.in_parts:
                    self._in_parts.pop(said.ticket, None)
                assert lease.ended is not None, "it was given back"
                self._owner.prefilled(lease.ended)
                if work is not None:
                    self._owner.given(work.sent, work.sent * kv.block_bytes, work.transport)
        except PacelineError as error:
            await abort(context, error)
        if lease.ended is not LeaseEnd.WHOLE:
            code = grpc.StatusCode.DEADLINE_EXCEEDED if lease.ended is LeaseEnd.EXPIRED else grpc.StatusCode.ABORTED
            if lease.is_routed and lease.ended in (LeaseEnd.UNMATCHED, LeaseEnd.NOT_COMPUTED):
                code = grpc.StatusCode.NOT_FOUND  # the router's request did not come, or ended: no fault of this node
            await context.write(wire.PrefillResponse(epoch=first.epoch, n_blocks=0 if work is None else work.sent, status=code.value[0]))
            await context.abort(code, f"the prompt is not computed to its end: {lease.ended}")

    def close(self) -> None:
        """Leave those that are served. Idempotent."""
        for lease in tuple(self._leases.live.values()):
            lease.end(LeaseEnd.LEFT)
        self._pushers.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for sender in tuple(self._senders):
            sender.close()

    def _send(self, kv: PeerKv, part: KvPart, keys: Sequence[bytes], loan: KvLoan, open_sender: Callable[[], BlockSender]) -> None:
        """In a thread of its own."""
        layers = None if part.layers == kv.whole.layers else part.layers
        sent, lent, transport = 0, [loan], ""
        coming: Future[KvLoan] | None = None
        try:
            sender = open_sender()
            transport = sender.transport
            self._senders.add(sender)
            try:
                for start in range(0, len(keys), kv.window):
                    stop = start + kv.window
                    coming = kv.loans.ask(keys[stop : stop + kv.window]) if stop < len(keys) else None
                    for key in keys[start:stop]:
                        data = sender.space()
                        if not kv.read(lent[0], key, data, layers):
                            sender.finish()
                            return
                        send_block(sender, key, data)
                        sent += 1
                    kv.loans.give_back(lent.pop())
                    if coming is not None:
                        lent.append(coming.result(LOOK_S))
                        coming = None
                sender.finish()
            finally:
                self._senders.discard(sender)
                sender.close()
        except (FleetError, TimeoutError) as error:
            logger.info("KV is not sent to its end: %s", error)
        finally:
            for each in lent:
                kv.loans.give_back(each)
            if coming is not None:
                kv.loans.leave(coming)
            self._owner.given(sent, sent * part.block_bytes, transport)

    def _tell_loss(self, open_sender: Callable[[], BlockSender], sending: asyncio.Future[int]) -> None:
        """Who asked waits for no stage that sends nothing: its stream is opened in that one's place, and ends."""

        def tell() -> None:
            with suppress(FleetError):  # the stage has opened it, or nobody waits
                open_sender().close()

        if sending.cancelled() or sending.exception() is not None or not sending.result():
            with suppress(RuntimeError):  # it is closed
                self._threads.submit(tell)

    @contextmanager
    def _serving(self, caller: Member) -> Generator[None]:
        self._served[caller.node_id] += 1
        try:
            yield
        finally:
            self._served[caller.node_id] -= 1

    async def _admitted(self, context: Context) -> Member:
        try:
            return self._owner.admit(context)
        except NotTrusted as error:
            await abort(context, error)

    async def _model(self, digest: str, numerics_id: str, context: Context) -> PeerKv:
        found = next((kv for kv in self._owner.models() if (kv.digest, kv.numerics_id) == (digest, numerics_id)), None)
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "this node has no KV of that model")
            raise AssertionError("abort raises")
        return found


def _sent(over: ExitStack, done: asyncio.Future[Any]) -> None:
    over.close()
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.error("KV could not be sent", exc_info=error)


async def _lent(kv: PeerKv, keys: Sequence[bytes]) -> KvLoan:
    asked = kv.loans.ask(keys)
    try:
        async with asyncio.timeout(LOOK_S):
            return await asyncio.shield(asyncio.wrap_future(asked))
    except TimeoutError:
        kv.loans.leave(asked)
        return KvLoan({})
    except BaseException:
        kv.loans.leave(asked)
        raise


def kv_service(servicer: KvServicer) -> Service:
    """What a node's server registers."""
    limits = {
        "KvService/WatchPrefixes": Limit(KIB, 8, least=Use.SHARE_KV),
        "KvService/FetchBlocks": Limit(72 * KIB, 16, least=Use.SHARE_KV),
        "KvService/Prefill": Limit(1024 * KIB, 16, bulk=6, least=Use.SHARE_KV),
    }
    return Service(partial(add_KvServiceServicer_to_server, servicer), limits)
