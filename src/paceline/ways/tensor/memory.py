"""Memory that the processes of a tensor group on one host have in common: what the ranks are to run, how far each is, and what they exchange.

The leader, rank 0, writes a command and raises its number; the others take it up, and say when they are done. A command stays as it is until all are.
Shapes: T rows of a batch, D hidden, S sequences, B blocks of the longest table.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.backends.cpu import team
from paceline.backends.cpu.exchange import exchange_bytes
from paceline.backends.cpu.sizes import CACHE_LINE
from paceline.core.model import LayerRange
from paceline.engine.local import Int32, RowPlan, row_plan
from paceline.ways.tensor.sizes import GroupSizes

_PAGE: Final = 4096
_WORD: Final = CACHE_LINE // 8
_COLUMNS: Final = 3
"""Of a batch's sequences: their rows, first positions and paths."""


class Command(IntEnum):
    """What all ranks do next."""

    NOTHING = 0
    LAYERS = 1
    HEAD = 2
    END = 3


class _At(IntEnum):
    """Places of the command's words (int64), on two cache lines; each rank's own words follow, a line each."""

    NUMBER = 0
    COMMAND = _WORD
    ROWS = _WORD + 1
    SEQUENCES = _WORD + 2
    WIDTH = _WORD + 3
    FIRST_LAYER = _WORD + 4
    STOP_LAYER = _WORD + 5
    EXCHANGE = _WORD + 6
    RANKS = 2 * _WORD


_DONE, _SLEEPS = 0, 1
"""Places of a rank's words: the last command it is done with, and whether it must be woken."""
_GIVEN_UP, _CROWDED = 0, 1
"""Places of the words behind those that say how far ranks are (`Exchange.arrived`)."""


class GroupMemory:
    """As one process has mapped it.

    Args:
        fd: of `make_memory`; it stays the caller's.
    """

    def __init__(self, fd: int, sizes: GroupSizes) -> None:
        self.sizes = sizes
        self._map = mmap.mmap(fd, group_bytes(sizes))
        whole = np.frombuffer(self._map, np.uint8)
        words, x, columns, tables, exchange = np.split(whole, np.cumsum(_parts(sizes))[:-1])
        self._words = words.view(np.int64)
        self._x_TD: npt.NDArray[np.uint16] = x.view(np.uint16)[: sizes.max_rows * sizes.spec.hidden].reshape(-1, sizes.spec.hidden)
        self._columns: Int32 = columns.view(np.int32)[: _COLUMNS * sizes.max_rows].reshape(_COLUMNS, -1)
        self._tables_SB: Int32 = tables.view(np.int32)[: sizes.max_rows * sizes.max_blocks].reshape(sizes.max_rows, -1)
        self.exchange = exchange
        self._words_at, self._exchange_at = int(self._words.ctypes.data), int(exchange.ctypes.data)
        self._flags: npt.NDArray[np.int64] = exchange[CACHE_LINE * len(sizes.shares) :][:CACHE_LINE].view(np.int64)
        self._arrived: npt.NDArray[np.int64] = exchange[: CACHE_LINE * len(sizes.shares)].view(np.int64)[::_WORD]

    @property
    def number_address(self) -> int:
        """Where the last command's number is."""
        return self._words_at + 8 * _At.NUMBER

    @property
    def number(self) -> int:
        return int(self._words[_At.NUMBER])

    @property
    def command(self) -> Command:
        return Command(int(self._words[_At.COMMAND]))

    @property
    def exchange_number(self) -> int:
        """The exchange that the group was at when the command was given."""
        return int(self._words[_At.EXCHANGE])

    @property
    def layers(self) -> LayerRange:
        return LayerRange(int(self._words[_At.FIRST_LAYER]), int(self._words[_At.STOP_LAYER]))

    @property
    def words(self) -> npt.NDArray[np.int64]:
        """Of the command that was given last, its number aside."""
        return self._words[_At.COMMAND : _At.EXCHANGE + 1]

    @property
    def x_TD(self) -> npt.NDArray[np.uint16]:
        return self._x_TD[: int(self._words[_At.ROWS])]

    @property
    def rows_R(self) -> Int32:
        """Rows whose logits are wanted: all of `x_TD`."""
        return np.arange(int(self._words[_At.ROWS]), dtype=np.int32)

    @property
    def plan(self) -> RowPlan:
        n, width = int(self._words[_At.SEQUENCES]), int(self._words[_At.WIDTH])
        counts, firsts, paths = self._columns[:, :n].tolist()
        return row_plan(counts, firsts, paths, self._tables_SB[:n, :width])

    def give_layers(self, x_TD: npt.NDArray[np.uint16], plan: RowPlan, layers: LayerRange, exchange: int) -> None:
        """Put a batch where all ranks find it, and let them begin."""
        n, width = plan.tables_SB.shape
        self._columns[:, :n] = plan.n_rows_S, plan.first_position_S, plan.path_S
        self._tables_SB[:n, :width] = plan.tables_SB
        self._words[[_At.SEQUENCES, _At.WIDTH, _At.FIRST_LAYER, _At.STOP_LAYER]] = n, width, layers.start, layers.stop
        self._give(Command.LAYERS, x_TD, exchange)

    def give_head(self, x_RD: npt.NDArray[np.uint16], exchange: int) -> None:
        """Likewise, of rows whose logits are wanted."""
        self._give(Command.HEAD, x_RD, exchange)

    def give_end(self) -> None:
        self._give(Command.END, self._x_TD[:0], 0)

    def _give(self, command: Command, x_TD: npt.NDArray[np.uint16], exchange: int) -> None:
        self._x_TD[: len(x_TD)] = x_TD
        self._words[[_At.COMMAND, _At.ROWS, _At.EXCHANGE]] = command, len(x_TD), exchange
        self._set(self.number_address, self.number + 1)

    @property
    def arrived(self) -> list[int]:
        """The exchange that each rank has reached."""
        return self._arrived.tolist()

    def say_arrived(self, rank: int, exchange: int) -> None:
        """A rank on another machine has reached an exchange; what it leaves there is written."""
        self._set(self._exchange_at + CACHE_LINE * rank, exchange)

    def await_arrival(self, rank: int, exchange: int) -> bool:
        """Wait for a rank to reach an exchange, for a moment. Returns whether it has."""
        arrived = int(self._arrived[rank])
        return arrived >= exchange or (
            self.await_word(self._exchange_at + CACHE_LINE * rank, arrived) and int(self._arrived[rank]) >= exchange
        )

    def await_word(self, address: int, seen: int) -> bool:
        """Wait until one of these words is another than `seen`. False where it stays that for a while."""
        return team.await_word(address, seen, self._flags[_CROWDED])

    def _set(self, address: int, value: int) -> None:
        team.set_word(address, value, self._flags[_CROWDED])

    def say_crowded(self, crowded: bool) -> None:
        """Whether those who meet here have no core each, and who waits is to sleep: on a core that they share, who yields may get it back for a slice of
        milliseconds, and the one that is waited for does without.
        """
        self._flags[_CROWDED] = crowded

    @property
    def is_given_up(self) -> bool:
        """Whether what all ranks are at is void."""
        return bool(self._flags[_GIVEN_UP])

    def give_up(self) -> None:
        """Have all ranks end what they are at: it is void."""
        self._flags[_GIVEN_UP] = 1

    def withdraw(self) -> None:
        """What was given up is over in all ranks."""
        self._flags[_GIVEN_UP] = 0

    def done(self, rank: int) -> int:
        """The last command that a rank is done with."""
        return int(self._words[_At.RANKS + _WORD * rank + _DONE])

    def done_address(self, rank: int) -> int:
        """Where that is."""
        return self._words_at + 8 * (_At.RANKS + _WORD * rank + _DONE)

    def say_done(self, rank: int, number: int) -> None:
        self._set(self.done_address(rank), number)

    def sleeps(self, rank: int) -> bool:
        """Whether a rank waits to be woken."""
        return bool(self._words[_At.RANKS + _WORD * rank + _SLEEPS])

    def say_sleeps(self, rank: int, sleeps: bool) -> None:
        self._set(self._words_at + 8 * (_At.RANKS + _WORD * rank + _SLEEPS), int(sleeps))


def make_memory(sizes: GroupSizes) -> int:
    """A file descriptor of zeroed memory that no path leads to. Its pages are taken when they are first used."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("paceline-tensor")
    else:
        fd, path = tempfile.mkstemp("paceline-tensor")
        Path(path).unlink()
    os.ftruncate(fd, group_bytes(sizes))
    return fd


def _parts(sizes: GroupSizes) -> list[int]:
    """Bytes of what lies one after the other, each in whole pages."""
    rows = sizes.max_rows
    parts = [
        8 * (_At.RANKS + _WORD * len(sizes.shares)),
        2 * rows * sizes.spec.hidden,
        4 * _COLUMNS * rows,
        4 * rows * sizes.max_blocks,
        exchange_bytes(sizes.spec, sizes.shares, rows, sizes.logits_rows),
    ]
    return [-(-part // _PAGE) * _PAGE for part in parts]


def group_bytes(sizes: GroupSizes) -> int:
    """What a group's memory takes, weights and KV apart."""
    return sum(_parts(sizes))
