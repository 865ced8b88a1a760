"""A stream that a session waits for, until somebody brings its ticket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.core.errors import StreamClosed, StreamStalled
from paceline.transport.tensor.receiver import TensorReceiver


class Expected:
    """Made by the listener.

    Args:
        ticket: what its sender will bring.
        forget: told, in any thread, that the ticket is good no longer.
    """

    def __init__(self, ticket: bytes, forget: Callable[[Expected], None]) -> None:
        self.ticket, self._forget = ticket, forget
        self._changed = threading.Condition()
        self._receiver: TensorReceiver | None = None
        self._over = False

    def wait(self, deadline: float) -> TensorReceiver:
        """The stream, once somebody brings the ticket. It is the caller's then.

        Raises:
            StreamStalled: nobody has until `deadline`, on the monotonic clock. Waiting again is possible.
            StreamClosed: it was cancelled, or the listener closed, or whoever came was revoked.
        """
        with self._changed:
            while self._receiver is None and not self._over:
                if not self._changed.wait(max(0.0, deadline - time.perf_counter())):
                    raise StreamStalled("Nobody has opened the tensor stream that was waited for")
            receiver, self._receiver, self._over = self._receiver, None, True
        if receiver is None:
            raise StreamClosed("The tensor stream that was waited for will not come")
        return receiver

    def cancel(self) -> None:
        """The ticket is good no longer. A stream that nobody has fetched is closed."""
        self._forget(self)
        with self._changed:
            receiver, self._receiver, self._over = self._receiver, None, True
            self._changed.notify_all()
        if receiver is not None:
            receiver.close()

    def deliver(self, receiver: TensorReceiver) -> bool:
        """By the listener. False: nobody waits any more."""
        with self._changed:
            if self._over:
                return False
            self._receiver = receiver
            self._changed.notify_all()
            return True
