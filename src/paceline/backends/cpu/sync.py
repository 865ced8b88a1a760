"""How a team of threads shares one forward pass: claim tasks, meet at barriers. All counters only grow, so none is ever reset.

A phase of n tasks is claimed from one counter: each thread adds one until what it got lies past the phase, so a phase advances the
counter by exactly n + team, and every thread knows where the next one starts. Who computes a task never changes its bytes.
Threads that wait spin, and after a while yield the processor: the machine also serves HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.cpu.simd import I32, I64, Emit, Value, lowered

CLAIMED, ARRIVED, TICKET, WORD = 0, 8, 16, 8
"""Places in the control array (int64), a cache line apart."""

_SPINS_BEFORE_YIELD = 4000

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
        e.call("llvm.x86.sse2.pause", ir.VoidType())

    return lowered(body, types.void)


@njit(nogil=True)
def wait_for(address, target):
    """Spin until the counter at `address` has reached `target`."""
    spins = 0
    while load_acquire(address) < target:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            give_way()
        else:
            pause()


@intrinsic
def load_int32(_, address):
    """An int32 at an address, widened."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.sext(e.load(I32, args[0], align=4), I64)

    return lowered(body, types.int64, types.int64)
