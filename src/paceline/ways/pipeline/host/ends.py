"""Where a node's activations come in and go out: its tensor port, and members of its fleet by their certificates.

What blocks says so, and is for threads. To stages activations are bf16 bits, whatever was agreed for the wire.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from paceline.core.errors import BadPipelineRequest, ShardUnavailable
from paceline.core.ids import NodeId
from paceline.core.model import ActivationDtype
from paceline.net.member.node import FleetNode
from paceline.net.tensor.dialling import dial
from paceline.net.tensor.listener import ExpectedStream as Ticket
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.certificates import Member
from paceline.net.trust.credentials import check_callable
from paceline.net.trust.identity import Identity
from paceline.net.trust.seals import Voids
from paceline.ways.pipeline.batches import StreamSink, StreamSource
from paceline.ways.pipeline.executor.sessions import ActivationSink, NextStage


class Closes(Protocol):
    """One end of a stream."""

    def close(self) -> None: ...


End = TypeVar("End", bound=Closes)


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
        identity: this node's.
        voids: the revocations known.
        member_of: by node id, what the certificate of a member in view says; raises BadPipelineRequest where there is none. Asked on the event loop.
    """

    def __init__(
        self, listener: Callable[[], TensorListener], identity: Identity, voids: Voids, member_of: Callable[[NodeId], Member]
    ) -> None:
        self._listener, self._identity, self._voids, self._member_of = listener, identity, voids, member_of

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
        """How to reach a node of the fleet. On the event loop; does not wait.

        Returns:
            Opens the stream; blocks until a deadline on the monotonic clock, and raises FleetError where the node can't be reached, or does not take the ticket.

        Raises:
            BadPipelineRequest: there is no such node.
            NotTrusted: it may not be reached.
        """
        member = self._member_of(to.node_id)
        check_callable(member, self._voids)

        def go(deadline: float, /) -> ActivationSink:
            return StreamSink(dial(to.addresses, member, to.ticket, self._identity, self._voids, deadline), dtype)

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
    """Those of a node of a fleet."""

    def member_of(node_id: NodeId) -> Member:
        member = fleet.member(node_id)
        if member is None:
            raise BadPipelineRequest(f"There is no node {node_id} in this fleet's view")
        return member

    return TensorEnds(lambda: fleet.tensors, fleet.identity, fleet.gossip.voids, member_of)
