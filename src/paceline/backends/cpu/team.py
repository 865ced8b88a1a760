"""The threads of one runner: they wait in compiled code between steps, and sleep when no step comes.

The caller is rank 0. The others watch a ticket in the control array; after a few milliseconds without a new one they park on a
semaphore, so an idle machine is idle. Every thread is joined by `close`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from paceline.backends.cpu import sync
from paceline.backends.cpu.step import BATCH_STOP, WORK, run

_WATCH_SPINS = 10_000
_WATCH_YIELDS = 2_000
PARKED = 32
"""Place of rank 0's parked flag in the control array; a cache line a rank."""


@njit(nogil=True, cache=True)
def watch(rank, ticket, base, meetings, control, sizes, weights, edges, buffers, batch):
    """Serve tickets after `ticket` until asked to stop or until none comes for a while.

    Returns (ticket, base, meetings, stopped) to go on with.
    """
    parked = control + 8 * (PARKED + sync.WORD * rank)
    waited = 0
    while True:
        if sync.load_acquire(control + 8 * sync.TICKET) > ticket:
            ticket += 1
            waited = 0
            if batch[WORK] == BATCH_STOP:
                return ticket, base, meetings, True
            base, meetings = run(rank, base, meetings, sizes, weights, edges, buffers, batch)
        elif waited < _WATCH_SPINS:
            waited += 1
            sync.pause()
        elif waited < _WATCH_SPINS + _WATCH_YIELDS:
            waited += 1
            sync.give_way()
        else:
            # Flag first, then look again: whoever raises the ticket looks at the flag after.
            sync.store_release(parked, 1)
            if sync.load_acquire(control + 8 * sync.TICKET) == ticket:
                return ticket, base, meetings, False
            sync.store_release(parked, 0)
            waited = 0


@njit(nogil=True, cache=True)
def raise_ticket(control):
    """A full fence: what was written before is seen with the ticket, and parked flags are read after it."""
    sync.fetch_add(control + 8 * sync.TICKET, 1)


class Team:
    """`size` threads that run `step.run` together; the caller of `run` is one of them.

    Args:
        size: threads, the caller included.
        control: int64 array shared with the kernels, zeroed.
        batch: int64 array whose WORK says what a ticket asks for.
        arguments: (sizes, weights, edges, buffers) of `step.run`.
    """

    def __init__(self, size: int, control: npt.NDArray[np.int64], batch: npt.NDArray[np.int64], arguments: tuple[Any, ...]) -> None:
        self._control, self._batch, self._arguments = control, batch, arguments
        self._base = self._meetings = 0
        self._wake = [threading.Semaphore(0) for _ in range(size)]
        self._threads = [threading.Thread(target=self._serve, args=(rank,), name=f"paceline-kernel-{rank}", daemon=True) for rank in range(1, size)]
        for thread in self._threads:
            thread.start()

    def run(self, work: int) -> None:
        """Run one piece of work on all threads; returns when it is done."""
        self._raise_ticket(work)
        self._base, self._meetings = run(0, self._base, self._meetings, *self._arguments, self._batch)

    def close(self) -> None:
        if self._threads:
            self._raise_ticket(BATCH_STOP)
            for thread in self._threads:
                thread.join()
            self._threads = []

    def _raise_ticket(self, work: int) -> None:
        self._batch[WORK] = work
        if self._threads:
            raise_ticket(self._control.ctypes.data)
            for rank in range(1, len(self._wake)):
                if self._control[PARKED + sync.WORD * rank]:
                    self._control[PARKED + sync.WORD * rank] = 0
                    self._wake[rank].release()

    def _serve(self, rank: int) -> None:
        ticket = base = meetings = 0
        stopped = False
        while not stopped:
            ticket, base, meetings, stopped = watch(rank, ticket, base, meetings, self._control.ctypes.data, *self._arguments, self._batch)
            if not stopped:
                self._wake[rank].acquire()
