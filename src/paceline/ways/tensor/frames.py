"""What goes over the tensor streams between a group and a rank on another machine: a letter and whole numbers of 8 bytes, then an array.

Not messages of the schema, for the reason that a pipeline's batches are none: each token waits for two of them a layer.
Shapes: T rows of a batch, D hidden, S sequences, B blocks of the longest table.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.core.errors import StreamCorrupt
from paceline.core.model import BLOCK_TOKENS, LayerRange
from paceline.engine.local import RowPlan, row_plan
from paceline.net.tensor.incoming import TensorMessage
from paceline.ways.tensor.memory import Command, GroupMemory
from paceline.ways.tensor.rank import EXPORT, HEADER, IMPORT, read_block_request

COMMAND, SUMS, GIVE_UP, DONE, ASK, BLOCK = b"C", b"S", b"G", b"D", b"A", b"B"
_WORDS: Final = struct.Struct("<c7q")
_NUMBER: Final = struct.Struct("<cq")
NOTHING: Final = np.empty(0, np.uint16)
_PATHS: Final = 2


@dataclass(frozen=True, slots=True)
class RankCommand:
    """A command, as it crosses."""

    command: Command
    x_TD: npt.NDArray[np.uint16]
    exchange: int
    """That the group was at."""
    layers: LayerRange
    plan: RowPlan | None
    """Of layers."""


def numbered(letter: bytes, number: int) -> bytes:
    return _NUMBER.pack(letter, number)


def read_number(header: bytes) -> int:
    """Raises StreamCorrupt: it has none."""
    if len(header) != _NUMBER.size:
        raise StreamCorrupt(f"{len(header)} bytes where a number was to come")
    return int(_NUMBER.unpack(header)[1])


def write_command(memory: GroupMemory) -> tuple[bytes, npt.NDArray[np.uint16]]:
    """The command that a group's memory has."""
    parts = [memory.x_TD.reshape(-1)]
    if memory.command is Command.LAYERS:
        plan = memory.plan
        columns = np.concatenate((plan.n_rows_S, plan.first_position_S, plan.path_S, plan.tables_SB.reshape(-1)))
        parts.append(columns.astype("<i4").view(np.uint16))
    return _WORDS.pack(COMMAND, *memory.words.tolist()), np.concatenate(parts)


def read_command(message: TensorMessage, memory: GroupMemory, layers: LayerRange, n_blocks: int) -> RankCommand:
    """What `write_command` wrote, held against what a rank has.

    Args:
        memory: the rank's own.
        layers, n_blocks: that the rank has.

    Raises:
        StreamCorrupt: it is something else, or asks for what is not there.
    """
    sizes, data = memory.sizes, message.array
    if len(message.header) != _WORDS.size or data.dtype != np.uint16 or data.ndim != 1:
        raise StreamCorrupt(f"{len(message.header)} bytes and {data.dtype} of shape {data.shape} are no command")
    _, command, rows, n, width, first, stop, exchange = _WORDS.unpack(message.header)
    is_layers = command == Command.LAYERS
    if command not in {Command.LAYERS, Command.HEAD} or exchange < 0:
        raise StreamCorrupt(f"A rank does not do command {command} at exchange {exchange}")
    if not 0 < rows <= (sizes.max_rows if is_layers else sizes.logits_rows):
        raise StreamCorrupt(f"A command of {rows} rows; {sizes.max_rows}, and {sizes.logits_rows} with logits, are taken")
    part = LayerRange(first, stop) if is_layers else layers
    if not (layers.start <= part.start < part.stop <= layers.stop):
        raise StreamCorrupt(f"Layers {first} to {stop} of a rank that has {layers.words}")
    if is_layers and not (0 < n <= rows and 0 < width <= sizes.max_blocks):
        raise StreamCorrupt(f"A batch of {n} sequences with {width} blocks")
    beside = n * (3 + width) if is_layers else 0
    x = rows * sizes.spec.hidden
    if len(data) != x + 2 * beside:
        raise StreamCorrupt(f"A command of {rows} rows, {n} sequences and {width} blocks with {len(data)} numbers")
    plan = _checked(data[x:].view("<i4"), n, width, rows, n_blocks) if is_layers else None
    return RankCommand(Command(command), data[:x].view(np.uint16).reshape(rows, -1), exchange, part, plan)


def _checked(columns: npt.NDArray[np.int32], n: int, width: int, rows: int, n_blocks: int) -> RowPlan:
    """A plan within the rank's memory: kernels look at nothing."""
    counts, firsts, paths = columns[: 3 * n].reshape(3, n)
    tables_SB = columns[3 * n :].reshape(n, width).astype(np.int32)
    needed_S = -(-(firsts.astype(np.int64) + counts) // BLOCK_TOKENS)
    sound = (counts > 0).all() and (firsts >= 0).all() and int(counts.sum()) == rows and ((paths >= 0) & (paths < _PATHS)).all()
    if not sound or (needed_S > width).any() or (tables_SB >= n_blocks).any():
        raise StreamCorrupt("A batch whose rows, positions, paths or blocks make no sense")
    if ((tables_SB < 0) & (np.arange(width) < needed_S[:, None])).any():
        raise StreamCorrupt("A batch of sequences that lack blocks")
    return row_plan(counts.tolist(), firsts.tolist(), paths.tolist(), tables_SB)


def block_message(message: TensorMessage, layers: LayerRange, n_blocks: int) -> bytes:
    """What asks a rank for a block, as it asks a process (`rank.block_request`).

    Args:
        layers, n_blocks: that the rank has.

    Raises:
        StreamCorrupt: it is something else, or asks for what is not there.
    """
    asked = message.header[1:]
    if len(asked) != HEADER or asked[:1] not in {EXPORT, IMPORT} or message.array.dtype != np.uint16:
        raise StreamCorrupt("What asks for a block names none")
    block, part = read_block_request(asked)
    if block >= n_blocks or not layers.start <= part.start < part.stop <= layers.stop:
        raise StreamCorrupt(f"Block {block} of layers {part.words}, of a rank that has {n_blocks} of {layers.words}")
    return asked + message.array.tobytes()
