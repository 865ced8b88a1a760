"""Where activations come in and go out, as a host sees it; `tensor_ends` has the real ones. Blocking: all of this is for threads.

To stages activations are bf16 bits, whatever was agreed for the wire.
"""

from __future__ import annotations

from typing import Protocol

from paceline.core.ids import NodeId
from paceline.parallel.links import ActivationSink, ActivationSource
from paceline.parallel.sessions import ActivationDtype, NextStage


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
        """Whoever brought it.

        Raises:
            StreamStalled: nobody did until `deadline` on the monotonic clock.
            StreamClosed: it was closed.
        """
        ...

    def close(self) -> None:
        """The ticket is good no more. Idempotent; wakes whoever waits."""
        ...


class TensorEnds(Protocol):
    """A node's tensor port, and the way to others'."""

    @property
    def port(self) -> int: ...

    def expect(self, ticket: bytes, dtype: ActivationDtype, width: int) -> Expected:
        """Somebody will bring this ticket, and then rows of `width`.

        Raises:
            StreamClosed: the port is closed.
        """
        ...

    def dial(self, to: NextStage, dtype: ActivationDtype, deadline: float) -> ActivationSink:
        """Reach a node of the fleet.

        Raises:
            BadPipelineRequest: there is no such node.
            FleetError: it can't be reached, or was revoked.
        """
        ...
