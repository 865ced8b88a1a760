"""What each thread of a team runs: rank 0 conducts a piece of work, the others take part in its phases.

One way into compiled code, with one call of the kernels in it, so that they are compiled once.
"""

from __future__ import annotations

from numba import njit

from paceline.backends.cpu import sync
from paceline.backends.cpu.step import CONTROL, FIRST_LAYER, WATCH, phase, prepare_batch, take_part
from paceline.backends.kernel_cache import in_use

_WATCH_SPINS = 10_000
_WATCH_YIELDS = 2_000
STOP, PARKED = 16, 24
"""Places in the control array: the flag that asks all to stop; then each rank's parked flag, a cache line apart."""


@njit(nogil=True)
def _await_phase(rank, seen, control):
    """Wait until the phase's word is another than `seen`. False where none came for a while, or the team stops."""
    for waited in range(_WATCH_SPINS + _WATCH_YIELDS):
        if sync.load_acquire(control + 8 * STOP):
            return False
        if sync.load_acquire(control + 8 * sync.PHASE) != seen:
            return True
        if waited < _WATCH_SPINS:
            sync.pause()
        else:
            sync.give_way()
    sync.store_release(control + 8 * (PARKED + sync.WORD * rank), 1)
    return False


@njit(nogil=True, cache=in_use())
def enter(rank, work, done, sizes, weights, buffers, batch):
    """Rank 0 conducts a piece of work and returns the tasks done in all, `done` included; others take part until none comes.

    The batch's watch (`engine.local`; 0: none) holds whether to give up, and counts layers.
    """
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
            sync.post(control, kind, layer, count)
        elif not _await_phase(rank, seen, control):
            return done
        seen = take_part(rank, sizes, weights, buffers, batch)
        if rank == 0:
            done += count
            sync.wait_for(control, done)
