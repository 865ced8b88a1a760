"""What ranks leave crosses a pair of real TLS streams whole, in compiled code and without, whatever else comes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from tests.fakes.fleets import TestFleet
from tests.fakes.seeded_models import TINY
from tests.unit.net.tensor.meeting import meeting, soon

from paceline.backends import cpu

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from paceline.backends.cpu import crossing
from paceline.backends.cpu.exchange import Exchange
from paceline.backends.cpu.shares import deal
from paceline.core.errors import StreamClosed, StreamCorrupt, StreamStalled, TensorStreamError
from paceline.core.model import BLOCK_TOKENS
from paceline.engine.local import row_plan
from paceline.net.tensor import native
from paceline.net.tensor.ends import TensorReceiver, TensorSender
from paceline.net.tensor.frames import CODES, starts
from paceline.ways.tensor import frames
from paceline.ways.tensor.crossing import Crossing
from paceline.ways.tensor.memory import Command, GroupMemory, make_memory
from paceline.ways.tensor.process import RankProcess
from paceline.ways.tensor.pump import GroupPump, Pump, RankPump
from paceline.ways.tensor.rank import GroupSizes

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


COMPILED = {"both compiled": (True, True), "the first one": (True, False), "the other one": (False, True), "neither": (False, False)}


@pytest.fixture(params=COMPILED)
def sides(
    request: pytest.FixtureRequest, streams: Ends, memories: tuple[GroupMemory, GroupMemory], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Side, Side]]:
    """Both pumps at work; who waits on the first one's side sleeps."""
    (sends, its_receives), (its_sends, receives) = streams
    process = cast("RankProcess", NoProcess())
    memories[0].say_crowded(True)
    made: list[Side] = []
    with ExitStack() as undo:
        for rank, compiled in enumerate(COMPILED[request.param]):
            if not compiled:
                for end in ((sends, receives), (its_sends, its_receives))[rank]:
                    monkeypatch.setattr(end._pipe, "native", None)
            if rank == 0:
                pump: Pump = GroupPump(memories[0], 1, sends, receives, lambda _: None)
            else:
                pump = RankPump(process, memories[1], LAYERS, 1000, its_sends, its_receives, lambda _: None)
            assert pump._crossing.is_possible == compiled
            pump.start()
            undo.callback(pump.close)
            made.append(Side(rank, memories[rank], pump))
        yield made[0], made[1]


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


def lone(memory: GroupMemory, streams: Ends, stalled_s: float = 100.0) -> tuple[Crossing, TensorSender]:
    """A rank's side, and who sends to it."""
    (sends, receives), (its_sends, _) = streams
    exchange = Exchange(TINY, SIZES.shares, 1, memory.exchange, SIZES.max_rows)
    crossing.prepare()
    made = Crossing(
        memory,
        its_sends,
        receives,
        [1],
        [0],
        lambda half, rows, rank: exchange.sums_of(rank, bool(half))[:, :rows],
        look_s=0.001,
        stalled_s=stalled_s,
    )
    assert made.is_possible
    return made, sends


@pytest.mark.parametrize("header", [frames.numbered(frames.SUMS, 2), b"G"], ids=["of another exchange", "of another kind"])
def test_what_is_no_sum_is_the_next_message(memories: tuple[GroupMemory, GroupMemory], streams: Ends, header: bytes) -> None:
    made, sends = lone(memories[1], streams)
    sends.send(header, np.ones(3, np.uint16), soon())
    assert not made.run(1, [False, True], 3, lambda: None)
    message = streams[0][1].receive(soon())
    assert (message.header, message.array.tolist()) == (header, [1, 1, 1])


def cut_off(sends: TensorSender) -> None:
    sends._pipe.close()


def within(sends: TensorSender) -> None:
    """A frame's data, and no frame behind it."""
    (start, n), *_ = starts(frames.numbered(frames.SUMS, 1), 4 * TINY.hidden * MANY, CODES[np.dtype(np.float32)], (1, MANY, TINY.hidden))
    sends._pipe.send(start + bytes(n) + b"\xff" * 9, soon())


def half_of_one(sends: TensorSender) -> None:
    (start, _), *_ = starts(frames.numbered(frames.SUMS, 1), 4 * TINY.hidden * MANY, CODES[np.dtype(np.float32)], (1, MANY, TINY.hidden))
    sends._pipe.send(start + bytes(100), soon())


@pytest.mark.parametrize(
    ("does", "error", "stalled_s"),
    [(cut_off, TensorStreamError, 100.0), (within, StreamCorrupt, 100.0), (half_of_one, StreamStalled, 0.01)],
)
def test_a_stream_that_breaks_says_so(
    memories: tuple[GroupMemory, GroupMemory],
    streams: Ends,
    does: Callable[[TensorSender], None],
    error: type[TensorStreamError],
    stalled_s: float,
) -> None:
    made, sends = lone(memories[1], streams, stalled_s)
    does(sends)
    with pytest.raises(error):
        made.run(1, [False], MANY, lambda: None)
    with pytest.raises(StreamClosed):
        made.run(1, [False], MANY, lambda: None)


def test_a_socket_that_is_kept_in_another_way_is_not_lent(streams: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sock = streams[0][0]._pipe._sock
    assert native.native_of(sock) is not None
    assert native.lends_here()
    with monkeypatch.context() as patched:
        patched.setattr(native, "_HEAD", native._HEAD + 8)
        assert native.native_of(sock) is None
        assert not native.lends_here()


@pytest.mark.parametrize("differs", ["within itself", "another library", "another version of Python", "no CPython"])
def test_of_an_interpreter_that_is_not_known_nothing_is_lent(differs: str, streams: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sock = streams[0][0]._pipe._sock
    match differs:
        case "within itself":  # as interpreters are that link the TLS library statically
            monkeypatch.delattr("_ssl.__file__")
        case "another library":
            monkeypatch.setattr("ssl.OPENSSL_VERSION", "OpenSSL 9.9.9")
        case "another version of Python":
            monkeypatch.setattr("sys.version_info", (3, 99))
        case _:
            monkeypatch.setattr("sys.implementation", SimpleNamespace(name="pypy"))
    native._library.cache_clear()
    try:
        assert native.native_of(sock) is None
        assert not native.lends_here()
    finally:
        native._library.cache_clear()
