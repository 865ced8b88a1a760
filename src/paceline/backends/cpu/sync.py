"""Work sharing of threads in a forward pass: a conductor posts phases, and the threads that are awake claim their tasks.

A phase is one 64-bit word: its kind, its number of tasks, the next task to claim. Claiming adds one to the word. So a thread that comes
late or sleeps through phases needs no barrier: it reads the word and takes part in the present phase. Only the conductor waits, and
only for tasks, never for threads: on a busy machine some may not be scheduled at all. A task gives the same bytes on every thread.

Each group of a few threads has its own word for its share of the tasks, and a count of the tasks that its threads finished. So the threads of different
groups do not contend for a cache line. When a group has no tasks left, its threads claim those of other groups.

If memory has nodes (NUMA), a page belongs to the node of the thread that first writes to it, and the threads of that node read it faster. So each group
belongs to one node, its threads are bound to that node, and they pack the weights of the outputs that the group claims first. KV and activations are not
placed: at decode they are small compared with weights.
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
"""Places in the control array (int64): the flag that asks all threads to stop; then two cache lines for each group, its word and the number of tasks
that its threads have finished (only grows); then the parked flag of each thread, a line apart."""

THREADS_A_GROUP = 8
"""Most threads of a group. Raising it: more threads contend for a cache line. Lowering it: the conductor posts and reads more lines, and threads claim
more tasks from other groups."""

TASK_BITS, LAYER_BITS, KIND_BITS = 20, 12, 8
"""Bits of a word's fields. From the low end: next task, number of tasks, layer, kind. In a new phase next is 0, in a claimed one at least the share."""

SPINS_BEFORE_YIELD = 4000

give_way = types.ExternalFunction("sched_yield", types.int32())
"""Yield the processor to another thread (POSIX)."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
"""Number of the futex system call; 0: unknown here."""
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 1 << 30
_SLEEP = np.array([0, 1_000_000], np.int64)
"""Longest sleep of a thread at a word (struct timespec, 1 ms). Raising it: a thread notices later that its batch was given up."""
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
    """Sleep until the word at an address differs from `seen`, for at most `_SLEEP`. Processes that share the memory can wake one another."""
    if _FUTEX:
        _system_call(_FUTEX, word, _FUTEX_WAIT, seen & 0xFFFFFFFF, _SLEEP.ctypes.data, 0, 0)
    else:
        give_way()


@inner
def wake_at(word):
    """Wake all threads that sleep at a word, after a change of it."""
    if _FUTEX:
        _system_call(_FUTEX, word, _FUTEX_WAKE, _ALL, 0, 0, 0)


@inner
def phase_of(control, group):
    """Return the address of a group's word."""
    return control + 8 * (GROUPS_AT + 2 * WORD * group)


@inner
def share_of(count, group, groups):
    """Return a group's range [first, stop) of `count` tasks. If there are fewer tasks than groups, only some groups get one."""
    return (count * group + groups - 1) // groups, (count * (group + 1) + groups - 1) // groups


@inner
def post(control, kind, layer, count, groups):
    """Start a phase. The phase before it must be finished."""
    word = ((kind << LAYER_BITS | layer) << TASK_BITS | count) << TASK_BITS
    for group in range(groups):
        store_release(phase_of(control, group), word)


@inner
def claim(control, own, groups):
    """Claim a task, first from a thread's own group, then from others. Returns (task, word of its phase), or (-1, word of the own group as last seen)."""
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
    """Return (next task, number of tasks) of a phase's word."""
    mask = (1 << TASK_BITS) - 1
    return word & mask, word >> TASK_BITS & mask


@inner
def kind_and_layer(word):
    rest = word >> (2 * TASK_BITS)
    return rest >> LAYER_BITS & ((1 << KIND_BITS) - 1), rest & ((1 << LAYER_BITS) - 1)


@inner
def finish(control, own):
    """Count a claimed task as finished by a thread of group `own`."""
    fetch_add(phase_of(control, own) + 8 * WORD, 1)


@inner
def wait_for(control, done, groups):
    """Spin until the groups have finished `done` tasks in all."""
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
    """Load the int32 at an address, widened to int64."""

    def body(e: Emit, args: Sequence[Value]) -> Value:
        return e.b.sext(e.load(I32, args[0], align=4), I64)

    return lowered(body, types.int64, types.int64)


def nodes(system: Path = Path("/sys/devices/system/node")) -> list[frozenset[int]]:
    """Return the processors of each NUMA node that this process may use.

    Empty if the system reports fewer than two nodes, or if they differ in size, because every node runs the same number of threads.
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
    """Return the processors in a list such as 0-3,8."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {processor for ends in ranges for processor in range(int(ends[0]), int(ends[-1]) + 1)}


def groups_of(threads: int, n_nodes: int) -> int:
    """Return the number of groups of a team: equally many for each node, with at most `THREADS_A_GROUP` threads each."""
    n_nodes = min(max(1, n_nodes), threads)
    return n_nodes * -(-threads // (n_nodes * THREADS_A_GROUP))


def node_of(part: int, parts: int, n_nodes: int) -> int:
    """Return the node of a thread, as number `part` of a team's `parts` threads; or of an output, among a product's."""
    return part * n_nodes // parts


def bind(node: frozenset[int]) -> None:
    """Bind this thread, and threads that it starts, to a node's processors."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # if it is refused, the system places the thread
            os.sched_setaffinity(0, node)
