"""How threads share one forward pass: a conductor posts phases, the threads that are awake claim their tasks.

A phase is one 64-bit word: what to do, how many tasks, the next one to claim. Claiming adds one to the word, so a thread that comes
late or sleeps through phases needs no barrier: it reads the word and takes part in what runs now. Only the conductor waits, and
only for tasks, never for threads: on a busy machine the others may not be scheduled at all. Who computes a task never changes its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.lowering import lowered
from paceline.backends.cpu.simd import I32, I64, Emit, Value

PHASE, DONE, WORD = 0, 8, 8
"""Places in the control array (int64), a cache line apart: the word, and the tasks finished so far (only grows)."""

TASK_BITS, LAYER_BITS, KIND_BITS = 20, 12, 8
"""From the low end of the word: next task, number of tasks, layer, kind. A finished phase has next >= number, a posted one next = 0."""

SPINS_BEFORE_YIELD = 4000

give_way = types.ExternalFunction("sched_yield", types.int32())
"""Let another thread have the processor (POSIX)."""


@intrinsic
def fetch_add(_, address, value):
    def body(e: Emit, args: Sequence[Value]) -> Value:
        pointer = e.b.inttoptr(args[0], I64.as_pointer())
        return e.b.atomic_rmw("add", pointer, args[1], "seq_cst")

    return lowered(body, types.int64, types.int64, types.int64)


@intrinsic
def load_acquire(_, address):
    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.load_atomic(e.b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return lowered(body, types.int64, types.int64)


@intrinsic
def store_release(_, address, value):
    def body(e: Emit, args: Sequence[Value]) -> None:
        e.b.store_atomic(args[1], e.b.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return lowered(body, types.void, types.int64, types.int64)


@intrinsic
def pause(_):
    def body(e: Emit, args: Sequence[Value]) -> None:
        e.pause()

    return lowered(body, types.void)


@njit(nogil=True)
def post(control, kind, layer, count):
    """Start a phase; the one before must be finished."""
    word = ((kind << LAYER_BITS | layer) << TASK_BITS | count) << TASK_BITS
    store_release(control + 8 * PHASE, word)


@njit(nogil=True)
def task_of(word):
    """(next task, number of tasks) of a phase's word."""
    mask = (1 << TASK_BITS) - 1
    return word & mask, word >> TASK_BITS & mask


@njit(nogil=True)
def kind_and_layer(word):
    rest = word >> (2 * TASK_BITS)
    return rest >> LAYER_BITS & ((1 << KIND_BITS) - 1), rest & ((1 << LAYER_BITS) - 1)


@njit(nogil=True)
def finish(control):
    """Say that a claimed task is done."""
    fetch_add(control + 8 * DONE, 1)


@njit(nogil=True)
def wait_for(control, done):
    """Spin until `done` tasks were finished in all."""
    spins = 0
    while load_acquire(control + 8 * DONE) < done:
        spins += 1
        if spins > SPINS_BEFORE_YIELD:
            give_way()
        else:
            pause()


@intrinsic
def load_int32(_, address):
    """An int32 at an address, widened."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.sext(e.load(I32, args[0], align=4), I64)

    return lowered(body, types.int64, types.int64)
