"""The threads of one runner: the caller conducts, the others watch for phases in compiled code and sleep when none comes.

After a few milliseconds without a phase a thread parks on a semaphore, so an idle machine is idle; the conductor never waits for one
to wake. Every thread is joined by `close`.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
from numba import njit

from paceline.backends.cpu import sync
from paceline.backends.cpu.step import CONTROL, HEADS, LAYERS, phase, prepare_batch, take_part

_WATCH_SPINS = 10_000
_WATCH_YIELDS = 2_000
_STOP, _PARKED = 16, 24
"""Places in the control array: the flag that asks all to stop; then each rank's parked flag, a cache line apart."""


Words = npt.NDArray[np.int64]
Arguments = tuple[Words, Words, Words, Words, Words]
"""(sizes, weights, edges, buffers, batch) as `step` names their places."""


def control_words(size: int) -> int:
    """Length of the control array for `size` threads."""
    return _PARKED + sync.WORD * size


@njit(nogil=True)
def _await_phase(rank: int, seen: int, control: int) -> bool:
    """Wait until the phase's word is another than `seen`. False where none came for a while, or the team stops."""
    for waited in range(_WATCH_SPINS + _WATCH_YIELDS):
        if sync.load_acquire(control + 8 * _STOP):
            return False
        if sync.load_acquire(control + 8 * sync.PHASE) != seen:
            return True
        if waited < _WATCH_SPINS:
            sync.pause()
        else:
            sync.give_way()
    sync.store_release(control + 8 * (_PARKED + sync.WORD * rank), 1)
    return False


@njit(nogil=True, cache=True)
def _enter(rank: int, work: int, done: int, sizes: Words, weights: Words, edges: Words, buffers: Words, batch: Words) -> int:
    """The one way into compiled code, with one call of the kernels in it, so that they are compiled once.

    Rank 0 conducts a piece of work and returns the tasks done in all, `done` included; others take part until none comes.
    """
    control = buffers[CONTROL]
    position, count, seen = 0, 0, 0
    if rank == 0:
        prepare_batch(sizes, batch)
    while True:
        if rank == 0:
            kind, layer, count = phase(work, position, sizes, batch)
            if kind < 0:
                return done
            position += 1
            sync.post(control, kind, layer, count)
        elif not _await_phase(rank, seen, control):
            return done
        seen = take_part(rank, sizes, weights, edges, buffers, batch)
        if rank == 0:
            done += count
            sync.wait_for(control, done)


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
        self._done = _enter(0, LAYERS, self._done, *self._arguments)

    def run_head(self) -> None:
        self._rouse()
        self._done = _enter(0, HEADS, self._done, *self._arguments)

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
            _enter(rank, LAYERS, 0, *self._arguments)
            self._wake[rank].acquire()
