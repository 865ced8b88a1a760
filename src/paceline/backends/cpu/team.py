"""The threads of one runner: the caller conducts, the others watch for phases in compiled code and sleep when none comes.

After a few milliseconds without a phase a thread parks on a semaphore, so an idle machine is idle; the conductor never waits for one
to wake. Every thread is joined by `close`.

What each thread of a team runs: rank 0 conducts a piece of work, the others take part in its phases.

One way into compiled code, with one call of the kernels in it, so that they are compiled once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.core import types

from paceline.backends.compiling import inner
from paceline.backends.cpu import sync
from paceline.backends.cpu.phases import HEADS, LAYERS, is_shared, phase, prepare_batch
from paceline.backends.cpu.places import CONTROL, EXCHANGE, FIRST_LAYER, GROUPS, RANKS, TEAM, WATCH
from paceline.backends.cpu.step import meet
from paceline.backends.cpu.sync import GROUPS_AT, STOP, WORD
from paceline.backends.cpu.tasks import take_part
from paceline.backends.cpu.words import table_at, words_at
from paceline.backends.kernel_cache import in_use

_WATCH_SPINS = 10_000
_WATCH_YIELDS = 2_000
_WORD_SPINS = 200
_WORD_YIELDS = 4_000
_WORD_SLEEPS = 4


@inner
def _await_phase(rank, seen, control, sizes):
    """Wait until the word of the thread's group is another than `seen`. False where none came for a while, or the team stops."""
    groups = sizes[GROUPS]
    word = sync.phase_of(control, rank * groups // sizes[TEAM])
    for waited in range(_WATCH_SPINS + _WATCH_YIELDS):
        if sync.load_acquire(control + 8 * STOP):
            return False
        if sync.load_acquire(word) != seen:
            return True
        if waited < _WATCH_SPINS:
            sync.pause()
        else:
            sync.give_way()
    sync.store_release(sync.phase_of(control, groups) + 8 * WORD * rank, 1)
    return False


@njit(nogil=True, cache=in_use())
def enter(rank, work, done, sizes_at, weights_at, buffers_at, batch_at):
    """Rank 0 conducts a piece of work and returns the tasks done in all, `done` included; others take part until none comes.

    The batch's watch (`engine.local`; 0: none) holds whether to give up, and counts layers.

    Args:
        sizes_at, weights_at, buffers_at, batch_at: addresses of arrays as `places` describes them.
    """
    sizes, weights, buffers, batch = words_at(sizes_at), table_at(weights_at), words_at(buffers_at), words_at(batch_at)
    control = buffers[CONTROL]
    position, count, seen = 0, 0, 0
    if rank == 0:
        prepare_batch(sizes, batch)
    while True:
        if rank == 0:
            kind, layer, count = phase(work, position, sizes, batch)
            if kind < 0 or (batch[WATCH] and sync.load_acquire(batch[WATCH])):
                return done
            if batch[WATCH] and layer > batch[FIRST_LAYER]:
                sync.store_release(batch[WATCH] + 8, layer - batch[FIRST_LAYER])
            position += 1
            if sizes[RANKS] > 1 and is_shared(kind):
                batch[EXCHANGE] += 1
            sync.post(control, kind, layer, count, sizes[GROUPS])
        elif not _await_phase(rank, seen, control, sizes):
            return done
        seen = take_part(rank, sizes, weights, buffers, batch)
        if rank == 0:
            done += count
            sync.wait_for(control, done, sizes[GROUPS])
            if sizes[RANKS] > 1 and is_shared(kind) and not meet(sizes, buffers, batch):
                return done


def compile_enter() -> None:
    """Compile `enter`, or read it from the kernel cache."""
    compiled: Any = enter
    compiled.compile((types.int64,) * 7)


@njit(nogil=True, cache=in_use())
def await_word(address, seen, crowded):
    """Wait for a while until the word at an address differs from `seen`, and return whether it does.

    The wait yields the core to other threads. With `crowded` it sleeps.
    """
    if crowded:
        for _ in range(_WORD_SLEEPS):
            if sync.load_acquire(address) != seen:
                return True
            sync.sleep_at(address, seen)
        return sync.load_acquire(address) != seen
    for waited in range(_WORD_SPINS + _WORD_YIELDS):
        if sync.load_acquire(address) != seen:
            return True
        if waited < _WORD_SPINS:
            sync.pause()
        else:
            sync.give_way()
    return False


@njit(nogil=True, cache=in_use())
def set_word(address, value, crowded):
    """Write a word after all earlier writes. With `crowded`, also wake the threads that sleep at it."""
    sync.store_release(address, value)
    if crowded:
        sync.wake_at(address)


Words = npt.NDArray[np.int64]
Arguments = tuple[Words, Words, Words, Words]
"""(sizes, weights, buffers, batch), with the places that `places` names."""


def control_words(size: int, groups: int) -> int:
    """Return the length of the control array, in words, for `size` threads in `groups` groups."""
    return GROUPS_AT + 2 * WORD * groups + WORD * size


class Team:
    """`size` threads that share forward passes; the caller of `run_layers` and `run_head` is one of them.

    Args:
        size: threads, the caller included.
        control: int64 array of `control_words(size, groups)`, zeroed, which `arguments` hold the address of.
        arguments: what the kernels see.
        nodes: that threads are bound to, but for the caller, which has other work too.
    """

    def __init__(self, size: int, control: Words, arguments: Arguments, nodes: Sequence[frozenset[int]] = ()) -> None:
        self._control, self._arrays = control, arguments
        self._arguments = tuple(array.ctypes.data for array in arguments)
        self._parked = control[-WORD * size :: WORD]
        """Each rank's flag."""
        self._nodes = nodes[:size]
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
            if self._parked[rank]:
                self._parked[rank] = 0
                self._wake[rank].release()

    def _serve(self, rank: int) -> None:
        if self._nodes:
            sync.bind(self._nodes[sync.node_of(rank, len(self._wake), len(self._nodes))])
        while not self._control[STOP]:
            enter(rank, LAYERS, 0, *self._arguments)
            self._wake[rank].acquire()
