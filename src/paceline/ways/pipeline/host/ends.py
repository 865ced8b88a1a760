"""Where activations come in and go out, as a host sees it; `tensor_ends` has the real ones. What blocks says so, and is for threads.

To stages activations are bf16 bits, whatever was agreed for the wire.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from paceline.core.errors import ShardUnavailable
from paceline.core.ids import NodeId
from paceline.core.model import ActivationDtype
from paceline.ways.pipeline.executor.links import ActivationSink, ActivationSource
from paceline.ways.pipeline.executor.sessions import NextStage


class Incoming(ActivationSource, Protocol):
    """Activations of a sender whose certificate was checked. `receive` raises StreamIdle where no batch has begun to come."""

    @property
    def peer(self) -> NodeId: ...

    def acknowledge(self) -> None:
        """The last batch is passed on.

        Raises:
            TensorStreamError: the stream is broken.
        """
        ...


class Expected(Protocol):
    """A ticket that was given out."""

    def accept(self, deadline: float) -> Incoming:
        """The stream that brought the ticket. Blocks.

        Raises:
            StreamStalled: none did until `deadline` on the monotonic clock.
            StreamClosed: it was closed.
        """
        ...

    def close(self) -> None:
        """The ticket is good no more. Idempotent; wakes the threads that wait."""
        ...


class Dial(Protocol):
    """A way to a node."""

    def __call__(self, deadline: float, /) -> ActivationSink:
        """Go it. Blocks.

        Raises:
            FleetError: the node can't be reached, or does not take the ticket.
        """
        ...


class TensorEnds(Protocol):
    """A node's tensor port, and the way to others'."""

    @property
    def port(self) -> int: ...

    def expect(self, ticket: bytes, dtype: ActivationDtype, width: int) -> Expected:
        """A stream will bring this ticket, and then rows of `width`.

        Raises:
            StreamClosed: the port is closed.
        """
        ...

    def way(self, to: NextStage, dtype: ActivationDtype) -> Dial:
        """How to reach a node of the fleet. On the event loop; does not wait.

        Raises:
            BadPipelineRequest: there is no such node.
            NotTrusted: it may not be reached.
        """
        ...


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
