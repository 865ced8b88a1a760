"""Where activations come in and go out: batches on tensor streams, and a node's tensor port with the members of its fleet behind it.

To stages and executors activations are bf16 bits (uint16). fp16 and fp32 are ways to write them on the wire, for those who asked; fp16 loses what it
can't hold. What blocks says so, and is for threads.

Before activations goes their `StageBatch`, in numbers of 8 bytes, little-endian: how many sequences, blocks and released sequences, the batch's id,
then the columns one after the other: sequences, rows, first positions, paths, counts of blocks; blocks; released sequences; and, of a batch that only
fills KV, the layer that it fills to. It is not a message of the schema, because each token waits for this to be written and read twice a stage, with
nothing of it in any cache: protobuf took four times as long.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from paceline.core.errors import BadPipelineRequest, ShardUnavailable, StreamCorrupt
from paceline.core.ids import BatchId, NodeId, SequenceId
from paceline.core.model import ActivationDtype
from paceline.engine.local import WireBits
from paceline.fleet.eligibility import Voids
from paceline.net.member.node import FleetNode
from paceline.net.tensor.dialling import dial
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.net.tensor.incoming import Array
from paceline.net.tensor.listener import ExpectedStream as Ticket
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.certificates import Member
from paceline.net.trust.credentials import check_callable
from paceline.net.trust.identity import Identity
from paceline.ways.pipeline.executor.route import ActivationSink, NextStage
from paceline.ways.pipeline.executor.stage import StageBatch

_BIG_ENDIAN = sys.byteorder == "big"


def write_batch(batch: StageBatch) -> bytes:
    numbers = array("Q", (len(batch.sequences), len(batch.blocks), len(batch.released), batch.batch_id))
    for column in (
        batch.sequences, batch.row_counts, batch.first_positions, batch.paths, batch.block_counts, batch.blocks, batch.released,
    ):  # fmt: skip
        numbers.extend(column)
    if batch.fills_to:
        numbers.append(batch.fills_to)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def read_batch(data: bytes) -> StageBatch:
    """What `write_batch` wrote. Whether the numbers make sense is for those who run the batch to say.

    Raises:
        StreamCorrupt: it is something else.
    """
    numbers = array("Q")
    if len(data) < 32 or len(data) % 8:
        raise StreamCorrupt(f"{len(data)} bytes before activations are no batch")
    numbers.frombytes(data)
    if _BIG_ENDIAN:
        numbers.byteswap()
    n, n_blocks, n_released, batch_id, *rest = numbers.tolist()
    columns = 5 * n + n_blocks + n_released
    fills_to = rest.pop() if len(rest) == columns + 1 and rest[-1] else 0
    if columns != len(rest):
        raise StreamCorrupt(
            f"Batch {batch_id} says {n} sequences, {n_blocks} blocks and {n_released} released, and has {len(rest)} numbers"
        )
    blocks, released = rest[5 * n : 5 * n + n_blocks], rest[5 * n + n_blocks :]
    sequences, counts, positions, paths, gained = (rest[n * column : n * (column + 1)] for column in range(5))
    return StageBatch(
        BatchId(batch_id), cast("list[SequenceId]", sequences), counts, positions, paths, gained, blocks,
        cast("list[SequenceId]", released), fills_to,
    )  # fmt: skip


WIRE: Final[dict[ActivationDtype, np.dtype[np.generic]]] = {
    ActivationDtype.BF16: np.dtype(np.uint16),
    ActivationDtype.FP16: np.dtype(np.float16),
    ActivationDtype.FP32: np.dtype(np.float32),
}

LOOK_S = 0.004


def from_bf16(x: WireBits) -> npt.NDArray[np.float32]:
    """Exact."""
    return (x.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: npt.NDArray[np.float32]) -> WireBits:
    """Rounded to the nearest, halves to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def written(x_TD: WireBits, dtype: ActivationDtype) -> Array:
    if dtype is ActivationDtype.BF16:
        return x_TD
    with np.errstate(over="ignore"):  # what fp16 can't hold becomes infinite, and is found by the check for that
        return from_bf16(x_TD).astype(WIRE[dtype], copy=False)


def read(x_TD: Array) -> WireBits:
    """What `written` wrote."""
    return x_TD.view(np.uint16) if x_TD.dtype == np.uint16 else to_bf16(x_TD.astype(np.float32, copy=False))


class StreamSink:
    """`ways.pipeline.executor.route.ActivationSink` over a tensor stream.

    Args:
        sender: the stream; closed with this.
    """

    def __init__(self, sender: TensorSender, dtype: ActivationDtype = ActivationDtype.BF16) -> None:
        self._sender = sender
        self._dtype = dtype
        self._prepared: StageBatch | None = None

    def prepare(self, batch: StageBatch, width: int) -> None:
        self._sender.prepare(write_batch(batch), WIRE[self._dtype], (batch.n_rows, width))
        self._prepared = batch

    def send(self, batch: StageBatch, x_TD: WireBits, deadline: float) -> None:
        array = written(x_TD, self._dtype)
        if batch is not self._prepared or not self._sender.send_prepared(array, deadline):
            self._sender.send(write_batch(batch), array, deadline)
        self._prepared = None

    def close(self) -> None:
        self._sender.close()


class StreamSource:
    """`ways.pipeline.executor.route.ActivationSource` over a tensor stream.

    Args:
        receiver: the stream; closed with this.
        width: of a row; None: not checked.
    """

    def __init__(self, receiver: TensorReceiver, dtype: ActivationDtype = ActivationDtype.BF16, width: int | None = None) -> None:
        receiver.look(LOOK_S)
        self._receiver, self._width = receiver, width
        self._dtype = dtype

    @property
    def peer(self) -> NodeId:
        return self._receiver.peer

    def receive(self, deadline: float) -> tuple[StageBatch, WireBits]:
        message = self._receiver.receive(deadline)
        x_TD = message.array
        if x_TD.dtype != WIRE[self._dtype] or x_TD.ndim != 2 or (self._width is not None and x_TD.shape[1] != self._width):
            raise self._receiver.refuse(StreamCorrupt(f"{self._receiver.peer} sent {x_TD.dtype} of shape {x_TD.shape} as activations"))
        try:
            batch = read_batch(message.header)
        except StreamCorrupt as error:
            raise self._receiver.refuse(error) from error
        return batch, read(x_TD)

    def close(self) -> None:
        self._receiver.close()


End = TypeVar("End", bound=ActivationSink | StreamSource)


async def opened_in_thread(open_end: Callable[[], End]) -> End:
    """What `open_end` opens, which blocks. Where the caller is cancelled meanwhile, it is closed as soon as it is open.

    The thread is its own: a caller whose addresses answer nothing must not keep the threads that everything else shares.

    Raises:
        ShardUnavailable: the system has no thread left.
    """
    future: Future[End] = Future()

    def work() -> None:
        try:
            future.set_result(open_end())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    try:
        threading.Thread(target=work, name="paceline-open", daemon=True).start()
    except RuntimeError as error:
        raise ShardUnavailable("This machine has no thread left") from error
    opened = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(opened)
    except asyncio.CancelledError:
        opened.add_done_callback(_hang_up)
        raise


def _hang_up(opened: asyncio.Future[End]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()


class TensorEnds:
    """A node's tensor port, and the way to others'.

    Args:
        listener: gives the node's tensor port; raises StreamClosed while there is none.
        member_of: by node id, what the certificate of a member in view says; raises BadPipelineRequest where there is none. Asked on the event loop.
        addresses_of: where a node's card says that its streams are, by node id and port. Asked on the event loop.
    """

    def __init__(
        self,
        listener: Callable[[], TensorListener],
        identity: Identity,
        voids: Voids,
        member_of: Callable[[NodeId], Member],
        addresses_of: Callable[[NodeId, int], Sequence[str]],
    ) -> None:
        self._listener, self._identity, self._voids, self._member_of, self._addresses_of = (
            listener,
            identity,
            voids,
            member_of,
            addresses_of,
        )

    @property
    def port(self) -> int:
        return self._listener().port

    def expect(self, ticket: bytes, dtype: ActivationDtype, width: int) -> ExpectedInput:
        """A stream will bring this ticket, and then rows of `width`.

        Raises:
            StreamClosed: the port is closed.
        """
        return ExpectedInput(self._listener().expect(ticket), dtype, width)

    def way(self, to: NextStage, dtype: ActivationDtype) -> Callable[[float], ActivationSink]:
        """How to reach a node of the fleet, at the hosts of its card: of what the caller names, the port alone counts. On the event loop; does not wait.

        Returns:
            Opens the stream; blocks until a deadline on the monotonic clock, and raises FleetError where the node can't be reached, or does not take the ticket.

        Raises:
            BadPipelineRequest: there is no such node.
            NodeUnreachable: it is not in view.
            NotTrusted: it may not be reached.
        """
        member = self._member_of(to.node_id)
        check_callable(member, self._voids)
        addresses = self._addresses_of(to.node_id, int(to.addresses[0].rpartition(":")[2]))

        def go(deadline: float, /) -> ActivationSink:
            return StreamSink(dial(addresses, member, to.ticket, self._identity, self._voids, deadline), dtype)

        return go


class ExpectedInput:
    """A ticket that was given out, and what its bearer will send."""

    def __init__(self, ticket: Ticket, dtype: ActivationDtype, width: int) -> None:
        self._ticket, self._dtype, self._width = ticket, dtype, width

    def accept(self, deadline: float) -> StreamSource:
        """The stream that brought the ticket. Blocks.

        Raises:
            StreamStalled: none did until `deadline` on the monotonic clock.
            StreamClosed: it was closed.
        """
        return StreamSource(self._ticket.wait(deadline), self._dtype, self._width)

    def close(self) -> None:
        """The ticket is good no more. Idempotent; wakes the threads that wait."""
        self._ticket.cancel()


def tensor_ends(fleet: FleetNode) -> TensorEnds:

    def member_of(node_id: NodeId) -> Member:
        member = fleet.member(node_id)
        if member is None:
            raise BadPipelineRequest(f"There is no node {node_id} in this fleet's view")
        return member

    return TensorEnds(lambda: fleet.tensors, fleet.identity, fleet.gossip.voids, member_of, fleet.tensor_addresses_of)
