# ruff: noqa: ANN001, ANN202
"""One exchange of two tensor ranks of one thread, as `bench/tensor.py --exchange` runs it: from when a rank begins to leave its partial sum of one row to
when it has the other's, with nothing between two exchanges.

Two processes. Over shared memory each is a rank. Over mutual TLS each is a rank and a node's pump, with memory that the other does not see: what two hosts
run on four cores.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Final, cast

import numpy as np
import numpy.typing as npt
from numba import njit, types
from tests.fakes.fleets import TestFleet
from tests.fakes.seeded_models import TINY

from paceline.backends.cpu import places
from paceline.backends.cpu.exchange import Exchange
from paceline.backends.cpu.shares import deal
from paceline.backends.cpu.step import meet
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, LayerRange
from paceline.engine.local import row_plan
from paceline.net.tensor.dialling import dial
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.net.tensor.listener import TensorListener
from paceline.net.trust.identity import Identity
from paceline.net.trust.refusals import Refusals
from paceline.ways.tensor.memory import GroupMemory, make_memory
from paceline.ways.tensor.process import RankProcess
from paceline.ways.tensor.pump import GroupPump, RankPump
from paceline.ways.tensor.sizes import GroupSizes

VALUES: Final = 576
rows = 1
"""Of a batch: set before anything is measured."""
LAYERS: Final = 100
"""Of a command, with two exchanges each."""
WARM: Final = 5
"""Commands before those that count."""
PATIENCE_S: Final = 60.0
_MONOTONIC: Final = 1

_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


@njit(nogil=True)
def _exchange(mine, its, my_others, its_others, sizes, buffers, batch, now, took_ns):
    """As many exchanges as there is room for their durations in, of one half and the other by turns. Returns how many came to their end."""
    seen = np.float32(0)
    for i in range(len(took_ns)):
        batch[places.EXCHANGE] += 1
        _clock(_MONOTONIC, now.ctypes.data)
        began = now[0] * 1_000_000_000 + now[1]
        for at in range(len(mine)):
            mine[at] = seen + at
        if not meet(sizes, buffers, batch):
            return i
        for at in range(len(its)):
            seen = max(seen, its[at])
        _clock(_MONOTONIC, now.ctypes.data)
        took_ns[i] = now[0] * 1_000_000_000 + now[1] - began
        mine, my_others, its, its_others = my_others, mine, its_others, its
    return len(took_ns)


@dataclass(frozen=True, slots=True)
class ExchangeFigures:
    """In microseconds."""

    p50: float
    p95: float


class _Looping:
    """A rank that does nothing but exchange.

    Args:
        memory: that it and whoever it meets see.
    """

    def __init__(self, memory: GroupMemory, rank: int) -> None:
        exchange = Exchange(memory.sizes.spec, memory.sizes.shares, rank, memory.exchange, memory.sizes.max_rows)
        self._sizes, self._buffers = np.zeros(places.N_SIZES, np.int64), np.zeros(places.N_BUFFERS, np.int64)
        self._sizes[[places.RANK, places.RANKS]] = rank, 2
        self._buffers[places.ARRIVED] = exchange.arrived
        self._batch, self._now = np.zeros(places.N_BATCH, np.int64), np.zeros(2, np.int64)
        self._planes = [exchange.sums_of(each, half)[0].reshape(-1) for half in (False, True) for each in (rank, 1 - rank)]

    @property
    def number(self) -> int:
        """Of the exchange that it is at."""
        return int(self._batch[places.EXCHANGE])

    def run(self, count: int) -> npt.NDArray[np.int64]:
        """Durations in nanoseconds."""
        took_ns = np.zeros(count, np.int64)
        if _exchange(*self._planes, self._sizes, self._buffers, self._batch, self._now, took_ns) != count:
            raise RuntimeError("an exchange was given up")
        return took_ns


class _NoProcess:
    """Stands where a pump has its rank's process, which is a thread here."""

    def __init__(self) -> None:
        self.order, self.gone = _Order(), None

    def wake(self) -> None: ...


class _Order:
    rank = 1


def _blocks() -> int:
    return -(-rows // BLOCK_TOKENS)


def _sizes() -> GroupSizes:
    """Two even ranks, each of which leaves one partial sum."""
    spec = replace(TINY, hidden=VALUES, n_layers=LAYERS, n_kv_heads=2)
    return GroupSizes(spec, deal(spec, (1.0, 1.0)), rows, _blocks(), 1)


def _never(_node: NodeId, _issued_at: int) -> bool:
    return False


@contextmanager
def _streams(own: Identity, other: Identity, pipe: Connection) -> Iterator[tuple[TensorSender, TensorReceiver]]:
    """Both, with the process at a pipe's other end."""
    listener = TensorListener(own, _never, SystemClock(), Refusals())
    try:
        expected = listener.expect() if (port := listener.start("127.0.0.1")) else None
        assert expected is not None
        pipe.send((port, expected.ticket))
        its_port, ticket = pipe.recv()
        deadline = time.perf_counter() + PATIENCE_S
        sender = dial([f"127.0.0.1:{its_port}"], other.member, ticket, own, _never, deadline)
        yield sender, expected.wait(deadline)
    finally:
        listener.close()


def _shared(rank: int, core: int, realtime: bool, memory_fd: int, commands: int, pipe: Connection) -> npt.NDArray[np.int64]:
    _begin(core, realtime)
    looping = _Looping(GroupMemory(memory_fd, _sizes()), rank)
    pipe.send(None)
    pipe.recv()
    return looping.run(2 * LAYERS * (WARM + commands))[2 * LAYERS * WARM :]


def _leads(core: int, realtime: bool, commands: int, own: Identity, other: Identity, pipe: Connection) -> npt.NDArray[np.int64]:
    """The first rank, over streams."""
    _begin(core, realtime)
    memory_fd = make_memory(sizes := _sizes())
    memory, took = GroupMemory(memory_fd, sizes), list[npt.NDArray[np.int64]]()
    memory.say_crowded(True)
    looping, plan, layers = _Looping(memory, 0), row_plan([rows], [0], [0], np.zeros((1, _blocks()), np.int32)), LayerRange(0, LAYERS)
    with _streams(own, other, pipe) as (sender, receiver):
        pump = GroupPump(memory, 1, sender, receiver, lambda _: None)
        pump.start()
        for _ in range(WARM + commands):
            memory.give_layers(np.zeros((rows, VALUES), np.uint16), plan, layers, looping.number)
            if memory.sleeps(1):
                pump.wake()
            took.append(looping.run(2 * LAYERS))
        pipe.send(None)
        pump.close()
    return np.concatenate(took[WARM:])


def _follows(core: int, realtime: bool, commands: int, own: Identity, other: Identity, pipe: Connection) -> None:
    """The other one, with the pump that a node runs for it."""
    _begin(core, realtime)
    memory = GroupMemory(make_memory(sizes := _sizes()), sizes)
    memory.say_crowded(True)
    looping, layers = _Looping(memory, 1), LayerRange(0, LAYERS)
    with _streams(own, other, pipe) as (sender, receiver):
        pump = RankPump(cast("RankProcess", _NoProcess()), memory, layers, 1, sender, receiver, lambda _: None)
        pump.start()
        seen = 0
        while seen < WARM + commands:
            if memory.await_word(memory.number_address, seen):
                seen = memory.number
                looping.run(2 * LAYERS)
                memory.say_done(1, seen)
        pipe.recv()
        pump.close()


def _begin(core: int, realtime: bool) -> None:
    """Have this process's threads run on a core from now on, and before all else."""
    os.sched_setaffinity(0, {core})
    if realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def measure(over: str, commands: int, *, realtime: bool) -> ExchangeFigures:
    """Both ranks of one figure, this process one of them. Compiled code is compiled before it forks.

    Args:
        realtime: ranks and pumps run before all else that the machine does, for the second that this takes. Wants root.
    """
    cores = sorted(os.sched_getaffinity(0))
    here, there = multiprocessing.Pipe()
    memory_fd = make_memory(_sizes())
    warm = GroupMemory(memory_fd, _sizes())
    warm.exchange[:] = 0
    warm.say_arrived(1, 4)
    _Looping(warm, 0).run(2)
    warm.await_word(warm.number_address, -1)
    warm.exchange[:] = 0
    fleet = TestFleet()
    own, other = fleet.member("leads"), fleet.member("follows")

    def second() -> None:
        if over == "shared memory":
            _shared(1, cores[-1], realtime, memory_fd, commands, there)
        else:
            _follows(cores[-1], realtime, commands, other, own, there)

    process = multiprocessing.get_context("fork").Process(target=second, daemon=True)
    process.start()
    try:
        if over == "shared memory":
            took_ns = _shared(0, cores[0], realtime, memory_fd, commands, here)
        else:
            took_ns = _leads(cores[0], realtime, commands, own, other, here)
        process.join(PATIENCE_S)
    finally:
        if realtime:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        process.kill()
        os.close(memory_fd)
        os.sched_setaffinity(0, cores)
    p50, p95 = (float(at) for at in np.percentile(took_ns / 1000, (50, 95)))
    return ExchangeFigures(p50, p95)
