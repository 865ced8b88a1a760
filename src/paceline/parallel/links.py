"""How activations travel, as stages and executors see it; `transport` has the real ones.

Shapes: T rows of a batch, D hidden. Activations are bits of bf16, whatever they travel as.
"""

from __future__ import annotations

from typing import Protocol

from paceline.engine.local import WireBits
from paceline.parallel.stage_batch import StageBatch


class ActivationSink(Protocol):
    """Takes batches, in order. For one thread."""

    def send(self, batch: StageBatch, x_TD: WireBits, deadline: float) -> None:
        """Hand a batch on; returns once it is on its way.

        Args:
            batch: what the rows are.
            x_TD: may be reused by the caller afterwards.
            deadline: on the monotonic clock.

        Raises:
            StreamStalled: the other side takes nothing.
            TensorStreamError: the stream is broken.
        """
        ...

    def close(self) -> None:
        """Idempotent; wakes whoever waits."""
        ...


class ActivationSource(Protocol):
    """Gives batches, in order. For one thread."""

    def receive(self, deadline: float) -> tuple[StageBatch, WireBits]:
        """The next batch. The array is good until the next call.

        Raises:
            StreamStalled: none came, or one began and did not end, until `deadline` on the monotonic clock.
            TensorStreamError: the stream is broken, or what it carries is.
        """
        ...

    def close(self) -> None:
        """Idempotent; wakes whoever waits."""
        ...
