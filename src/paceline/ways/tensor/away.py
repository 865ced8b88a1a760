"""A rank on another machine, as its group has it: asked for over RankService, and met over two tensor streams.

Importing this imports kernels.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import grpc
import grpc.aio

from paceline.core.errors import ExecutorLost, FleetError, NodeStopping, NodeUnreachable, PacelineError, StreamClosed
from paceline.fleet.eligibility import Use
from paceline.machine.fetch import in_thread
from paceline.machine.setup import Setup
from paceline.net.rpc_faults import error_of, unless_closed
from paceline.net.tensor.dialling import dial, tensor_addresses
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.net.tensor.listener import ExpectedStream
from paceline.net.wire import rank_pb2 as wire
from paceline.net.wire.rank_pb2_grpc import RankServiceStub
from paceline.ways.tensor.codec import RankFault, RankLoading, RankOpened, RankRequest, Stops, read_event, write_open
from paceline.ways.tensor.hosting import CONNECT_S, RankPlace
from paceline.ways.tensor.memory import GroupMemory
from paceline.ways.tensor.pump import GroupPump
from paceline.ways.tensor.rank import RankOrder

Call = grpc.aio.UnaryStreamCall[wire.OpenRankRequest, wire.OpenRankResponse]


class AwayRank:
    """A `process.Rank` that another node of the fleet runs. Made in any thread but the loop's; begins to load at once.

    Args:
        setup: of the model.
        patience_s: with its silence while it loads.

    Raises:
        NodeStopping: this node is.
    """

    pid = 0

    def __init__(self, place: RankPlace, setup: Setup, memory: GroupMemory, order: RankOrder, patience_s: float) -> None:
        self.order, self.is_ready, self.numerics_id = order, False, ""
        self._place, self._setup, self._memory = place, setup, memory
        self.where = str(place.node_id)
        self._patience_s, self._silent_at = patience_s, time.perf_counter() + patience_s
        self._pump: GroupPump | None = None
        self.gone: str | None = None
        self._losing = threading.Lock()
        self._changed = threading.Event()
        """Set once it is ready, or gone."""
        running = self._run()
        try:
            self._open = asyncio.run_coroutine_threadsafe(running, place.loop)
        except RuntimeError as error:  # its loop is closed
            running.close()
            raise NodeStopping(f"Rank {order.rank} can't be had on {place.node_id}: this node is stopping", "Start it again.") from error

    def wake(self) -> None:
        if self._pump is not None:
            self._pump.wake()

    def hear(self, wait_s: float) -> None:
        self._changed.wait(wait_s)

    @property
    def is_silent(self) -> bool:
        return not self.is_ready and time.perf_counter() > self._silent_at

    def ask(self, message: bytes, within_s: float) -> bytes:
        try:
            if self._pump is not None and self.gone is None:
                return self._pump.ask(message, within_s)
        except TimeoutError:
            self.kill()
        raise ExecutorLost(f"rank {self.order.rank} of the tensor group is gone", ())

    def kill(self) -> None:
        self._lose("was ended")
        if self._pump is not None:
            self._pump.close()
        self._open.cancel()

    def close(self, wait_s: float) -> None:
        del wait_s  # what it ran is over, or void: its node ends its process
        self.kill()

    def _lose(self, why: str) -> None:
        """Whoever says it first knows why. In any thread."""
        with self._losing:
            if self.gone is None:
                self.gone = f"on {self._place.node_id} {why}"
        self._changed.set()

    async def _run(self) -> None:
        """Have it, until it is lost. On the loop."""
        fleet, node_id = self._place.fleet, self._place.node_id
        expected = None
        try:
            expected, live = fleet.tensors.expect(), fleet.view().get(node_id)
            if live is None:
                raise NodeUnreachable(f"{node_id} is not in view")
            channel = fleet.channel(node_id, live.card.addresses, Use.HOLD_LAYERS)
            with unless_closed(node_id):
                call = RankServiceStub(channel).OpenRank(write_open(self._request(expected.ticket)))
                try:
                    await self._follow(call, live.card.addresses, expected)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            self._lose(f"is lost: {error_of(error, node_id).message}")
        except PacelineError as error:
            self._lose(f"is lost: {error.message}")
        finally:
            self._lose("was ended")
            if expected is not None:
                expected.cancel()
            if self._pump is not None:
                await in_thread(self._pump.close)

    def _request(self, ticket: bytes) -> RankRequest:
        sizes, fleet = self.order.sizes, self._place.fleet
        return RankRequest(
            *(self._setup.opened.name, self._setup.digest, self._setup.weights, self.order.rank),
            tuple(Stops(share.out.stop, share.down.stop, share.vocab.stop) for share in sizes.shares),
            *(self.order.n_blocks, sizes.max_rows, sizes.logits_rows, sizes.max_blocks),
            tensor_addresses(fleet.addresses, fleet.tensors.port),
            ticket,
        )

    async def _follow(self, call: Call, addresses: Sequence[str], expected: ExpectedStream) -> None:
        """What the rank's node says, to the end.

        Raises:
            FleetError: it makes no sense, or ends without a word.
        """
        last = None
        async for message in call:
            event = read_event(message)
            if event != last:  # a load that comes no further is none that lives
                last, self._silent_at = event, time.perf_counter() + self._patience_s
            match event:
                case RankOpened() as opened if self._pump is None:
                    await self._connect(opened, addresses, expected)
                case RankFault(why):
                    return self._lose(why)
                case RankLoading():
                    pass
                case _:
                    raise FleetError("it was opened twice")
        raise NodeUnreachable("its node ended the call")

    async def _connect(self, opened: RankOpened, addresses: Sequence[str], expected: ExpectedStream) -> None:
        fleet, node_id = self._place.fleet, self._place.node_id
        member = fleet.member(node_id)
        if member is None:
            raise NodeUnreachable(f"{node_id} is not in view any more")
        ways = tensor_addresses(fleet.book.order(addresses), opened.tensor_port)
        open_both = partial(_opened, partial(dial, ways, member, opened.ticket, fleet.identity, fleet.gossip.voids), expected)
        sender, receiver = await in_thread(open_both, expected.cancel)
        self._pump = GroupPump(self._memory, self.order.rank, sender, receiver, self._lose)
        if receiver.peer != node_id:
            raise StreamClosed(f"{receiver.peer} brought its ticket")
        self._pump.start()
        self.numerics_id, self.is_ready = opened.numerics_id, True
        self._changed.set()


def _opened(dials: Callable[[float], TensorSender], expected: ExpectedStream) -> tuple[TensorSender, TensorReceiver]:
    """Open both streams. Blocks. Raises FleetError."""
    deadline = time.perf_counter() + CONNECT_S
    sender = dials(deadline)
    try:
        return sender, expected.wait(deadline)
    except PacelineError:
        sender.close()
        raise
