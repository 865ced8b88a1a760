"""How threads share one forward pass: a conductor posts phases, the threads that are awake claim their tasks.

A phase is one 64-bit word: what to do, how many tasks, the next one to claim. Claiming adds one to the word, so a thread that comes
late or sleeps through phases needs no barrier: it reads the word and takes part in what runs now. Only the conductor waits, and
only for tasks, never for threads: on a busy machine the others may not be scheduled at all. Who computes a task never changes its bytes.

Each group of some threads has a word of its own for its share of the tasks, and a count of those its threads finished: so tasks of many threads meet on
no common cache line. A thread whose group has no more claims what other groups have left.

Where memory has nodes (NUMA) a page lies at the node of the thread that first writes to it, and that node's threads read it faster than others: so groups are of one
node each, threads are bound to it, and pack the weights of the outputs that their groups claim first. KV and activations lie wherever they come to lie: at decode
they are little beside weights.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numba.core import types
from numba.extending import intrinsic

from paceline.backends.compiling import inner
from paceline.backends.cpu.lowering import lowered
from paceline.backends.cpu.simd import I32, I64, Emit, Value

WORD = 8
"""Words of a cache line."""
STOP, GROUPS_AT = 0, WORD
"""Places in the control array (int64): the flag that asks all to stop; then two lines a group, its word and the tasks its threads finished so far (only grows);
then each thread's parked flag, a line apart."""

THREADS_A_GROUP = 8
"""At most. Raising it: more threads contend for a line. Lowering it: the conductor posts and reads more of them, and more is claimed from other groups."""

TASK_BITS, LAYER_BITS, KIND_BITS = 20, 12, 8
"""From the low end of the word: next task, number of tasks, layer, kind. A finished phase has next >= its group's share, a posted one next = 0."""

SPINS_BEFORE_YIELD = 4000

give_way = types.ExternalFunction("sched_yield", types.int32())
"""Let another thread have the processor (POSIX)."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
"""Number of the system call; 0: none is known."""
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 1 << 30
_SLEEP = np.array([0, 1_000_000], np.int64)
"""How long a thread sleeps at a word at most (struct timespec). Raising it: what else ends its wait, a batch that is given up, is noticed later."""
_system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


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


@inner
def sleep_at(word, seen):
    """Let the core go until the word at an address is another than `seen`, for a moment. Processes that have the memory in common may wake one another."""
    if _FUTEX:
        _system_call(_FUTEX, word, _FUTEX_WAIT, seen & 0xFFFFFFFF, _SLEEP.ctypes.data, 0, 0)
    else:
        give_way()


@inner
def wake_at(word):
    """Wake all who sleep at a word, which was changed."""
    if _FUTEX:
        _system_call(_FUTEX, word, _FUTEX_WAKE, _ALL, 0, 0, 0)


@inner
def phase_of(control, group):
    """Address of a group's word."""
    return control + 8 * (GROUPS_AT + 2 * WORD * group)


@inner
def share_of(count, group, groups):
    """Which of so many tasks are a group's: the first one, and behind the last one. Fewer than there are groups go to the first groups."""
    return (count * group + groups - 1) // groups, (count * (group + 1) + groups - 1) // groups


@inner
def post(control, kind, layer, count, groups):
    """Start a phase; the one before must be finished."""
    word = ((kind << LAYER_BITS | layer) << TASK_BITS | count) << TASK_BITS
    for group in range(groups):
        store_release(phase_of(control, group), word)


@inner
def claim(control, own, groups):
    """Claim a task, of a thread's own group if there is one. Returns (task, its phase's word), or (-1, the own group's word as last seen)."""
    seen = load_acquire(phase_of(control, own))
    for turn in range(groups):
        group = (own + turn) % groups
        at = phase_of(control, group)
        word = load_acquire(at) if turn else seen
        task, count = task_of(word)
        first, stop = share_of(count, group, groups)
        if first + task < stop:
            word = fetch_add(at, 1)
            task, count = task_of(word)
            first, stop = share_of(count, group, groups)
            if first + task < stop:
                return first + task, word
    return -1, seen


@inner
def task_of(word):
    """(next task, number of tasks) of a phase's word."""
    mask = (1 << TASK_BITS) - 1
    return word & mask, word >> TASK_BITS & mask


@inner
def kind_and_layer(word):
    rest = word >> (2 * TASK_BITS)
    return rest >> LAYER_BITS & ((1 << KIND_BITS) - 1), rest & ((1 << LAYER_BITS) - 1)


@inner
def finish(control, own):
    """Say that a claimed task is done, by a thread of a group."""
    fetch_add(phase_of(control, own) + 8 * WORD, 1)


@inner
def wait_for(control, done, groups):
    """Spin until `done` tasks were finished in all."""
    spins = 0
    while True:
        finished = 0
        for group in range(groups):
            finished += load_acquire(phase_of(control, group) + 8 * WORD)
        if finished >= done:
            return
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


def nodes(system: Path = Path("/sys/devices/system/node")) -> list[frozenset[int]]:
    """The processors of each node that this process may run on; empty where the system tells of less than two nodes, or they are of unlike sizes: as many
    threads run at each.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    try:
        lists = [(path / "cpulist").read_text() for path in sorted(system.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))]
    except OSError:
        return []
    found = [frozenset(allowed & _processors(text)) for text in lists]
    found = [node for node in found if node]
    return found if len(found) > 1 and len({len(node) for node in found}) == 1 else []


def _processors(text: str) -> set[int]:
    """Of a list such as 0-3,8."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {processor for ends in ranges for processor in range(int(ends[0]), int(ends[-1]) + 1)}


def groups_of(threads: int, n_nodes: int) -> int:
    """Groups of a team: as many at each node, of eight threads at most."""
    n_nodes = min(max(1, n_nodes), threads)
    return n_nodes * -(-threads // (n_nodes * THREADS_A_GROUP))


def node_of(part: int, parts: int, n_nodes: int) -> int:
    """The node of a thread among a team's, or of an output among a product's."""
    return part * n_nodes // parts


def bind(node: frozenset[int]) -> None:
    """Have this thread run on a node's processors alone. Threads that it starts do too."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # it is refused here: then the system places the thread
            os.sched_setaffinity(0, node)
