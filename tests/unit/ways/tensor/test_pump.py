"""Sums of two ranks cross a pair of real TLS streams whole, and a command that is called off leaves the streams in step."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import pytest
from tests.fakes.fleets import TestFleet
from tests.fakes.seeded_models import TINY
from tests.unit.net.tensor.meeting import meeting, soon

from paceline.backends import cpu

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from paceline.backends.cpu.exchange import Exchange
from paceline.backends.cpu.shares import deal
from paceline.core.model import BLOCK_TOKENS
from paceline.engine.local import row_plan
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.ways.tensor.memory import Command, GroupMemory, make_memory
from paceline.ways.tensor.process import RankProcess
from paceline.ways.tensor.pump import GroupPump, Pump, RankPump
from paceline.ways.tensor.sizes import GroupSizes

MANY = 1 + (1 << 20) // (4 * TINY.hidden)
"""Rows whose sums take more than one frame."""
SIZES = GroupSizes(TINY, deal(TINY, (1.0, 1.0)), MANY, -(-MANY // BLOCK_TOKENS), 4)
LAYERS = TINY.all_layers


class NoProcess:
    """Stands where a pump has its rank's process, which is the test."""

    class order:  # noqa: N801 - as a rank's process has it
        rank = 1

    gone = None

    def wake(self) -> None: ...


@dataclass
class Side:
    rank: int
    memory: GroupMemory
    pump: Pump

    def sums(self, rank: int, half: bool, rows: int) -> np.ndarray:
        return Exchange(TINY, SIZES.shares, self.rank, self.memory.exchange, SIZES.max_rows).sums_of(rank, half)[:, :rows]


Ends = tuple[tuple[TensorSender, TensorReceiver], tuple[TensorSender, TensorReceiver]]


@pytest.fixture
def streams() -> Iterator[Ends]:
    """There and back."""
    with meeting(TestFleet()) as there, meeting(TestFleet()) as back:
        yield there.stream(), back.stream()


@pytest.fixture
def memories() -> Iterator[tuple[GroupMemory, GroupMemory]]:
    fds = [make_memory(SIZES) for _ in range(2)]
    yield GroupMemory(fds[0], SIZES), GroupMemory(fds[1], SIZES)
    for fd in fds:
        os.close(fd)


@pytest.fixture
def sides(streams: Ends, memories: tuple[GroupMemory, GroupMemory]) -> Iterator[tuple[Side, Side]]:
    """Both pumps at work. Threads that wait on the first side sleep."""
    (sends, its_receives), (its_sends, receives) = streams
    memories[0].say_crowded(True)
    group = GroupPump(memories[0], 1, sends, receives, lambda _: None)
    rank = RankPump(cast("RankProcess", NoProcess()), memories[1], LAYERS, 1000, its_sends, its_receives, lambda _: None)
    with ExitStack() as undo:
        for pump in (group, rank):
            pump.start()
            undo.callback(pump.close)
        yield Side(0, memories[0], group), Side(1, memories[1], rank)


def until(true: Callable[[], bool], pump: Pump) -> None:
    pause, until = threading.Event(), soon()
    while not true():
        assert not pump._closed
        assert soon(0) < until
        pause.wait(0.001)


def leave(side: Side, number: int, half: bool, rows: int) -> np.ndarray:
    """As a rank does."""
    left = side.sums(side.rank, half, rows)
    left[:] = np.random.default_rng((number, side.rank)).standard_normal(left.shape, np.float32)
    side.memory.say_arrived(side.rank, number)
    return left.copy()


def command(sides: tuple[Side, Side], rows: int, behind: int) -> None:
    """Give a batch, and have it reach the other side."""
    blocks = -(-rows // BLOCK_TOKENS)
    before = sides[1].memory.number
    plan = row_plan([rows], [0], [0], np.arange(blocks, dtype=np.int32)[None])
    sides[0].memory.give_layers(np.zeros((rows, TINY.hidden), np.uint16), plan, LAYERS, behind)
    sides[0].pump.wake()  # type: ignore[attr-defined]
    until(lambda: sides[1].memory.number != before, sides[1].pump)


def has_arrived(side: Side, number: int) -> bool:
    """The other one's rank."""
    return side.memory.arrived[1 - side.rank] >= number


def meet(sides: tuple[Side, Side], first: int, rows: int, count: int) -> None:
    for number in range(first, first + count):
        half = (number - first) % 2 == 1
        left = [leave(side, number, half, rows) for side in sides]
        for side, its in zip(sides, left[::-1], strict=True):
            until(partial(has_arrived, side, number), side.pump)
            assert (side.sums(1 - side.rank, half, rows) == its).all()


def test_sums_of_few_rows_and_of_many_cross_both_ways(sides: tuple[Side, Side]) -> None:
    behind = 7
    for rows in (3, MANY, 1):
        command(sides, rows, behind)
        meet(sides, behind + 1, rows, 2 * len(LAYERS))
        behind += 2 * len(LAYERS)
        until(lambda: sides[0].memory.done(1) == sides[0].memory.number, sides[0].pump)
    sides[0].memory.give_head(np.zeros((2, TINY.hidden), np.uint16), behind)
    sides[0].pump.wake()  # type: ignore[attr-defined]
    until(lambda: sides[1].memory.command is Command.HEAD, sides[1].pump)
    logits = [Exchange(TINY, SIZES.shares, side.rank, side.memory.exchange, MANY).logits[:2] for side in sides]
    logits[1][:] = np.arange(logits[1].size).reshape(logits[1].shape)
    for side in sides:
        side.memory.say_arrived(side.rank, behind + 1)
    until(lambda: sides[0].memory.arrived[1] > behind, sides[0].pump)
    own = SIZES.shares[1].vocab
    assert (logits[0][:, 16 * own.start : 16 * own.stop] == logits[1][:, 16 * own.start : 16 * own.stop]).all()
    assert not logits[0][:, : 16 * own.start].any()


def test_what_is_called_off_ends_between_two_exchanges_and_the_next_begins_anew(sides: tuple[Side, Side]) -> None:
    command(sides, MANY, 0)
    meet(sides, 1, MANY, 2)
    leave(sides[1], 3, False, MANY)
    sides[0].memory.give_up()
    until(lambda: sides[1].memory.is_given_up, sides[1].pump)
    sides[1].memory.say_done(1, sides[1].memory.number)
    until(lambda: sides[0].memory.done(1) == sides[0].memory.number, sides[0].pump)
    assert sides[0].memory.arrived[1] == 3
    sides[0].memory.withdraw()
    until(lambda: not sides[1].memory.is_given_up, sides[1].pump)
    command(sides, 3, 3)
    meet(sides, 4, 3, 2)
