"""The threads of one runner: the caller conducts, the others watch for phases in compiled code and sleep when none comes.

After a few milliseconds without a phase a thread parks on a semaphore, so an idle machine is idle; the conductor never waits for one
to wake. Every thread is joined by `close`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from paceline.backends.cpu import sync
from paceline.backends.cpu.step import CONTROL, run_head, run_layers, take_part

_WATCH_SPINS = 10_000
_WATCH_YIELDS = 2_000
_STOP, _PARKED = 16, 24
"""Places in the control array: the flag that asks all to stop; then each rank's parked flag, a cache line apart."""


def control_words(size: int) -> int:
    """Length of the control array for `size` threads."""
    return _PARKED + sync.WORD * size


@njit(nogil=True, cache=True)
def _watch(rank, sizes, weights, edges, buffers, batch):
    """Take part in phases until none comes for a while, or the team stops."""
    control = buffers[CONTROL]
    parked = control + 8 * (_PARKED + sync.WORD * rank)
    seen = take_part(rank, sizes, weights, edges, buffers, batch)
    waited = 0
    while not sync.load_acquire(control + 8 * _STOP):
        if sync.load_acquire(control + 8 * sync.PHASE) != seen:
            seen = take_part(rank, sizes, weights, edges, buffers, batch)
            waited = 0
        elif waited < _WATCH_SPINS:
            waited += 1
            sync.pause()
        elif waited < _WATCH_SPINS + _WATCH_YIELDS:
            waited += 1
            sync.give_way()
        else:
            sync.store_release(parked, 1)
            return


class Team:
    """`size` threads that share forward passes; the caller of `run_layers` and `run_head` is one of them.

    Args:
        size: threads, the caller included.
        control: int64 array of `control_words(size)`, zeroed, which `arguments` hold the address of.
        arguments: (sizes, weights, edges, buffers, batch) of `step.run_layers`.
    """

    def __init__(self, size: int, control: npt.NDArray[np.int64], arguments: tuple[Any, ...]) -> None:
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
        self._done = run_layers(self._done, *self._arguments)

    def run_head(self) -> None:
        self._rouse()
        self._done = run_head(self._done, *self._arguments)

    def close(self) -> None:
        self._control[_STOP] = 1
        for wake in self._wake:  # whether parked or about to park
            wake.release()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _rouse(self) -> None:
        for rank in range(1, len(self._wake)):
            if self._control[_PARKED + sync.WORD * rank]:
                self._control[_PARKED + sync.WORD * rank] = 0
                self._wake[rank].release()

    def _serve(self, rank: int) -> None:
        while not self._control[_STOP]:
            _watch(rank, *self._arguments)
            self._wake[rank].acquire()
