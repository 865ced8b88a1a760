"""The threads of one runner: the caller conducts, the others watch for phases in compiled code and sleep when none comes.

After a few milliseconds without a phase a thread parks on a semaphore, so an idle machine is idle; the conductor never waits for one
to wake. Every thread is joined by `close`.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu.conduct import PARKED, STOP, enter
from paceline.backends.cpu.step import HEADS, LAYERS
from paceline.backends.cpu.sync import WORD

Words = npt.NDArray[np.int64]
Arguments = tuple[Words, Words, Words, Words]
"""(sizes, weights, buffers, batch) as `step` names their places."""


def control_words(size: int) -> int:
    """Length of the control array for `size` threads."""
    return PARKED + WORD * size


class Team:
    """`size` threads that share forward passes; the caller of `run_layers` and `run_head` is one of them.

    Args:
        size: threads, the caller included.
        control: int64 array of `control_words(size)`, zeroed, which `arguments` hold the address of.
        arguments: what the kernels see.
    """

    def __init__(self, size: int, control: Words, arguments: Arguments) -> None:
        self._control, self._arguments = control, arguments
        self._done = 0
        self._wake = [threading.Semaphore(0) for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"paceline-kernel-{rank}", daemon=True) for rank in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def run_layers(self) -> None:
        """Run the batch that the arrays describe; returns when it is done."""
        self._rouse()
        self._done = enter(0, LAYERS, self._done, *self._arguments)

    def run_head(self) -> None:
        self._rouse()
        self._done = enter(0, HEADS, self._done, *self._arguments)

    def close(self) -> None:
        self._control[STOP] = 1
        for wake in self._wake:  # whether parked or about to park
            wake.release()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _rouse(self) -> None:
        for rank in range(1, len(self._wake)):
            if self._control[PARKED + WORD * rank]:
                self._control[PARKED + WORD * rank] = 0
                self._wake[rank].release()

    def _serve(self, rank: int) -> None:
        while not self._control[STOP]:
            enter(rank, LAYERS, 0, *self._arguments)
            self._wake[rank].acquire()
