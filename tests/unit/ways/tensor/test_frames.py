"""A command reaches a rank's kernels as it was given, or not at all."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.fakes.seeded_models import TINY

from paceline.backends import cpu

if not cpu.runs_here():
    pytest.skip("this processor has no AVX2", allow_module_level=True)

from paceline.backends.cpu.shares import deal
from paceline.core.errors import StreamCorrupt
from paceline.core.ids import BlockId
from paceline.core.model import LayerRange
from paceline.engine.local import row_plan
from paceline.net.tensor.incoming import TensorMessage
from paceline.ways.tensor.frames import RankCommand, block_message, read_command, read_number, write_command
from paceline.ways.tensor.memory import Command, GroupMemory, make_memory
from paceline.ways.tensor.rank import EXPORT, IMPORT, block_request
from paceline.ways.tensor.sizes import GroupSizes

SIZES = GroupSizes(TINY, deal(TINY, (1.0, 1.0)), 32, 8, 4)
LAYERS, N_BLOCKS = TINY.all_layers, 50
ROWS = TINY.hidden
"""Numbers of a row; behind those of all rows are columns: rows, first positions, paths and tables of two sequences."""


@pytest.fixture
def memory() -> Iterator[GroupMemory]:
    fd = make_memory(SIZES)
    yield GroupMemory(fd, SIZES)
    os.close(fd)


def given(memory: GroupMemory) -> TensorMessage:
    x_TD = np.arange(3 * ROWS, dtype=np.uint16).reshape(3, -1)
    tables_SB = np.array([[7, 3], [9, -1]], np.int32)
    memory.give_layers(x_TD, row_plan([1, 2], [20, 0], [1, 0], tables_SB), LayerRange(1, 2), 40)
    return TensorMessage(*write_command(memory))


def read(memory: GroupMemory, message: TensorMessage) -> RankCommand:
    return read_command(message, memory, LAYERS, N_BLOCKS)


def test_a_batch_crosses(memory: GroupMemory) -> None:
    found = read(memory, given(memory))
    assert (found.command, found.layers, found.exchange) == (Command.LAYERS, LayerRange(1, 2), 40)
    assert (found.x_TD == memory.x_TD).all()
    assert found.plan is not None
    for name in ("row_start_S", "n_rows_S", "first_position_S", "path_S", "tables_SB"):
        assert (getattr(found.plan, name) == getattr(memory.plan, name)).all(), name


def test_rows_whose_logits_are_wanted_cross(memory: GroupMemory) -> None:
    memory.give_head(np.full((2, ROWS), 9, np.uint16), 41)
    found = read(memory, TensorMessage(*write_command(memory)))
    assert (found.command, found.plan, found.exchange, found.x_TD.shape) == (Command.HEAD, None, 41, (2, ROWS))


WORDS = ("command", "rows", "sequences", "width", "first", "stop", "exchange")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("command", Command.END), ("command", 99), ("rows", 0), ("rows", 33), ("rows", 4), ("sequences", 0), ("sequences", 4), ("width", 0),
        ("width", 9), ("first", -1), ("first", 2), ("stop", 3), ("exchange", -1), ("rows", -(1 << 62)), ("width", 1 << 62),
    ],
)  # fmt: skip
def test_words_that_make_no_sense_are_refused(memory: GroupMemory, word: str, value: int) -> None:
    message = given(memory)
    letter, *words = struct.unpack("<c7q", message.header)
    words[WORDS.index(word)] = value
    with pytest.raises(StreamCorrupt):
        read(memory, TensorMessage(struct.pack("<c7q", letter, *words), message.array))


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 0), (0, 2), (0, -1), (2, -1), (2, 1 << 30), (2, 2**31 - 1), (4, 2), (4, -1), (6, N_BLOCKS), (7, -1), (8, -2), (6, 2**31 - 1)],
)
def test_columns_that_make_no_sense_are_refused(memory: GroupMemory, place: int, value: int) -> None:
    message = given(memory)
    numbers = message.array.copy()
    numbers[3 * ROWS :].view(np.int32)[place] = value
    with pytest.raises(StreamCorrupt):
        read(memory, TensorMessage(message.header, numbers))


@pytest.mark.parametrize(
    "bad",
    [
        lambda message: TensorMessage(message.header[:-1], message.array),
        lambda message: TensorMessage(message.header, message.array[:-1]),
        lambda message: TensorMessage(message.header, message.array.view(np.float16)),
        lambda message: TensorMessage(message.header, message.array.reshape(1, -1)),
    ],
    ids=["header", "short", "dtype", "shape"],
)
def test_what_is_no_command_is_refused(memory: GroupMemory, bad: Callable[[TensorMessage], TensorMessage]) -> None:
    with pytest.raises(StreamCorrupt):
        read(memory, bad(given(memory)))


def test_what_asks_for_a_block_crosses_and_what_makes_no_sense_is_refused() -> None:
    nothing = np.empty(0, np.uint16)
    asks = block_request(EXPORT, BlockId(7), LayerRange(0, 2))
    assert block_message(TensorMessage(b"A" + asks, nothing), LAYERS, N_BLOCKS) == asks
    for bad in (
        b"E",
        b"W" + asks[1:],
        block_request(EXPORT, BlockId(N_BLOCKS), LAYERS),
        block_request(IMPORT, BlockId(0), LayerRange(1, 3)),
        block_request(IMPORT, BlockId(0), LayerRange(1, 1)),
    ):
        with pytest.raises(StreamCorrupt):
            block_message(TensorMessage(b"A" + bad, nothing), LAYERS, N_BLOCKS)
    with pytest.raises(StreamCorrupt):
        read_number(b"S")
