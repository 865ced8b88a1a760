"""How activations travel, as stages and executors see it; `transport` has the real ones.

Shapes: T rows of a batch, D hidden. Activations are bits of bf16, whatever they travel as.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.engine.local import WireBits
from paceline.ways.pipeline.executor.stage_batch import StageBatch

Rehearse = Callable[[StageBatch, WireBits], None]
"""Goes a batch's way, as far as that changes nothing, so that what the next one needs is at hand: a kernel that reads weights of many MB
leaves no code and no data in the caches. Takes some tens of microseconds; the batch is like the last one, its activations are zeros."""


class ActivationSink(Protocol):
    """Takes batches, in order. For one thread."""

    def prepare(self, batch: StageBatch, width: int) -> None:
        """Do for `send` what can be done before the activations are there. Never waits. Batches may be sent without.

        Args:
            width: of its rows.

        Raises:
            TensorStreamError: the stream is broken.
        """
        ...

    def send(self, batch: StageBatch, x_TD: WireBits, deadline: float) -> None:
        """Hand a batch on; returns once it is on its way.

        Args:
            x_TD: may be reused by the caller afterwards.
            deadline: on the monotonic clock, for as long as no byte is taken: each that is gives the whole time anew.

        Raises:
            StreamStalled: the other side takes nothing.
            TensorStreamError: the stream is broken.
        """
        ...

    def close(self) -> None:
        """Idempotent; wakes a thread that waits."""
        ...


class ActivationSource(Protocol):
    """Gives batches, in order. For one thread."""

    def receive(self, deadline: float, rehearse: Rehearse | None = None) -> tuple[StageBatch, WireBits]:
        """The next batch. The array is good until the next call.

        Args:
            deadline: on the monotonic clock, for as long as no byte comes: each that does gives the whole time anew.
            rehearse: may be called while nothing comes.

        Raises:
            StreamStalled: nothing came until `deadline`.
            TensorStreamError: the stream is broken, or what it carries is.
        """
        ...

    def close(self) -> None:
        """Idempotent; wakes a thread that waits."""
        ...
