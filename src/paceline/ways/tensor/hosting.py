"""Runs ranks of other members' tensor groups: RankService, and the processes behind it.

A rank is the call that opened it: it is loaded into a process of its own, takes commands over a tensor stream, and ends with the call. Guests have none run.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.backends import cpu, table
from paceline.backends.cpu.padding import padded
from paceline.backends.cpu.shares import RANK_BYTES
from paceline.backends.holding import working_bytes
from paceline.backends.memory import human
from paceline.backends.options import DeviceKind
from paceline.core.background import came_within, tell_loop
from paceline.core.clock import PREPARE_S
from paceline.core.errors import (
    BadPipelineRequest,
    PacelineError,
    PlacementError,
    ShardUnavailable,
    SourceLost,
    UserError,
    WeightsMismatch,
    WrongBytes,
)
from paceline.core.ids import NodeId
from paceline.core.manifest import ByteRuns, ModelManifest
from paceline.core.model import BLOCK_TOKENS, ModelSpec
from paceline.fleet.eligibility import Use
from paceline.fleet.placement import WeightsSource
from paceline.machine.devices import usable_cores
from paceline.machine.fetch import Fetch, fetch_part, in_thread
from paceline.machine.settings import NodeSettings
from paceline.machine.sizing import shares_bytes, weights_bytes
from paceline.machine.weights import dial_through
from paceline.net.channels import Purpose
from paceline.net.member.node import FleetNode
from paceline.net.server import KIB, Service
from paceline.net.tensor.dialling import dial
from paceline.net.trust.certificates import Member
from paceline.net.trust.guard import PeerGuard
from paceline.net.trust.handlers import Context, Limit
from paceline.net.weights_client import WeightsClient
from paceline.net.wire import rank_pb2 as wire
from paceline.net.wire.rank_pb2_grpc import RankServiceServicer, add_RankServiceServicer_to_server
from paceline.store.catalog import ModelLocation, find_whole, open_weights
from paceline.store.digests import DigestCache
from paceline.store.home import Home
from paceline.store.partial import HEADS, open_heads
from paceline.ways.tensor.codec import RankEvent, RankFault, RankLoading, RankOpened, RankRequest, read_open, write_event
from paceline.ways.tensor.rank import RankOrder
from paceline.ways.tensor.sizes import GroupSizes

if TYPE_CHECKING:
    from paceline.ways.tensor.hosted import HostedRank

REPORT_S = 0.5
"""How often a load says how far it is."""
CONNECT_S = 10.0
"""For both tensor streams, once a rank is loaded."""
LOOK_S = 0.1
"""Between two looks at a rank's process."""
SEEN_S = 60.0
"""For machines that a person named to be seen. Raising it: a name that is wrong is told later."""
STOP_S = 4.0
"""What a stop gives ranks to end: their processes are killed."""
BUSY_TIMES, BUSY_S = 5, 0.5
"""Times that a node is asked again for weights, and how long after."""
MOST_RANKS = 4
"""Of groups of others, side by side. Each is a process, and takes cores from the others."""
MOST_RANKS_OF_ONE = MOST_RANKS // 2
"""Of one node's groups. Raising it: one node may keep all others out."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank of a group is to run, and how it is reached."""

    node_id: NodeId
    fleet: FleetNode
    loop: asyncio.AbstractEventLoop
    """The fleet's."""


async def places_of(settings: NodeSettings, fleet: FleetNode, say: Callable[[str], None]) -> dict[int, RankPlace]:
    """Where the tensor ranks are that other nodes run, once these are in view.

    Raises:
        PlacementError: they don't come.
    """
    named = {rank: node_id for rank, node_id in enumerate(settings.tensor_on) if node_id is not None}
    loop = asyncio.get_running_loop()
    until = loop.time() + SEEN_S
    while away := ", ".join(sorted({*named.values()} - {*fleet.view().ids})):
        if loop.time() > until:
            raise PlacementError(f"{away} is not in this fleet's view", "Start `paceline up` there.")
        say(f"Waiting for {away}, to share the layers of {settings.model} with")
        await asyncio.sleep(SEEN_S / 20)
    return {rank: RankPlace(node_id, fleet, loop) for rank, node_id in named.items()}


class RankHost:
    """Lives on one event loop.

    Args:
        threads: of a rank; None: one a core.
        beside: models that lie elsewhere than in the home.
        left_bytes: returns the memory that one more rank may take; None: as much as is free.
    """

    def __init__(
        self,
        fleet: FleetNode,
        home: Home,
        threads: int | None = None,
        beside: Sequence[ModelLocation] = (),
        left_bytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._fleet, self._home, self._beside = fleet, home, beside
        self._threads = threads or usable_cores()
        self._open = Counter[NodeId]()
        self._held: list[tuple[HostedRank, int]] = []
        """And the bytes that each needs."""
        self.left_bytes = left_bytes
        self._ended = asyncio.Event()
        """Set whenever one has."""

    @property
    def used_bytes(self) -> int:
        """What all of them need, weights and KV."""
        return sum(needed for _, needed in self._held)

    @property
    def coming_bytes(self) -> int:
        """What the system still calls free of that: of ranks that load, and of KV that was never written to."""
        return sum(rank.coming_bytes(needed) for rank, needed in self._held)

    async def stop(self) -> None:
        """Wait until all have ended, with the calls that opened them. Bounded; idempotent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self._open.total():
                    self._ended.clear()
                    await self._ended.wait()

    def service(self, guard: PeerGuard) -> Service:
        limits = {"RankService/OpenRank": Limit(16 * KIB, 16, least=Use.HAVE_RANKS_RUN)}
        return Service(partial(add_RankServiceServicer_to_server, RankServicer(self, guard.peer)), limits)

    async def open(self, request: RankRequest, caller: Member) -> AsyncGenerator[RankEvent]:
        """A rank: how far its load is, opened, at worst a fault as the last. Closing it ends the rank.

        Raises:
            PipelineError: it can't be had.
        """
        if self._open.total() >= MOST_RANKS or self._open[caller.node_id] >= MOST_RANKS_OF_ONE:
            raise ShardUnavailable(
                f"{self._open.total()} tensor ranks of other machines run here, and no more are taken from {caller.node_id}"
            )
        self._open[caller.node_id] += 1
        try:
            async with AsyncExitStack() as ends:
                async for event in self._rank(request, caller, ends):
                    yield event
        finally:
            self._open[caller.node_id] -= 1
            self._ended.set()

    async def _rank(self, request: RankRequest, caller: Member, ends: AsyncExitStack) -> AsyncGenerator[RankEvent]:
        found = await in_thread(partial(find_whole, request.digest, self._home, self._beside))
        if found is not None:
            path, spec, lender = found[0].path, found[1].spec, None
        else:
            lender = await self._borrow(request, caller)
            path, spec = await in_thread(partial(open_heads, request.digest, self._home))
        lent = self._home.partial / request.digest if lender else None
        order, needed = await in_thread(partial(self._order, request, path, spec, lent))
        if (left := self.left_bytes()) is not None and needed > left:
            raise ShardUnavailable(
                f"A tensor rank of {request.model_id} needs {human(needed)}, and {human(max(0, left))} may be taken here"
            )
        from paceline.ways.tensor.hosted import HostedRank

        rank = HostedRank(order, lender.lend if lender else None)
        self._held.append((rank, needed))
        ends.callback(self._held.remove, (rank, needed))
        ends.push_async_callback(in_thread, rank.close)
        await in_thread(partial(rank.start, PREPARE_S))
        told = 0
        while not await in_thread(partial(rank.is_loaded, REPORT_S)):
            done, total = rank.process.progress
            if lender is not None and lender.arrived:
                done += lender.arrived
                if done != told:
                    rank.process.note_lent()
            told = done
            yield RankLoading(done, max(done, total))
        expected = self._fleet.tensors.expect()
        ends.callback(expected.cancel)
        deadline = time.perf_counter() + CONNECT_S
        yield RankOpened(self._fleet.tensors.port, expected.ticket, rank.process.numerics_id)
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        addresses = self._fleet.tensor_addresses_of(caller.node_id, int(request.addresses[0].rpartition(":")[2]))
        way = partial(dial, addresses, caller, request.ticket, self._fleet.identity, self._fleet.gossip.voids, deadline)
        accept = partial(expected.wait, deadline)
        await in_thread(partial(rank.connect, way, accept, caller.node_id, partial(tell_loop, loop, ended.set)), expected.cancel)
        while rank.gone is None and not await came_within(ended, LOOK_S):
            pass
        yield RankFault(rank.gone or "was ended")

    async def _borrow(self, request: RankRequest, caller: Member) -> Lender:
        """Have the heads of the model's files here, and the caller lend what else a rank reads of them: its share, which is kept in its memory alone.

        Raises:
            WeightsMismatch: the caller gives none.
        """
        fleet, live = self._fleet, self._fleet.view().get(caller.node_id)
        lacks = f"{request.model_id} with digest {request.digest[:12]} is not on this machine"
        if live is None:
            raise WeightsMismatch(lacks, "Pull it there.")
        source = WeightsSource(caller.node_id, fleet.book.order(live.card.addresses), request.model_id, request.digest, 0)
        dial = dial_through(fleet.pool, fleet.trust, fleet.gossip.voids)
        try:
            await fetch_part(Fetch([source], dial, self._home, _unseen, _words_unseen), HEADS)
            channel = fleet.channel(caller.node_id, live.card.addresses, Use.GIVE_WEIGHTS, Purpose.WEIGHTS)
            client = WeightsClient(channel, caller.node_id)
            manifest = await client.describe(request.digest, _unseen)
        except PacelineError as error:
            raise WeightsMismatch(f"{lacks}, and {caller.node_id} does not lend it: {error.message}", "Pull it there.") from error
        return Lender(client, manifest, asyncio.get_running_loop())

    def _order(self, request: RankRequest, path: Path, spec: ModelSpec, lent: Path | None) -> tuple[RankOrder, int]:
        """What the rank's process is to be, and what it takes of memory. Blocks.

        Args:
            path, spec: of the model, or of the heads of its files in the folder `lent`.

        Raises:
            PipelineError: these weights, their format or these shares can't be had here.
        """
        from paceline.backends.cpu.shares import cut, undivided

        try:
            kernels = table.choose(spec, request.weights, device=DeviceKind.CPU)
            shares = cut(spec, [(stops.out, stops.down, stops.vocab) for stops in request.stops])
        except UserError as error:
            raise ShardUnavailable(error.message, error.hint) from error
        except ValueError as error:
            raise BadPipelineRequest(f"A tensor rank is asked for: {error}") from error
        if kernels.lowering is None or undivided(spec) is not None:
            raise ShardUnavailable("This machine has no kernels for a tensor rank of this model")
        cpu.prepare(kernels.lowering, self._home.kernels)
        from paceline.ways.tensor.memory import group_bytes

        settings = NodeSettings(str(path), request.weights, device=kernels, threads=self._threads)
        sizes = GroupSizes(spec, shares, request.max_rows, request.max_blocks, request.logits_rows)
        if request.max_blocks > request.n_blocks:
            raise BadPipelineRequest(f"A tensor rank is asked for with {request.n_blocks} blocks, and tables of {request.max_blocks}")
        share, type_of = shares[request.rank], open_weights(path, DigestCache(self._home)).type_of
        heads, weights = shares_bytes(spec, weights_bytes(spec, request.weights, type_of, kernels), [share])
        kv = request.n_blocks * BLOCK_TOKENS * replace(padded(spec), n_kv_heads=heads).kv_bytes_per_token(spec.all_layers)
        rows = working_bytes(kernels, share.of(spec), max_rows=request.max_rows, threads=self._threads, n_blocks=request.n_blocks)
        order = RankOrder(request.rank, settings, sizes, spec.all_layers, request.n_blocks, self._threads, is_away=True, lent=lent)
        return order, RANK_BYTES + weights + kv + rows + group_bytes(sizes)


class Lender:
    """Has another node read bytes of a model's files, for a rank that loads. Called in any thread but the loop's.

    Args:
        client, manifest: of that node.
    """

    def __init__(self, client: WeightsClient, manifest: ModelManifest, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._digest, self._loop = client, manifest.digest, loop
        self.arrived = 0
        """Bytes, of those that were asked for last."""
        self._places = {file.name: place for place, file in enumerate(manifest.files)}
        own = [place for place, file in enumerate(manifest.files) if file.in_digest]
        self._only = own[0] if len(own) == 1 else None
        """The place of a file whose name the digest does not cover: it may have another here."""

    def lend(self, name: str, offset: int, length: int, stride: int, count: int) -> Future[bytes]:
        """See `process.Lend`.

        Raises:
            WrongBytes: there is no such file.
        """
        if (place := self._places.get(name, self._only)) is None:
            raise WrongBytes(f"The machine that lends {self._digest[:12]} has no file {name} of it")
        return asyncio.run_coroutine_threadsafe(self._fetch(ByteRuns(place, offset, length, stride, count)), self._loop)

    async def _fetch(self, runs: ByteRuns) -> bytes:
        for turn in range(BUSY_TIMES + 1):
            self.arrived = 0
            try:
                return await self._client.fetch_runs(self._digest, runs, self._count)
            except SourceLost:  # it may give weights to as many others as it will
                if turn == BUSY_TIMES:
                    raise
                await asyncio.sleep(BUSY_S)
        raise AssertionError

    def _count(self, more: int) -> None:
        self.arrived += more


def _unseen(done: int, total: int) -> None:
    """What the rank itself loads is what its group sees."""
    del done, total


def _words_unseen(words: str) -> None:
    del words


class RankServicer(RankServiceServicer):
    def __init__(self, host: RankHost, who: Callable[[Context], Member]) -> None:
        self._host, self._who = host, who

    # Written to the context rather than yielded: a generator that is not asked for more would be closed only when it is collected.
    async def OpenRank(self, request: wire.OpenRankRequest, context: Context) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        async with aclosing(self._host.open(read_open(request), self._who(context))) as events:
            async for event in events:
                await context.write(write_event(event))
